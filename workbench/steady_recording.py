"""A recording of steady decoding at a standard workload: the spans and events of both runners, for the timeline.

    python -m workbench.steady_recording --workload B8,AT --out workbench/data

For people without the device that it was made on. Only what happens once a step is observed (SUMMARY_EVENTS): an event
for each token of 256 requests would slow down the host that the timeline is about. The snapshots are left empty: the
state of 256 requests would be most of the file, and the timeline does not look at it.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from engine import LLM
from engine.bench.runs import sampling_params
from engine.bench.step_costs import SUMMARY_EVENTS
from engine.bench.workloads import WorkloadSpec, choose
from engine.hooks import Event
from engine.snapshot import BlockTablesView, Snapshot

from .provenance import describe
from .recording import Recording, RunnerStep

STEPS = 20
WARM_UP_STEPS = 40
"""Steps before the recorded ones: every prompt is computed by then, and the decodes are in their stride."""


def record_steady(llms: Mapping[str, LLM], spec: WorkloadSpec, steps: int = STEPS) -> Recording:
    """`steps` steps of each runner's engine in the middle of `spec`. `llms`: "v1", "v2" -> engine.

    The engines are left empty. Raises ValueError if the workload is over before the steps are done, or has a prompt
    that is still being computed then.
    """
    runs = {name: _run(name, llm, spec, steps) for name, llm in llms.items()}
    any_llm = next(iter(llms.values()))
    about = {"workload": str(spec), "events": "once a step", "snapshots": "left out", "first_step": WARM_UP_STEPS + 1}
    meta = describe(any_llm) | about
    recording = Recording(meta=meta)
    for number in range(steps):
        recording.append({name: run[number] for name, run in runs.items()})
    return recording


def _run(name: str, llm: LLM, spec: WorkloadSpec, steps: int) -> list[RunnerStep]:
    assert name == "v1" or name == "v2", name
    core, workload = llm.core, spec.draw(0, llm.loaded.config.vocab_size)
    params = sampling_params(spec, workload)
    ids = [
        llm.add({"prompt_token_ids": list(ask.prompt_token_ids)}, one, final_only=True)
        for ask, one in zip(workload.asks, params, strict=True)
    ]
    try:
        for _ in range(WARM_UP_STEPS):
            llm.step()
        times: list[tuple[int, int, int]] = []
        with core.hooks.record(SUMMARY_EVENTS) as log:
            for _ in range(steps):
                begin = time.perf_counter_ns()
                llm.step()
                times.append((core.step_count, begin, time.perf_counter_ns()))
            core.drain()  # the last device spans come with it
        still = [r.request_id for r in core.scheduler.running if not r.num_output_tokens]
        if still or len(core.scheduler.running) < len(ids):
            raise ValueError(
                f"workload {spec}: after {WARM_UP_STEPS + steps} steps {len(core.scheduler.running)} of {len(ids)} "
                f"requests run and {len(still)} of them have no token yet; a steady stretch has all of them decoding"
            )
        state = _without_state(core.snapshot().result())
    finally:
        llm.abort(ids)
        while core.in_flight or core.scheduler.has_requests():
            llm.step()
    by_step: dict[int, list[Event]] = defaultdict(list)
    for event in log.take():
        by_step[event.step].append(event)
    return [
        RunnerStep(_name(name), number, state, state, tuple(by_step[step]), begin_ns=begin, end_ns=end)
        for number, (step, begin, end) in enumerate(times, start=1)
    ]


def _name(name: str) -> Literal["v1", "v2"]:
    return "v1" if name == "v1" else "v2"


def _without_state(snapshot: Snapshot) -> Snapshot:
    return dataclasses.replace(
        snapshot, requests=(), waiting=(), running=(), rows=(), block_tables=BlockTablesView((), (), ()), inputs=None,
        pool=dataclasses.replace(snapshot.pool, blocks=(), free=()), in_flight=(),
    )  # fmt: skip


def main(argv: list[str] | None = None) -> None:
    """Builds both engines over one copy of the weights, and writes a recording a workload."""
    parser = argparse.ArgumentParser(prog="python -m workbench.steady_recording", description=__doc__)
    parser.add_argument("--model", default="qwen3-0.6b")
    parser.add_argument("--load-format", default="dummy")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--workload", default="B8,AT", help="names with commas between (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("workbench/data"), help="folder (default: %(default)s)")
    parser.add_argument("--commit", help="the commit to name, where this is a copy without its .git")
    arguments = parser.parse_args(argv)
    specs = choose(arguments.workload)
    if not arguments.out.is_dir():
        parser.error(f"--out {arguments.out}: no such folder; make it first")
    keywords: dict[str, Any] = {"max_num_seqs": 256, "max_model_len": 4096, "max_num_batched_tokens": 16384}
    blocks = max(spec.blocks(16) for spec in specs)
    first = LLM(
        arguments.model, load_format=arguments.load_format, dtype=arguments.dtype, skip_tokenizer_init=True,
        use_v2_model_runner=False, num_gpu_blocks_override=blocks + 256, **keywords,
    )  # fmt: skip
    second = LLM(
        loaded=first.loaded, skip_tokenizer_init=True, use_v2_model_runner=True, num_gpu_blocks_override=blocks + 256,
        **keywords,
    )  # fmt: skip
    for spec in specs:
        recording = record_steady({"v1": first, "v2": second}, spec)
        if arguments.commit:
            recording.meta["commit"] = arguments.commit
        path = recording.save(arguments.out / f"{spec.name}.json.gz")
        print(f"{path}: {path.stat().st_size / 1024:,.0f} KiB, {recording.meta['device']}, {recording.meta['date']}")


if __name__ == "__main__":
    main()
