"""Runner V2's sampler in a step with drafts: the sampler's own stages, then kernels 23 to 29. No host wait."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kernels import DraftedBatch, RejectionOutput, flatten_sampled, rejection_sample

from .logprobs import SampledLogprobs, compute_logprobs
from .sampler import DRAW, GRAMMAR, LOGPROBS, Sampler, SampleRows, SamplerPlan
from .structured_outputs import GrammarBitmask
from .tables import DraftRows


@dataclass(frozen=True)
class DraftedStep:
    """r requests and their l rows of logits: one for the last token that is known, one for each draft.

    `idx_mapping` i32 [r], `cu_num_logits` i32 [r + 1], `expanded_idx_mapping` and `expanded_local_pos` i32 [l] (kernel
    5), `token_ids` i32 [l], the input token of each row; a draft that is -1 ends its request's drafts. `positions`
    i64 [l], where the token stands that is drawn from each row. `max_drafts` is N.
    """

    idx_mapping: torch.Tensor
    cu_num_logits: torch.Tensor
    expanded_idx_mapping: torch.Tensor
    expanded_local_pos: torch.Tensor
    token_ids: torch.Tensor
    positions: torch.Tensor
    max_drafts: int

    @property
    def batch(self) -> DraftedBatch:
        return DraftedBatch(self.idx_mapping, self.cu_num_logits, self.token_ids, self.positions, self.max_drafts)

    def rows(self, plan: SamplerPlan) -> SampleRows:
        """For the stages of `plan`."""
        # The rows behind a draft that is none are not used, but some feature may look its token up.
        tokens = self.token_ids.clamp(min=0) if plan.looks_at_drafts else self.token_ids
        drafts = DraftRows(self.expanded_local_pos, tokens, self.max_drafts)
        return SampleRows(self.expanded_idx_mapping, self.positions, drafts)


@dataclass(frozen=True)
class RejectionSamplerOutput:
    """`verified.sampled` i64 [r, N + 1], of each row the first `verified.num_sampled` i32 [r] count: what kernels 9 and
    10 take. `logprobs`, None unless a request asked, row by row of the logits: those of request i begin at
    `cu_num_logits[i]`."""

    verified: RejectionOutput
    logprobs: SampledLogprobs | None


class RejectionSampler:
    """`method` as in `rejection_sample`; `acceptance_rates` (conditional, one a draft) for "synthetic" alone."""

    def __init__(self, sampler: Sampler, method: str = "standard", acceptance_rates: Sequence[float] = ()) -> None:
        self._sampler = sampler
        self.method = method
        self._acceptance_rates: torch.Tensor | None = None
        if acceptance_rates:
            self._acceptance_rates = sampler.states.device.to_device(np.array(acceptance_rates, dtype=np.float32))

    def sample(
        self,
        plan: SamplerPlan,
        logits: torch.Tensor,
        step: DraftedStep,
        *,
        draft_logits: torch.Tensor | None = None,
        grammar: GrammarBitmask | None = None,
        insert: bool = True,
    ) -> RejectionSamplerOutput:
        """Called on the stream.

        Args:
            plan: of `Sampler.plan(rows, num_logits)` with the batch's rows of logits.
            logits: f32 [l, V]; changed in place, but by nothing except a grammar where somebody wants logprobs.
            draft_logits: f32 [R, N, V], by state row; what the drafts were drawn from with `Purpose.DRAFT`. None for
                drafts that were not drawn.
            grammar: its rows are rows of the logits.
            insert: see `rejection_sample`; False where nobody wants logprobs alone.
        """
        sampler = self._sampler
        if grammar is not None:
            grammar.apply(logits, sampler.form)
        verified = rejection_sample(
            self._processed(plan, logits, step), draft_logits, step.batch, sampler.states.temperature.gpu,
            sampler.states.seeds.gpu, method=self.method, acceptance_rates=self._acceptance_rates,
            all_greedy=plan.all_greedy, insert=insert, form=sampler.form,
        )  # fmt: skip
        logprobs = None
        if plan.logprobs.wanted:
            tokens = flatten_sampled(verified.sampled, step.cu_num_logits, logits.shape[0], form=sampler.form)
            logprobs = compute_logprobs(plan.logprobs, logits, tokens, sampler.form)
        return RejectionSamplerOutput(verified, logprobs)

    def _processed(self, plan: SamplerPlan, logits: torch.Tensor, step: DraftedStep) -> torch.Tensor:
        """The logits of the law that is to come out, behind temperature and filters; logprobs are of those before."""
        if set(plan.stages) <= {GRAMMAR, LOGPROBS, DRAW}:
            return logits
        in_place = not plan.logprobs.wanted
        *_, (_, processed) = self._sampler.stages(plan, logits, step.rows(plan), in_place=in_place)
        return processed
