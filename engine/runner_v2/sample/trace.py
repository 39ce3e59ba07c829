"""V2's part of a sampling trace (engine/sample/trace.py): its stages by its own kernels, and the noise anew from keys.

The noise is a pure function of (seed, position, purpose), so a trace draws it again and takes nothing from the step.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kernels import Purpose, gumbel_noise, mask_top_k_top_p

from ...sample import trace
from .sampler import FILTERS, Sampler, SampleRows, SamplerPlan, Stage


def trace_tensors(
    sampler: Sampler,
    plan: SamplerPlan,
    logits: torch.Tensor,
    rows: SampleRows,
    sampled: torch.Tensor,
    top: int = trace.TOP,
) -> dict[str, torch.Tensor]:
    """Called on the stream: for `read_traces`. logits f32 [l, V] as the model gave them, sampled i64 [l]."""
    index = rows.idx_mapping.clamp(min=0).long()
    seeds, temperature = sampler.states.seeds.gpu[index], sampler.states.temperature.gpu[index]
    noise = torch.zeros_like(logits)
    if not plan.all_greedy:
        drawn = gumbel_noise(seeds, rows.positions, logits.shape[1], purpose=Purpose.SAMPLE)
        noise = torch.where(temperature.unsqueeze(1) == 0, noise, drawn)
    return trace.trace_tensors(_stages(sampler, plan, logits, rows), noise, sampled, top)


def _stages(
    sampler: Sampler, plan: SamplerPlan, logits: torch.Tensor, rows: SampleRows
) -> Iterator[tuple[Stage, torch.Tensor]]:
    """The logits behind each stage; the filters, which are one kernel, one after the other."""
    last, states = logits, sampler.states
    yield trace.MODEL, last
    for stage, changed in sampler.stages(plan, logits, rows):
        if stage != FILTERS:
            last = changed.clone()
            yield stage, last
            continue
        off = {
            "top_k": torch.full_like(states.top_k.gpu, states.vocab_size),
            "top_p": torch.ones_like(states.top_p.gpu),
            "min_p": torch.zeros_like(states.min_p.gpu),
        }
        for name, table in (("min_p", states.min_p), ("top_k", states.top_k), ("top_p", states.top_p)):
            last = last.clone()
            mask_top_k_top_p(last, rows.idx_mapping, **(off | {name: table.gpu}), form=sampler.form)
            yield (name,), last
