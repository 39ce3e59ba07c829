"""The captured steps of runner V2: which there are, and which of them can do a batch's work.

A step of decodes has one size, requests and tokens alike. With drafts it has two: R requests, and tokens for all their
drafts or, where a budget says how many are verified, for fewer. Any other batch up to some size, with prompts or chunks
of them, runs in a step that is captured for whatever it is: every length is read on the device.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from ..graphs import make_graph_pool
from ..hooks import DRAFT_EVENTS, SamplingTraced
from .input_batch import InputBatch
from .output_turns import OutputTurns
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

MIXED_REQS, MIXED_TOKENS = (16, 64), (64, 96, 128, 256, 512, 1024, 2048)
"""Sizes of captured steps for batches of any kind; the most requests come to the former."""
LARGE_MIXED_TOKENS = (2560, 3072, 4096)
"""Further ones, for the most requests alone: all their drafts, and prompts beside them. Beyond, the device is busy for
longer than it takes to launch a step piece by piece."""


class StepSize(NamedTuple):
    """`is_mixed`: for any batch, prompts too; else for decodes alone, with their drafts if there are some."""

    num_reqs: int
    num_tokens: int
    is_mixed: bool = False


def _by_tokens(size: StepSize) -> tuple[int, int]:
    return size.num_tokens, size.num_reqs


def is_verification(batch: InputBatch) -> bool:
    """Whether the batch is nothing but decodes with drafts, and samples with nothing that is particular."""
    drafted = batch.num_logits == batch.num_tokens > batch.num_reqs
    return drafted and not batch.has_prefill and batch.plan in CAPTURED_PLANS


class StepGraphs:
    """`work[size]` is a step of that size, captured with each of CAPTURED_PLANS; `decodes` are the sizes that are for
    decodes. Empty on a CPU and with enforce_eager."""

    def __init__(self, runner: ModelRunnerV2) -> None:
        self._runner = runner
        self._pool = None if runner.config.enforce_eager else make_graph_pool(runner.device.compute)
        self.work: dict[StepSize, StepWork] = {}
        self._outputs: dict[tuple[StepSize, SamplerPlan], OutputTurns] = {}
        self.decodes: list[StepSize] = []
        self._mixed: list[StepSize] = []
        # By number of requests, ascending: how many drafts steps of decodes can verify.
        self._budgets: dict[int, list[int]] = {}
        self._batch: InputBatch | None = None
        self._fitting: StepSize | None = None
        """What fits `_batch`, the last one that was asked for."""
        self.seconds = 0.0
        """How long capturing took."""

    def capture(self, padding_work: Callable[[StepSize], StepWork]) -> None:
        """Waits for the device: called before the first step. `padding_work` makes a step of some size, of whose
        requests none is there."""
        if self._pool is None:
            return
        begin = time.monotonic()
        # The largest first: the smaller ones fit into its memory.
        self.decodes, self._mixed = sorted(self._decode_sizes()), sorted(self._mixed_sizes(), key=_by_tokens)
        for size in self.decodes:
            self._budgets.setdefault(size.num_reqs, []).append(size.num_tokens - size.num_reqs)
        for size in sorted((*self.decodes, *self._mixed), key=_by_tokens, reverse=True):
            self.work[size] = work = padding_work(size)
            for plan in CAPTURED_PLANS:
                self._outputs[size, plan] = outputs = work.output_turns()
                self._pool.capture((size, plan), partial(partial, work.whole_step, plan, size.is_mixed, outputs))
                outputs.start()
        self._runner.block_tables.capture(self._pool)
        if self._runner.device.is_cuda:
            torch.cuda.synchronize(self._runner.device.torch_device)
        self.seconds = time.monotonic() - begin

    def find(self, batch: InputBatch) -> StepSize | None:
        """The captured step that does this batch's work, if there is one."""
        # It keeps its logits to itself; launched one by one the same work gives the same tokens.
        watched = self._runner.hooks.wants((SamplingTraced, *DRAFT_EVENTS))
        if not self.work or watched:
            return None
        if batch is not self._batch:
            self._batch, self._fitting = batch, self._find_fitting(batch)
        found, speculation = self._fitting, self._runner.speculation
        if found is None or found.is_mixed or speculation is None:
            return found
        budget = speculation.verification.budget(batch.num_reqs, found.num_reqs, self._budgets[found.num_reqs])
        return StepSize(found.num_reqs, found.num_reqs + budget)

    def _find_fitting(self, batch: InputBatch) -> StepSize | None:
        """As `find`; how many drafts a step of decodes verifies is another question in each step."""
        if batch.plan not in CAPTURED_PLANS:
            return None
        if self._runner.speculation is not None:
            num_reqs = next((size for size in self._budgets if size >= batch.num_reqs), None)
            if num_reqs is not None and is_verification(batch):
                return StepSize(num_reqs, num_reqs + self._budgets[num_reqs][-1])
            return self._find_mixed(batch)
        size = StepSize(batch.num_reqs_padded, batch.num_reqs_padded)
        if batch.has_prefill or batch.num_tokens != batch.num_reqs or size not in self.work:
            return self._find_mixed(batch)
        return size

    def _find_mixed(self, batch: InputBatch) -> StepSize | None:
        rows, runner = batch.idx_mapping_np, self._runner
        for size in self._mixed:
            # The requests that pad it have a row of logits each.
            padding = size.num_reqs - batch.num_reqs
            if padding < 0 or size.num_tokens < batch.num_tokens:
                continue
            if batch.num_logits + padding <= self.work[size].num_logits:
                return None if runner.sampler.prompt_logprobs.in_use(rows) else size
        return None

    def replay(self, size: StepSize, plan: SamplerPlan) -> dict[str, torch.Tensor]:
        """Called on the stream; the output stays until the same step is replayed for the second time from now."""
        assert self._pool is not None
        self._pool.replay((size, plan))
        return self._outputs[size, plan].last()

    def _decode_sizes(self) -> set[StepSize]:
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

    def _mixed_sizes(self) -> set[StepSize]:
        runner = self._runner
        reqs = {*(n for n in MIXED_REQS if n < runner.max_num_reqs), runner.max_num_reqs}
        most = min(MIXED_TOKENS[-1], runner.max_num_tokens)
        tokens = {*(n for n in MIXED_TOKENS if n < most), most}
        sizes = {StepSize(r, t, is_mixed=True) for r in reqs for t in tokens if r <= t}
        large = (n for n in LARGE_MIXED_TOKENS if n <= runner.max_num_tokens)
        return sizes | {StepSize(runner.max_num_reqs, t, is_mixed=True) for t in large if runner.max_num_reqs <= t}
