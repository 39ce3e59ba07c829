"""The captured steps of runner V2: which there are, and which of them can do a batch's work.

Without drafts a captured step has one size, requests and tokens alike. With drafts it has two: R requests, and tokens
for all their drafts or, where a budget says how many are verified, for fewer.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from ..graphs import make_graph_pool
from ..hooks import DRAFT_EVENTS, SamplingTraced
from .input_batch import InputBatch
from .sample import SamplerPlan
from .step_work import StepWork

if TYPE_CHECKING:
    from .runner import ModelRunnerV2

GREEDY = SamplerPlan(all_greedy=True)
RANDOM = SamplerPlan()
FILTERED = SamplerPlan(filters=True)
CAPTURED_PLANS = (GREEDY, RANDOM, FILTERED)
"""What a captured step may sample with; a batch that needs more of the sampler runs launch by launch."""

BUDGETED_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 192, 256)
"""Requests for which steps under a budget are captured, as there are several for each."""
_REPLAYS = 5


class StepSize(NamedTuple):
    num_reqs: int
    num_tokens: int


def is_verification(batch: InputBatch) -> bool:
    """Whether the batch is nothing but decodes with drafts, and samples with nothing that is particular."""
    drafted = batch.num_logits == batch.num_tokens > batch.num_reqs
    return drafted and not batch.has_prefill and batch.plan in CAPTURED_PLANS


class StepGraphs:
    """`work[size]` is a step of that size, captured with each of CAPTURED_PLANS. Empty on a CPU and with
    enforce_eager."""

    def __init__(self, runner: ModelRunnerV2) -> None:
        self._runner = runner
        self._pool = None if runner.config.enforce_eager else make_graph_pool(runner.device.compute)
        self.work: dict[StepSize, StepWork] = {}
        self.seconds = 0.0
        """How long capturing took."""

    def capture(self) -> None:
        """Waits for the device: called before the first step."""
        if self._pool is None:
            return
        begin = time.monotonic()
        # The largest first: the smaller ones fit into its memory.
        for size in sorted(self._sizes(), key=lambda size: (size.num_tokens, size.num_reqs), reverse=True):
            self.work[size] = work = self._runner.padding_work(size)
            for plan in CAPTURED_PLANS:
                self._pool.capture((size, plan), partial(partial, work.decode_step, plan))
        if self._runner.device.is_cuda:
            self._runner.device.drain()
        self.seconds = time.monotonic() - begin

    def find(self, batch: InputBatch) -> StepSize | None:
        """The captured step that does this batch's work, if there is one."""
        if not self.work or batch.has_prefill or batch.plan not in CAPTURED_PLANS:
            return None
        # A captured step keeps its logits to itself; launched one by one the same work gives the same tokens.
        speculation, hooks = self._runner.speculation, self._runner.hooks
        if hooks.wants((SamplingTraced, *DRAFT_EVENTS)):
            return None
        if speculation is None:
            size = StepSize(batch.num_reqs_padded, batch.num_reqs_padded)
            return size if batch.num_tokens == batch.num_reqs and size in self.work else None
        sizes = [size for size in self.work if size.num_reqs >= batch.num_reqs]
        if not is_verification(batch) or not sizes:
            return None
        num_reqs = min(sizes).num_reqs
        budgets = sorted(size.num_tokens - num_reqs for size in sizes if size.num_reqs == num_reqs)
        budget = speculation.verification.budget(batch.num_reqs, num_reqs, budgets)
        return StepSize(num_reqs, num_reqs + budget)

    def replay(self, size: StepSize, plan: SamplerPlan) -> dict[str, torch.Tensor]:
        """Called on the stream."""
        assert self._pool is not None
        return self._pool.replay((size, plan))

    def seconds_of(self, num_reqs: int, num_tokens: int) -> float:
        """What one step of that size takes, with empty contexts. Waits for the device."""
        runner, size = self._runner, StepSize(num_reqs, num_tokens)
        if self.work:
            repeats, run = _REPLAYS, partial(self.replay, size, GREEDY)
        else:
            repeats, run = 1, partial(runner.padding_work(size).decode_step, GREEDY)

        def work() -> None:
            for _ in range(repeats):
                run()

        if not runner.device.is_cuda:  # where an engine is made is its stream: see cpu_stream.py
            begin = time.perf_counter()
            with torch.inference_mode():
                work()
            return (time.perf_counter() - begin) / repeats
        runner.device.drain()
        begin = time.perf_counter()
        runner.device.compute.submit("measure a step", work)
        runner.device.drain()
        return (time.perf_counter() - begin) / repeats

    def _sizes(self) -> set[StepSize]:
        runner = self._runner
        fits = min(runner.max_num_reqs, runner.max_num_tokens)
        sizes = [size for size in runner.config.cudagraph_capture_sizes if size <= fits]
        if runner.speculation is None:
            return {StepSize(size, size) for size in sizes}
        verification = runner.speculation.verification
        if verification.is_budgeted:
            sizes = [size for size in sizes if size in BUDGETED_SIZES or size == max(sizes)]
        return {
            StepSize(size, size * (1 + drafts))
            for size in sizes
            for drafts in verification.captured_drafts
            if size * (1 + drafts) <= runner.max_num_tokens
        }
