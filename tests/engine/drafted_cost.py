"""What a step with drafts costs the host of runner V2, part by part, on a CUDA that is only counted.

    OMP_NUM_THREADS=1 python -m tests.engine.drafted_cost --requests 1,8,64,256 --drafts 0,1,7

No device computes: the counts of accepted drafts are drawn beforehand, and the host learns them with a step's output,
as it does from a drafter on a device. What a GPU's driver takes for a call comes on top.
"""

from __future__ import annotations

import argparse
import cProfile
import itertools
import pstats
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from engine import LLM, SamplingParams
from engine.core import EngineCore
from engine.interrupts import deferred_interrupt
from engine.output_processor import OutputProcessor
from engine.runner_v2 import buffers, row_ends
from engine.runner_v2.async_output import AsyncOutput, empty_tokens
from engine.runner_v2.batch_maker import BatchMaker
from engine.runner_v2.runner import ModelRunnerV2
from engine.runner_v2.sample import SamplerPlan
from engine.runner_v2.step_graphs import StepGraphs, StepSize
from engine.scheduler import Scheduler
from tests.engine.counted_cuda import counted_cuda

PARTS: dict[str, tuple[type, str]] = {
    "schedule": (Scheduler, "schedule"),
    "update states": (ModelRunnerV2, "update_states"),
    "make batch": (BatchMaker, "make"),
    "prepare inputs": (ModelRunnerV2, "prepare_inputs"),
    "submit": (ModelRunnerV2, "forward"),
    "sample_tokens": (ModelRunnerV2, "sample_tokens"),
    "get_output": (AsyncOutput, "get_output"),
    "take tokens": (Scheduler, "update_from_output"),
    "process": (OutputProcessor, "process"),
}
"""What is timed; `prepare inputs` is without `make batch`."""
_VARIANTS = 61
COLD_BYTES = 64 * 2**20
"""What is written before a step that begins with cold caches."""


class DrawnOutputs:
    """Each replay of a step with drafts gives tokens and counts that were drawn beforehand."""

    def __init__(self, num_drafts: int, acceptance: float) -> None:
        self._width, self._acceptance, self._random = num_drafts + 1, acceptance, np.random.default_rng(0)
        self._drawn: dict[StepSize, Iterator[dict[str, torch.Tensor]]] = {}

    def of(self, size: StepSize) -> dict[str, torch.Tensor]:
        if size not in self._drawn:
            self._drawn[size] = itertools.cycle([self._draw(size.num_reqs) for _ in range(_VARIANTS)])
        return next(self._drawn[size])

    def _draw(self, num_reqs: int) -> dict[str, torch.Tensor]:
        tokens, sampled, num_sampled = empty_tokens(num_reqs, self._width, torch.device("cpu"))
        accepted = self._random.random((num_reqs, self._width - 1)) < self._acceptance
        sampled.copy_(torch.from_numpy(self._random.integers(3, 300, (num_reqs, self._width))))
        num_sampled.copy_(torch.from_numpy(1 + np.cumprod(accepted, axis=1).sum(axis=1)))
        return {"tokens": tokens}


@contextmanager
def drafting_llm(requests: int, num_drafts: int, acceptance: float, **config: Any) -> Iterator[LLM]:
    spec = {"method": "dspark", "draft": "lookup", "num_speculative_tokens": num_drafts} if num_drafts else None
    drawn, replay = DrawnOutputs(num_drafts, acceptance), StepGraphs.replay

    def drawn_replay(graphs: StepGraphs, size: StepSize, plan: SamplerPlan) -> dict[str, torch.Tensor]:
        replay(graphs, size, plan)
        return drawn.of(size)

    with counted_cuda(), pytest.MonkeyPatch.context() as patch:
        for module in (buffers, row_ends):  # the device's, and nothing reads it here
            patch.setattr(module, "apply_write", lambda *args, **kwargs: None)
        patch.setattr(row_ends, "resolve_form", lambda form, tensor: "triton")
        patch.setattr(StepGraphs, "_mixed_sizes", lambda graphs: set())  # prompts are computed
        patch.setattr(StepGraphs, "replay", drawn_replay)
        llm = LLM(
            "tiny-qwen3", load_format="dummy", dtype="bfloat16", device="cpu", skip_tokenizer_init=True,
            use_v2_model_runner=True, max_num_seqs=requests, max_model_len=512, speculative_config=spec,
            cudagraph_capture_sizes=(requests,), num_gpu_blocks_override=requests * 33 + 8,
            max_num_batched_tokens=requests * (num_drafts + 30) + 64, **config,
        )  # fmt: skip
        try:
            yield llm
        finally:
            llm.close()


