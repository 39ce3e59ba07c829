"""Runs of one engine, and its profile: every token made, waits as documented, one clock for hooks and profiler."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from engine.bench.profile import per_step, profile_steps
from engine.bench.runs import EngineRuns
from engine.bench.step_costs import SUMMARY_EVENTS
from engine.bench.workloads import STANDARD
from engine.hooks import Event, OutputDelivered, Sampled

pytestmark = pytest.mark.slow

SPEC = STANDARD["AT"].resized(4, 16, 20)


def test_a_run_waits_as_its_runner_does_and_hits_no_cache(engine: EngineRuns) -> None:
    first, second = engine.run(SPEC), engine.run(SPEC)
    assert first.cached_tokens == second.cached_tokens == first.preemptions == 0
    assert first.steps == second.steps >= SPEC.steps
    for run in (first, second):
        inside, outside = run.waits
        assert outside == {"output": SPEC.steps}
        assert inside == ({} if engine.llm.core.use_v2 else {"prepare_inputs": inside["prepare_inputs"]})
        assert 0 < run.cpu_seconds <= run.seconds * 1.05


def test_the_observer_at_summary_level_gets_no_event_for_each_token(engine: EngineRuns) -> None:
    seen: list[Event] = []
    engine.run(SPEC, SUMMARY_EVENTS, seen.append)
    assert seen and not any(isinstance(event, Sampled | OutputDelivered) for event in seen)
    costs = engine.step_costs(SPEC)
    assert costs.steps == SPEC.steps - 1
    assert costs.host.host_us > 0 and costs.observed_host_us > 0 and costs.device_us > 0 and costs.launches >= 1
    assert not engine.llm.hooks.wanted


def test_a_dropped_observer_is_an_error(engine: EngineRuns, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: object, event: Event) -> None:
        raise KeyError("lost")

    monkeypatch.setattr("engine.bench.step_costs.StepCostObserver.__call__", broken)
    with pytest.raises(RuntimeError, match="lost"):
        engine.step_costs(SPEC)


def test_the_trace_has_both_sources_on_one_clock(engine: EngineRuns, tmp_path: Path) -> None:
    """The operators that a stream's thread ran lie inside the spans that the hooks measured of that stream."""
    profile = profile_steps(engine, SPEC, steps=5)
    assert profile.steps == 5 and profile.launches == profile.kernels == profile.busy_us == 0
    profile.save(tmp_path / "trace.json")
    rows = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {(row["pid"], row["tid"]): row["args"]["name"] for row in rows if row.get("name") == "thread_name"}
    hooks = [row for row in rows if row.get("cat") == "hooks"]
    pid = hooks[0]["pid"]
    assert {names[pid, row["tid"]] for row in hooks} >= {"host", "compute"}
    assert len({row["args"]["step"] for row in hooks if row["name"] == "forward"}) == 5
    spans = [(row["ts"], row["ts"] + row["dur"]) for row in hooks if names[pid, row["tid"]] == "compute"]
    ops = [row for row in rows if row.get("cat") == "cpu_op"]
    stream = Counter(row["tid"] for row in ops).most_common(1)[0][0]
    ran = [(row["ts"], row["ts"] + row["dur"]) for row in ops if row["tid"] == stream]
    assert len(ran) > 100
    slack = 100  # µs: what the mark that was delayed least may still have been late
    inside = [any(begin - slack <= start and end <= until + slack for begin, until in spans) for start, end in ran]
    assert all(inside), f"{inside.count(False)} of {len(ran)} operators lie outside the spans"


def test_what_counts_as_a_launch_and_as_busy() -> None:
    """Rows as the profiler writes them on a GPU: two steps, of which the second overlaps a copy with a kernel."""

    def row(cat: str, name: str, ts: float, dur: float) -> dict[str, object]:
        return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur}

    rows = [
        row("cuda_runtime", "cudaGraphLaunch", 0, 7),
        row("cuda_driver", "cuLaunchKernelEx", 8, 3),
        row("cuda_runtime", "cudaLaunchKernel", 12, 3),
        row("cuda_runtime", "cudaMemcpyAsync", 16, 3),
        row("cuda_runtime", "cudaEventRecord", 20, 1),
        row("cpu_op", "aten::copy_", 16, 5),
        row("kernel", "attention", 10, 4),
        row("kernel", "attention", 20, 4),
        row("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 22, 6),
        row("hooks", "forward", 0, 100),
        {"ph": "M", "name": "process_name", "args": {}},
    ]
    assert per_step(rows, 2) == (2.0, 1.0, 6.0)


def test_profiling_leaves_the_engine_empty_and_needs_steps_to_look_at(engine: EngineRuns) -> None:
    profile_steps(engine, SPEC, steps=3)
    core = engine.llm.core
    assert not core.has_unfinished() and not core.in_flight and not core.hooks.wanted
    engine.run(SPEC)
    core.check_integrity()
    with pytest.raises(ValueError, match="longer outputs"):
        profile_steps(engine, STANDARD["A"].resized(2, 16, 2))
