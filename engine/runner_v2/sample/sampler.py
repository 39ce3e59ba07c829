"""Runner V2's sampler: filters, then Gumbel-max with counter-based noise.

A sampled token is a pure function of (logits, seed, absolute position, purpose). Each feature is left out of a batch in
which no request uses it, which the host knows from numpy mirrors; the device is never asked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from kernels import Purpose, gumbel_sample

from ...sample.filters import apply_min_p, apply_top_k_top_p, mask_stop_ids
from ...sample.logprobs import LogprobsTensors, compute_logprobs
from .states import NO_LOGPROBS, SamplingStates


@dataclass(frozen=True)
class SamplerOutput:
    """`sampled` i64 [l, 1]; `logprobs` None unless a request of the batch asked."""

    sampled: torch.Tensor
    logprobs: LogprobsTensors | None


Sample = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], SamplerOutput]


class Sampler:
    def __init__(self, states: SamplingStates, form: str) -> None:
        self.states = states
        self._form = form

    def plan(self, idx_mapping_np: np.ndarray) -> Sample:
        """What to do for this batch, decided on the host now; call the result on the stream.

        The result takes logits f32 [l, V], idx_mapping i32 [l] and positions i64 [l] of the tokens to be sampled.
        """
        states = self.states
        rows = idx_mapping_np
        all_greedy = bool((states.temperature.np[rows] == 0).all())
        use_min_p = not all_greedy and bool((states.min_p.np[rows] > 0).any())
        use_top_k = not all_greedy and bool((states.top_k.np[rows] < states.vocab_size).any())
        use_top_p = not all_greedy and bool((states.top_p.np[rows] < 1).any())
        use_min_tokens = bool((states.min_len.np[rows] > 0).any())
        num_logprobs = int(states.num_logprobs[rows].max(initial=NO_LOGPROBS))
        # The snapshots of this step: a later publish changes `.gpu`, and this step must not see it.
        temperature, seeds = states.temperature.gpu, states.seeds.gpu
        top_k, top_p, min_p = states.top_k.gpu, states.top_p.gpu, states.min_p.gpu
        min_len, stop_ids = states.min_len.gpu, states.stop_ids.gpu

        def sample(logits: torch.Tensor, idx_mapping: torch.Tensor, positions: torch.Tensor) -> SamplerOutput:
            index = idx_mapping.long()
            raw = logits
            if use_min_tokens:
                logits = mask_stop_ids(logits.clone(), stop_ids[index], positions < min_len[index])
            if not all_greedy:
                t = temperature[index].unsqueeze(1)
                logits = logits / torch.where(t == 0, torch.ones_like(t), t)
            if use_min_p:
                apply_min_p(logits, min_p[index])
            if use_top_k or use_top_p:
                apply_top_k_top_p(logits, top_k[index] if use_top_k else None, top_p[index] if use_top_p else None)
            sampled = gumbel_sample(
                logits, idx_mapping, temperature, seeds, positions,
                purpose=Purpose.SAMPLE, all_greedy=all_greedy, form=self._form,
            )  # fmt: skip
            logprobs = compute_logprobs(raw, sampled, num_logprobs) if num_logprobs != NO_LOGPROBS else None
            return SamplerOutput(sampled.unsqueeze(1), logprobs)

        return sample