@contextmanager
def timed(took: dict[str, list[int]]) -> Iterator[None]:
    """Fills `took` with the ns of each call of PARTS."""

    def wrapped(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            begin = time.thread_time_ns()
            try:
                return method(*args, **kwargs)
            finally:
                took[name].append(time.thread_time_ns() - begin)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name, (owner, method) in PARTS.items():
            patch.setattr(owner, method, wrapped(name, getattr(owner, method)))
        yield


def fill(llm: LLM, requests: int, repeat: int, stop: bool, spread: int) -> None:
    """Lets all requests decode: some steps behind the prompts, of as many lengths as `spread` says and not seen in
    another repeat."""
    params = SamplingParams(temperature=0.0, max_tokens=480, ignore_eos=not stop, stop_token_ids=(2,) if stop else ())
    for number in range(requests):
        llm.add({"prompt_token_ids": [3 + (number * 7 + (1 + repeat) * i) % 300 for i in range(8 + number % spread)]},
                params, final_only=True)  # fmt: skip
    core = llm.core
    while core.scheduler.waiting or (core.scheduler.table.num_computed_tokens[core.scheduler.table.order] < 16).any():
        llm.step()


def run_steps(core: EngineCore, count: int, cold: np.ndarray | None = None) -> None:
    for _ in range(count):
        if cold is not None:
            cold += 1
        for _phase in core._advance():
            pass
        core.take_outputs()


def measure(requests: int, num_drafts: int, args: argparse.Namespace) -> None:
    took: dict[str, list[int]] = defaultdict(list)
    whole: list[int] = []
    steps = 16 * max(1, int(20 / (1 + num_drafts)))
    cold = np.zeros(COLD_BYTES, dtype=np.uint8) if args.cold else None
    with drafting_llm(requests, num_drafts, args.acceptance) as llm:
        core = llm.core
        for repeat in range(args.repeats):
            fill(llm, requests, repeat, args.stop, args.spread)
            with deferred_interrupt(), core.device.scope():
                run_steps(core, 16)
                with timed(took):
                    run_steps(core, steps // 2, cold)
                for _ in range(steps // 2):
                    begin = time.thread_time_ns()
                    run_steps(core, 1)
                    whole.append(time.thread_time_ns() - begin)
                if args.profile and repeat == 0:
                    profile = cProfile.Profile()
                    profile.enable()
                    run_steps(core, 16)
                    profile.disable()
                    pstats.Stats(profile).sort_stats("tottime").print_stats(args.profile)
            core.check_integrity()
            core.abort(list(core.output_processor._parents))
            while core.scheduler.has_requests() or core.in_flight:
                llm.step()
    parts = {name: _mean_of_most(ns) for name, ns in took.items()}
    parts["prepare inputs"] -= parts["make batch"]
    print(
        f"{requests:4} requests, {num_drafts} drafts: {statistics.median(whole) / 1e3:7.1f} median, "
        f"{_mean_of_most(whole):7.1f} mean, {min(whole) / 1e3:7.1f} least\n     ",
        ", ".join(f"{name} {us:.1f}" for name, us in parts.items()),
        flush=True,
    )


def _mean_of_most(ns: list[int]) -> float:
    """µs, of the lowest nine tenths: other work on the machine is in the rest."""
    return statistics.fmean(sorted(ns)[: max(1, len(ns) * 9 // 10)]) / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", default="1,8,64,256")
    parser.add_argument("--drafts", default="0,1,7")
    parser.add_argument("--acceptance", type=float, default=0.7)
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--stop", action="store_true", help="the requests have stop tokens, which never come")
    parser.add_argument("--spread", type=int, default=16, help="lengths of prompts; 1: all get their blocks at once")
    parser.add_argument("--cold", action="store_true", help="the parts begin with cold caches, as after a wait")
    parser.add_argument("--profile", type=int, default=0, help="lines of a profile")
    args = parser.parse_args()
    for requests in map(int, args.requests.split(",")):
        for num_drafts in map(int, args.drafts.split(",")):
            measure(requests, num_drafts, args)


if __name__ == "__main__":
    main()
