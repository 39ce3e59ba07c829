"""What happened to one row of logits on its way to a token, for who watches: nothing of it runs in a step otherwise.

Everything is computed anew from the logits and the state tables, by the kernels of the step itself, on the stream; the
host reads it later. So a trace changes nothing and makes nobody wait. V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from kernels import Purpose, gumbel_noise, mask_top_k_top_p

from .sampler import FILTERS, Sampler, SampleRows, SamplerPlan, Stage

MODEL: Stage = ("model",)
"""The logits as the model gave them."""
RACE = "race"


@dataclass(frozen=True)
class StageTrace:
    """A row behind a stage: its best tokens, best first, how many of V are left, and which share `mass_left` of the
    probability they had before the stage. A filter's own stages stand one by one: min_p, top_k, top_p."""

    stage: Stage
    token_ids: tuple[int, ...]
    logits: tuple[float, ...]
    num_left: int
    mass_left: float


@dataclass(frozen=True)
class SamplingTrace:
    """The stages, then the race: the tokens with the best logit + Gumbel noise, the winner first. A greedy row has no
    noise."""

    stages: tuple[StageTrace, ...]
    token_ids: tuple[int, ...]
    logits: tuple[float, ...]
    noise: tuple[float, ...]

    @property
    def sampled(self) -> int:
        return self.token_ids[0]


def trace_tensors(
    sampler: Sampler, plan: SamplerPlan, logits: torch.Tensor, rows: SampleRows, row: int, top: int = 10
) -> dict[str, torch.Tensor]:
    """Called on the stream, while the step's logits f32 [l, V] are there: `row` of them, for `read_trace`."""
    top = min(top, logits.shape[1])
    found: dict[str, torch.Tensor] = {}
    before = logits[row]
    for stage, after in [(MODEL, before), *_rows(sampler, plan, logits, rows, row)]:
        name, left = " ".join(stage), after > float("-inf")
        best, ids = after.topk(top)
        found |= {f"{name}/ids": ids, f"{name}/logits": best, f"{name}/num_left": left.sum()}
        found[f"{name}/mass_left"] = torch.where(left, before.softmax(-1), 0.0).sum()
        before = after
    index = rows.idx_mapping[row : row + 1].clamp(min=0).long()
    seeds, positions = sampler.states.seeds.gpu[index], rows.positions[row : row + 1]
    noise = gumbel_noise(seeds, positions, logits.shape[1], purpose=Purpose.SAMPLE)[0]
    noise = torch.where(sampler.states.temperature.gpu[index] == 0, 0.0, noise)
    ids = (before + noise).topk(top).indices
    return found | {f"{RACE}/ids": ids, f"{RACE}/logits": before[ids], f"{RACE}/noise": noise[ids]}


def read_trace(host: dict[str, np.ndarray]) -> SamplingTrace:
    """From what `trace_tensors` gave, copied to the host."""
    names = [name.removesuffix("/mass_left") for name in host if name.endswith("/mass_left")]
    stages = [
        StageTrace(
            tuple(name.split(" ")),
            tuple(host[f"{name}/ids"].tolist()),
            tuple(host[f"{name}/logits"].tolist()),
            int(host[f"{name}/num_left"]),
            float(host[f"{name}/mass_left"]),
        )
        for name in names
    ]
    ids, logits, noise = (tuple(host[f"{RACE}/{name}"].tolist()) for name in ("ids", "logits", "noise"))
    return SamplingTrace(tuple(stages), ids, logits, noise)


def _rows(
    sampler: Sampler, plan: SamplerPlan, logits: torch.Tensor, rows: SampleRows, row: int
) -> Iterator[tuple[Stage, torch.Tensor]]:
    """The row behind each stage, f32 [V]; the filters one after the other, as they act."""
    states, index = sampler.states, rows.idx_mapping[row : row + 1]
    last = logits[row]
    for stage, changed in sampler.stages(plan, logits, rows):
        if stage != FILTERS:
            last = changed[row].clone()
            yield stage, last
            continue
        off = {
            "top_k": torch.full_like(states.top_k.gpu, states.vocab_size),
            "top_p": torch.ones_like(states.top_p.gpu),
            "min_p": torch.zeros_like(states.min_p.gpu),
        }
        for name, table in (("min_p", states.min_p), ("top_k", states.top_k), ("top_p", states.top_p)):
            last = last.clone()
            mask_top_k_top_p(last.unsqueeze(0), index, **(off | {name: table.gpu}), form=sampler.form)
            yield (name,), last
