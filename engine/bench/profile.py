"""Ten steady steps under torch's profiler and the hooks at once, in one Chrome trace on one clock."""

from __future__ import annotations

import json
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, _ExperimentalConfig, profile, record_function

from engine.hooks import Event, HostWait, SpanEnded

from .runs import EngineRuns, sampling_params
from .step_costs import union
from .workloads import WorkloadSpec

STEPS = 10
_CLOCK = "runnerscope clock"
_HOOKS_PID = 2**22 + 1
"""Above any process id of Linux, so above any that the profiler writes."""
_LANES = {"host": 1, "compute": 2, "copy": 3}
_ON_DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_HOST_CALLS = frozenset({"cuda_runtime", "cuda_driver"})


@dataclass(frozen=True)
class Profile:
    """What the profiler saw of `steps` steps.

    Of one step: `launches`, the host's calls that start something on the device (a kernel, a graph, a copy);
    `kernels`, what ran there; `busy_us`, the time in which anything ran there. Without a GPU all are 0.
    """

    steps: int
    launches: float
    kernels: float
    busy_us: float
    trace: dict[str, Any]

    def save(self, path: Path) -> None:
        """Writes the trace for chrome://tracing or Perfetto."""
        path.write_text(json.dumps(self.trace), encoding="utf-8")


def profile_steps(engine: EngineRuns, spec: WorkloadSpec, steps: int = STEPS) -> Profile:
    """Starts the workload, lets every request get to its second token, profiles `steps` steps and gives up the rest.

    Fewer steps if the requests end before; ValueError if none is left to look at.
    """
    llm, workload = engine.llm, engine.draw(spec)
    core = llm.core
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if core.device.is_cuda else [])
    # A CPU's streams are threads, and the profiler would see the caller's alone.
    options = _ExperimentalConfig(profile_all_threads=not core.device.is_cuda)
    events: list[Event] = []
    ids = [
        llm.add({"prompt_token_ids": list(ask.prompt_token_ids)}, params)
        for ask, params in zip(workload.asks, sampling_params(spec, workload), strict=True)
    ]
    try:
        _settle(engine, set(ids))
        with profile(activities=activities):
            llm.step()  # the profiler's own start is slow
        core.drain()
        first = core.step_count
        with (
            profile(activities=activities, experimental_config=options) as profiler,
            llm.hooks.subscribe((SpanEnded, HostWait), events.append),
        ):
            marks = [_mark(number) for number in range(5)]
            while core.step_count < first + steps and core.has_unfinished():
                llm.step()
            core.drain()
        done = core.step_count - first
    finally:
        llm.abort(ids)
        while core.in_flight:
            llm.step()
    if not done:
        raise ValueError(f"{spec.name}: every request ended before a steady step; ask for longer outputs to profile")
    trace = _exported(profiler)
    trace["traceEvents"] += _hook_rows(events, core.hooks.runner, _offset_ns(trace["traceEvents"], marks))
    return Profile(done, *per_step(trace["traceEvents"], done), trace)


def _settle(engine: EngineRuns, waiting: set[str]) -> None:
    while waiting and engine.llm.core.has_unfinished():
        for output in engine.llm.step():
            if output.finished or len(output.outputs[0].token_ids) > 1:
                waiting.discard(output.request_id)


def _mark(number: int) -> int:
    """Now, on the hooks' clock, just before a mark on the profiler's."""
    now = time.perf_counter_ns()
    with record_function(f"{_CLOCK} {number}"):
        pass
    return now


def _exported(profiler: profile) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        exported: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return exported


def _offset_ns(rows: list[dict[str, Any]], marks: list[int]) -> float:
    """What to add to the hooks' clock to get the profiler's; the mark that was delayed least says it best."""
    found = {row["name"]: row["ts"] for row in rows if str(row.get("name", "")).startswith(_CLOCK) and "ts" in row}
    return min(found[f"{_CLOCK} {number}"] * 1e3 - mark for number, mark in enumerate(marks))


def _hook_rows(events: list[Event], runner: str, offset_ns: float) -> list[dict[str, Any]]:
    pid = _HOOKS_PID
    rows: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": f"hooks of {runner.upper()}"}},
        {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": -1}},
    ]
    rows += [
        {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": lane}}
        for lane, tid in _LANES.items()
    ]
    for event in events:
        if isinstance(event, SpanEnded):
            name, lane = event.name, event.lane
        elif isinstance(event, HostWait):
            name, lane = f"wait: {event.reason}", "host"
        else:
            continue
        times = {"ts": (event.begin_ns + offset_ns) / 1e3, "dur": (event.end_ns - event.begin_ns) / 1e3}
        row = {"ph": "X", "name": name, "cat": "hooks", "pid": pid, "tid": _LANES[lane], "args": {"step": event.step}}
        rows.append(row | times)
    return rows


def per_step(rows: list[dict[str, Any]], steps: int) -> tuple[float, float, float]:
    """Launches, kernels and busy µs of one step, from a Chrome trace's `rows` of `steps` steps; see `Profile`."""
    launches = sum(
        row.get("cat") in _HOST_CALLS and any(word in row["name"] for word in ("Launch", "Memcpy", "Memset"))
        for row in rows
    )
    ran = [row for row in rows if row.get("cat") in _ON_DEVICE]
    busy_ns = union((int(row["ts"] * 1e3), int((row["ts"] + row["dur"]) * 1e3)) for row in ran)
    kernels = sum(row["cat"] == "kernel" for row in ran)
    return launches / steps, kernels / steps, busy_ns / 1e3 / steps
