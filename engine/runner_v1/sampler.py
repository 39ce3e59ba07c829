"""Runner V1's sampler: softmax and an exponential race, a `torch.Generator` for each seeded request.

argmax(p / e) with e ~ Exponential(1) draws from p, without the host wait of `multinomial`. r rows, V vocabulary. The
order is `ORDER` of sample/order.py.
"""

from __future__ import annotations

from collections.abc import Callable
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
from .step_sampling import ProcessorCall, StepSampling


@dataclass(frozen=True)
class SamplerOutput:
    """`sampled` i64 [r, 1]; `logprobs` None unless asked for."""

    sampled: torch.Tensor
    logprobs: LogprobsTensors | None


def sample(
    logits: torch.Tensor,
    metadata: SamplingMetadata,
    step: StepSampling,
    generator: torch.Generator,
    noise: torch.Tensor | None = None,
) -> SamplerOutput:
    """logits f32 [r, V], narrowed in place by grammars. `generator` serves requests without a seed. `noise` f32 [r, V],
    if given, takes the draw's exponential variates; a batch that is all greedy draws none.

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
        logits = divide_by_temperature(logits, metadata)
        if metadata.min_p is not None:
            apply_min_p(logits, metadata.min_p)
        logits = apply_top_k_top_p(logits, metadata.top_k, metadata.top_p)
        probs = logits.softmax(dim=-1)
        noise = (torch.empty_like(probs) if noise is None else noise).exponential_(generator=generator)
        for row, own in metadata.generators.items():
            if row not in step.discarded:
                noise[row].exponential_(generator=own)
        sampled = torch.where(is_greedy, greedy, probs.div_(noise).argmax(dim=-1))
    k = metadata.max_num_logprobs
    return SamplerOutput(sampled.unsqueeze(1), None if k is None else compute_logprobs(raw, sampled, k))


def process_logits(logits: torch.Tensor, metadata: SamplingMetadata, step: StepSampling) -> torch.Tensor:
    """All that changes logits f32 [r, V] before the temperature; a copy if anything does, else `logits` itself."""
    changes = logits_changes(metadata, step)
    if changes:
        logits = logits.clone()
        for change in changes.values():
            change(logits)
    return logits


def divide_by_temperature(logits: torch.Tensor, metadata: SamplingMetadata) -> torch.Tensor:
    """A new tensor; a greedy row stays as it is."""
    scale = torch.where(metadata.temperature == 0, torch.ones_like(metadata.temperature), metadata.temperature)
    return logits / scale.unsqueeze(1)


def logits_changes(metadata: SamplingMetadata, step: StepSampling) -> dict[str, Callable[[torch.Tensor], object]]:
    """What changes logits f32 [r, V] in place before the temperature, by its name in `ORDER` and in that order."""
    changes: dict[str, Callable[[torch.Tensor], object]] = {}
    if (allowed := metadata.allowed_token_ids) is not None:
        changes["allowed_token_ids"] = lambda x: apply_allowed_token_ids(x, *allowed)
    if (bias := metadata.logit_bias) is not None:
        changes["logit_bias"] = lambda x: apply_logit_bias(x, *bias)
    if (stop := step.min_tokens) is not None:
        changes["min_tokens"] = lambda x: mask_stop_ids(x, stop.stop_ids, stop.active)
    if (p := metadata.penalties) is not None and (outputs := step.output_token_ids) is not None:
        changes["penalties"] = lambda x: apply_penalties(
            x, p.prompt_token_ids, outputs, p.presence, p.frequency, p.repetition
        )
    if (forbidden := step.forbidden) is not None:
        changes["bad_words"] = lambda x: forbid_tokens(x, *forbidden)
    if step.processors:
        changes["logits_processors"] = lambda x: _run_processors(x, step.processors)
    return changes


def _run_processors(logits: torch.Tensor, calls: tuple[ProcessorCall, ...]) -> None:
    for call in calls:
        logits.index_copy_(0, call.rows, run_processor(call.processor, logits[call.rows], call.known))
