"""V1's part of a sampling trace (engine/sample/trace.py): its stages by its own functions, and the noise of its draw.

A generator cannot be asked again, so the draw hands its noise over. V1 takes argmax(p / e) with e ~ Exponential(1); in
logarithms that is argmax(log p - log e), and -log e is Gumbel noise: the race of both runners is shown in one form.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..sample import trace
from ..sample.filters import apply_grammar_bitmask, apply_min_p, apply_top_k_top_p
from .sampler import SamplerOutput, divide_by_temperature, logits_changes, sample
from .sampling_metadata import SamplingMetadata
from .step_sampling import StepSampling


def sample_traced(
    logits: torch.Tensor, metadata: SamplingMetadata, step: StepSampling, generator: torch.Generator
) -> tuple[SamplerOutput, dict[str, torch.Tensor]]:
    """As `sample`, and how it went, for `read_traces`."""
    model_logits, exponential = logits.clone(), torch.ones_like(logits)
    output = sample(logits, metadata, step, generator, exponential)
    if not metadata.all_greedy:
        exponential.masked_fill_((metadata.temperature == 0).unsqueeze(1), 1.0)
    stages = _stages(model_logits, metadata, step)
    return output, trace.trace_tensors(stages, exponential.log_().neg_(), output.sampled[:, 0])


def _stages(
    logits: torch.Tensor, metadata: SamplingMetadata, step: StepSampling
) -> Iterator[tuple[trace.Stage, torch.Tensor]]:
    yield trace.MODEL, logits
    if step.grammar is not None:
        logits = apply_grammar_bitmask(logits.clone(), *step.grammar)
        yield ("structured_outputs",), logits
    for stage, change in logits_changes(metadata, step).items():
        logits = logits.clone()
        change(logits)
        yield (stage,), logits
    if metadata.all_greedy:
        return
    logits = divide_by_temperature(logits, metadata)
    yield ("temperature",), logits
    if metadata.min_p is not None:
        logits = apply_min_p(logits.clone(), metadata.min_p)
        yield ("min_p",), logits
    if metadata.top_k is not None:
        logits = apply_top_k_top_p(logits.clone(), metadata.top_k, None)
        yield ("top_k",), logits
    if metadata.top_p is not None:
        yield ("top_p",), apply_top_k_top_p(logits.clone(), None, metadata.top_p)
