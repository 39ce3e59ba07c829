"""Runner V1's sampler: softmax and an exponential race, a `torch.Generator` for each seeded request.

argmax(p / e) with e ~ Exponential(1) draws from p, without the host wait of `multinomial`. r rows, V vocabulary. The
order is `ORDER` of sample/order.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..sample.filters import (
    apply_allowed_token_ids,
    apply_grammar_bitmask,
    apply_logit_bias,
    apply_min_p,
    apply_top_k_top_p,
    forbid_tokens,
    mask_stop_ids,
)
from ..sample.logits_processors import run_processor
from ..sample.logprobs import LogprobsTensors, compute_logprobs
from ..sample.penalties import apply_penalties
from .sampling_metadata import SamplingMetadata
from .step_sampling import StepSampling


@dataclass(frozen=True)
class SamplerOutput:
    """`sampled` i64 [r, 1]; `logprobs` None unless asked for."""

    sampled: torch.Tensor
    logprobs: LogprobsTensors | None


def sample(
    logits: torch.Tensor, metadata: SamplingMetadata, step: StepSampling, generator: torch.Generator
) -> SamplerOutput:
    """logits f32 [r, V], narrowed in place by grammars. `generator` serves requests without a seed.

    A discarded row's own generator is not advanced, or a seeded request would depend on how its prompt was cut.
    """
    if step.grammar is not None:
        apply_grammar_bitmask(logits, *step.grammar)
    raw = logits
    logits = process_logits(logits, metadata, step)
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
            if row not in step.discarded:
                noise[row].exponential_(generator=own)
        sampled = torch.where(is_greedy, greedy, probs.div_(noise).argmax(dim=-1))
    k = metadata.max_num_logprobs
    return SamplerOutput(sampled.unsqueeze(1), None if k is None else compute_logprobs(raw, sampled, k))


def process_logits(logits: torch.Tensor, metadata: SamplingMetadata, step: StepSampling) -> torch.Tensor:
    """All that changes logits f32 [r, V] before the temperature; a copy if anything does, else `logits` itself."""
    if not (step.changes_logits or metadata.allowed_token_ids or metadata.logit_bias):
        return logits
    logits = logits.clone()
    if metadata.allowed_token_ids is not None:
        apply_allowed_token_ids(logits, *metadata.allowed_token_ids)
    if metadata.logit_bias is not None:
        apply_logit_bias(logits, *metadata.logit_bias)
    if step.min_tokens is not None:
        mask_stop_ids(logits, step.min_tokens.stop_ids, step.min_tokens.active)
    if metadata.penalties is not None and step.output_token_ids is not None:
        p = metadata.penalties
        apply_penalties(logits, p.prompt_token_ids, step.output_token_ids, p.presence, p.frequency, p.repetition)
    if step.forbidden is not None:
        forbid_tokens(logits, *step.forbidden)
    for call in step.processors:
        logits.index_copy_(0, call.rows, run_processor(call.processor, logits[call.rows], call.known))
    return logits
