"""Runner V2's sampler: filters, then Gumbel-max with counter-based noise.

A sampled token is a pure function of (logits, seed, absolute position, purpose). Each feature is left out of a batch in
which no request uses it, which the host knows from numpy mirrors; the device is never asked.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from kernels import Purpose, gumbel_sample, sample_top_k_top_p

from ...sample.filters import mask_stop_ids
from ...sample.logprobs import LogprobsTensors, compute_logprobs
from .states import NO_LOGPROBS, SamplingStates


@dataclass(frozen=True)
class SamplerOutput:
    """`sampled` i64 [l, 1]; `logprobs` None unless a request of the batch asked."""

    sampled: torch.Tensor
    logprobs: LogprobsTensors | None


@dataclass(frozen=True)
class SamplerPlan:
    """What a batch needs of the sampler, as the host knows it from its mirrors."""

    all_greedy: bool = False
    filters: bool = False
    """Some row has a top_k, top_p or min_p."""
    use_min_tokens: bool = False
    num_logprobs: int = NO_LOGPROBS


class Sampler:
    def __init__(self, states: SamplingStates, form: str) -> None:
        self.states = states
        self._form = form

    def plan(self, rows: np.ndarray) -> SamplerPlan:
        """For the batch of these state rows, i32 [r]. Decided on the host; the device is never asked."""
        states = self.states
        all_greedy = bool((states.temperature.np[rows] == 0).all())
        filters = not all_greedy and bool(
            (states.top_k.np[rows] < states.vocab_size).any()
            or (states.top_p.np[rows] < 1).any()
            or (states.min_p.np[rows] > 0).any()
        )
        return SamplerPlan(
            all_greedy=all_greedy,
            filters=filters,
            use_min_tokens=bool((states.min_len.np[rows] > 0).any()),
            num_logprobs=int(states.num_logprobs[rows].max(initial=NO_LOGPROBS)),
        )

    def sample(
        self, plan: SamplerPlan, logits: torch.Tensor, idx_mapping: torch.Tensor, positions: torch.Tensor
    ) -> SamplerOutput:
        """Called on the stream. logits f32 [l, V], idx_mapping i32 [l], positions i64 [l] of the tokens
        to be sampled."""
        states = self.states
        raw = logits
        if plan.use_min_tokens:
            index = idx_mapping.long()
            active = positions < states.min_len.gpu[index]
            logits = mask_stop_ids(logits.clone(), states.stop_ids.gpu[index], active)
        if plan.filters:
            sampled = sample_top_k_top_p(
                logits, idx_mapping, states.top_k.gpu, states.top_p.gpu, states.min_p.gpu, states.temperature.gpu,
                states.seeds.gpu, positions, purpose=Purpose.SAMPLE, apply_temperature=True, form=self._form,
            )  # fmt: skip
        else:
            sampled = gumbel_sample(
                logits, idx_mapping, states.temperature.gpu, states.seeds.gpu, positions,
                purpose=Purpose.SAMPLE, all_greedy=plan.all_greedy, apply_temperature=True, form=self._form,
            )  # fmt: skip
        wanted = plan.num_logprobs != NO_LOGPROBS
        logprobs = compute_logprobs(raw, sampled, plan.num_logprobs) if wanted else None
        return SamplerOutput(sampled.unsqueeze(1), logprobs)
