"""Runner V1's sampler: softmax and an exponential race, a `torch.Generator` for each seeded request.

argmax(p / e) with e ~ Exponential(1) draws from p, without the host wait of `multinomial`. r rows, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..sample.filters import apply_min_p, apply_top_k_top_p, mask_stop_ids
from ..sample.logprobs import LogprobsTensors, compute_logprobs
from .input_batch import SamplingMetadata


@dataclass(frozen=True)
class MinTokens:
    """`stop_ids` i64 [r, S], -1 for none, forbidden where `active` bool [r]."""

    stop_ids: torch.Tensor
    active: torch.Tensor


@dataclass(frozen=True)
class SamplerOutput:
    """`sampled` i64 [r, 1]; `logprobs` None unless asked for."""

    sampled: torch.Tensor
    logprobs: LogprobsTensors | None


def sample(
    logits: torch.Tensor,
    metadata: SamplingMetadata,
    discarded: frozenset[int],
    min_tokens: MinTokens | None,
    generator: torch.Generator,
) -> SamplerOutput:
    """logits f32 [r, V]. Rows in `discarded` are still inside their prompt: their token is thrown away, so their own
    generator must not be advanced, or a seeded request would depend on how its prompt was cut. `generator` serves
    requests without a seed.
    """
    raw = logits
    if min_tokens is not None:
        logits = mask_stop_ids(logits.clone(), min_tokens.stop_ids, min_tokens.active)
    greedy = logits.argmax(dim=-1)
    if metadata.all_greedy:
        sampled = greedy
    else:
        is_greedy = metadata.temperature == 0
        scale = torch.where(is_greedy, torch.ones_like(metadata.temperature), metadata.temperature)
        logits = logits / scale.unsqueeze(1)
        if metadata.min_p is not None:
            apply_min_p(logits, metadata.min_p)
        logits = apply_top_k_top_p(logits, metadata.top_k, metadata.top_p)
        probs = logits.softmax(dim=-1)
        noise = torch.empty_like(probs).exponential_(generator=generator)
        for row, own in metadata.generators.items():
            if row not in discarded:
                noise[row].exponential_(generator=own)
        sampled = torch.where(is_greedy, greedy, probs.div_(noise).argmax(dim=-1))
    k = metadata.max_num_logprobs
    return SamplerOutput(sampled.unsqueeze(1), None if k is None else compute_logprobs(raw, sampled, k))
