"""What happened to the rows of a step's logits on their way to tokens, for who watches: nothing of it runs otherwise.

A runner computes a trace anew, from the logits and with its own operations, on the stream and behind the draw; it
leaves with the step's output. So a trace changes nothing and makes nobody wait. It costs the memory of the traced
logits once for each stage. l rows, V vocabulary, c tokens that a trace follows.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

Stage = tuple[str, ...]
"""Names of `ORDER` (sample/order.py) that a runner does in one go."""
MODEL: Stage = ("model",)
"""The logits as the model gave them."""
TOP = 10
"""So many of the best tokens behind each stage, and in the race, are followed."""

_PREFIX = "trace "
_IDS, _NOISE, _STAGE = f"{_PREFIX}ids", f"{_PREFIX}noise", f"{_PREFIX}stage "


@dataclass(frozen=True, slots=True)
class StageTrace:
    """A row behind a stage.

    `logits` [c] of the trace's tokens, None for one that is forbidden (-inf). `num_left` of V tokens are not forbidden;
    `mass_left` is the share of the probability that they had before the stage. A token's log-probability is its logit
    less `log_normaliser`.
    """

    stage: Stage
    logits: tuple[float | None, ...]
    num_left: int
    mass_left: float
    log_normaliser: float


@dataclass(frozen=True, slots=True)
class SamplingTrace:
    """How a token was drawn: the stages, `MODEL` first, then argmax(last logits + noise).

    `token_ids` [c]: the best tokens behind each stage and in the race, and the `sampled` one; none comes twice. `noise`
    [c] is Gumbel noise: V2's own, V1's as -log of its exponential variate; zero for a greedy row.
    """

    token_ids: tuple[int, ...]
    stages: tuple[StageTrace, ...]
    noise: tuple[float, ...]
    sampled: int

    @property
    def greedy(self) -> bool:
        return not any(self.noise)


def trace_tensors(
    stages: Iterable[tuple[Stage, torch.Tensor]], noise: torch.Tensor, sampled: torch.Tensor, top: int = TOP
) -> dict[str, torch.Tensor]:
    """Called on the stream: what `read_traces` wants, small tensors that leave with the step's output.

    `stages`: each with the logits f32 [l, V] behind it, `MODEL` first; a tensor of its own for each. noise f32 [l, V]
    is what decided, sampled i64 [l] the tokens that were drawn.
    """
    rows = list(stages)
    last = rows[-1][1]
    k = min(top, last.shape[1])
    best = [logits.topk(k).indices for _, logits in rows]
    ids = torch.cat([*best, (last + noise).topk(k).indices, sampled.unsqueeze(1)], dim=1)
    found = {_IDS: ids, _NOISE: noise.gather(1, ids)}
    before = rows[0][1]
    for stage, after in rows:
        left = after > float("-inf")
        mass = torch.where(left, before.softmax(-1), 0.0).sum(-1)
        # A count below 2^24 is exact in f32, so one tensor brings all.
        sums = torch.stack([left.sum(-1).float(), mass, after.logsumexp(-1)], dim=1)
        found[_STAGE + " ".join(stage)] = torch.cat([sums, after.gather(1, ids)], dim=1)
        before = after
    return found


def read_traces(
    host: Mapping[str, np.ndarray], req_ids: Sequence[str], discarded: Collection[int] = ()
) -> dict[str, SamplingTrace] | None:
    """By request, from what `trace_tensors` gave, copied to the host; None if the step was not traced. Rows in
    `discarded` drew no token."""
    if _IDS not in host:
        return None
    return {req_id: _read(host, row) for row, req_id in enumerate(req_ids) if row not in discarded}


def _read(host: Mapping[str, np.ndarray], row: int) -> SamplingTrace:
    ids, noise = host[_IDS][row].tolist(), host[_NOISE][row].tolist()
    behind = {name: host[name][row].tolist() for name in host if name.startswith(_STAGE)}
    *best, sampled = range(len(ids))
    logits = [values[3:] for values in behind.values()]
    logits.append(logits[-1])  # the race's
    k = len(best) // len(logits)
    # Where less than k were left, some of the k best are forbidden.
    picked = [c for c in best if math.isfinite(logits[c // k][c])] + [sampled]
    places = list({ids[c]: c for c in reversed(picked)}.values())[::-1]
    stages = [
        StageTrace(
            tuple(name.removeprefix(_STAGE).split(" ")),
            tuple(values[3 + c] if math.isfinite(values[3 + c]) else None for c in places),
            int(values[0]),
            _finite(values[1]),
            _finite(values[2]),
        )
        for name, values in behind.items()
    ]
    return SamplingTrace(
        tuple(ids[c] for c in places), tuple(stages), tuple(_finite(noise[c]) for c in places), ids[sampled]
    )


def _finite(value: float) -> float:
    """A row of nothing but -inf has no probabilities; a recording holds numbers."""
    return value if math.isfinite(value) else 0.0
