"""What observing costs the host of runner V2, in processor time of a steady step, on a CUDA that is only counted.

    OMP_NUM_THREADS=1 python -m tests.engine.observing_cost --requests 1,256

No device computes and no driver is called, so this is the engine's own Python: what a GPU's driver takes for a call
comes on top, as often as the calls are printed.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections import Counter, defaultdict
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from engine import LLM
from engine.bench.host_parts import time_steps
from engine.bench.runs import sampling_params
from engine.bench.step_costs import SUMMARY_EVENTS, StepCostObserver
from engine.bench.workloads import STANDARD, WorkloadSpec
from engine.hooks import Event
from engine.interrupts import deferred_interrupt
from tests.engine.counted_cuda import CountedCuda, counted_cuda

LEVELS = ("unobserved", "log, summary", "called, summary", "called, every event")
PERIOD = 16
"""Steps after which every request has got a new block: a stretch of whole periods is like any other."""


def observing(llm: LLM, level: str) -> AbstractContextManager[Any]:
    if level == "unobserved":
        return nullcontext()
    if level == "log, summary":
        return llm.hooks.record(SUMMARY_EVENTS)
    return llm.hooks.subscribe(SUMMARY_EVENTS if level == "called, summary" else Event, StepCostObserver())


def add_all(llm: LLM, spec: WorkloadSpec, number: int) -> None:
    workload = spec.draw(number, llm.loaded.config.vocab_size)
    for ask, params in zip(workload.asks, sampling_params(spec, workload), strict=True):
        llm.add({"prompt_token_ids": list(ask.prompt_token_ids)}, params, final_only=True)


def measure(llm: LLM, cuda: CountedCuda, spec: WorkloadSpec, repeats: int) -> None:
    took: dict[str, list[float]] = defaultdict(list)
    calls: dict[str, Counter[str]] = {}
    steps = 2 * PERIOD
    for repeat in range(repeats):
        add_all(llm, spec, repeat)
        with deferred_interrupt(), llm.core.device.scope():
            for _ in range(2 * PERIOD):
                llm.step()
            for level in itertools.chain(LEVELS, reversed(LEVELS)):
                with observing(llm, level):
                    for _ in range(PERIOD):
                        llm.step()
                    before, begin = Counter(cuda.calls), time.thread_time()
                    for _ in range(steps):
                        llm.step()
                    took[level].append((time.thread_time() - begin) / steps * 1e6)
                    calls[level] = cuda.calls - before
        llm.core.drain()
        while llm.core.has_unfinished():
            llm.step()
    add_all(llm, spec, repeats)
    with deferred_interrupt(), llm.core.device.scope():
        found = time_steps(llm.core, lambda: None)
    parts = ", ".join(f"{name} {us:.0f}" for name, us in found.processor.items())
    print(f"{spec.requests} requests, µs of a step in the middle half: {parts}")
    for level in LEVELS:
        low, alone = min(took[level]), min(took["unobserved"])
        asked = ", ".join(f"{name} {count / steps:.2f}" for name, count in calls[level].items())
        print(f"  {level:20} {low:7.1f} ({low - alone:+.1f}), median {statistics.median(took[level]):7.1f}; {asked}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", default="1,8,256")
    parser.add_argument("--repeats", type=int, default=4)
    arguments = parser.parse_args()
    length = 2 * PERIOD + 2 * len(LEVELS) * 3 * PERIOD + 8
    for requests in map(int, arguments.requests.split(",")):
        spec = STANDARD["B1"].resized(requests, 8, length)
        with counted_cuda() as cuda:
            llm = LLM(
                "tiny-qwen3", load_format="dummy", dtype="bfloat16", device="cpu", skip_tokenizer_init=True,
                use_v2_model_runner=True, max_num_seqs=requests, max_model_len=512, block_size=PERIOD,
                cudagraph_capture_sizes=(requests,), num_gpu_blocks_override=requests * (512 // PERIOD) + 8,
            )  # fmt: skip
            measure(llm, cuda, spec, arguments.repeats)
            llm.close()


if __name__ == "__main__":
    main()
