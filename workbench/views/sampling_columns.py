"""The stages of a draw as columns of the sampling view: those that acted, and two runners' where they are alike."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from engine.sample.trace import SamplingTrace

CLOSE = 2e-3
"""Two runners' logits that differ by less count as the same distribution: their operations round differently."""


@dataclass(frozen=True)
class Column:
    """The followed tokens behind a stage; a forbidden one's logit is -inf."""

    names: tuple[str, ...]
    logits: dict[int, float]
    num_left: int
    mass_left: float
    log_normaliser: float

    def probability(self, token: int) -> float:
        return math.exp(self.logits[token] - self.log_normaliser)


def columns_of(trace: SamplingTrace) -> list[Column]:
    """The stages that changed the row; the others were there for its neighbours in the batch."""
    kept: list[Column] = []
    for stage in trace.stages:
        values = [-math.inf if x is None else x for x in stage.logits]
        logits = dict(zip(trace.token_ids, values, strict=True))
        new = Column(stage.stage, logits, stage.num_left, stage.mass_left, stage.log_normaliser)
        if not kept or _changed(kept[-1], new):
            kept.append(new)
    return kept


def _changed(old: Column, new: Column) -> bool:
    rounding = abs(new.log_normaliser - old.log_normaliser) < 1e-6
    return not rounding or new.num_left != old.num_left or new.logits != old.logits


def alike(a: Sequence[Column], b: Sequence[Column]) -> bool:
    """Whether two runners' columns say the same of the tokens that both follow. V2 does in one stage what V1 may do in
    several."""
    return len(a) == len(b) and all(
        set(x.names) & set(y.names)
        and x.num_left == y.num_left
        and all(_close(x.logits[token], y.logits[token]) for token in x.logits.keys() & y.logits.keys())
        for x, y in zip(a, b, strict=True)
    )


def _close(x: float, y: float) -> bool:
    return x == y or abs(x - y) < CLOSE


def merged(same: Sequence[Column]) -> Column:
    """With the tokens that any of the runners follows; the fewest names say best what acted."""
    last, names = same[-1], min((column.names for column in same), key=len)
    logits = {token: logit for column in same for token, logit in column.logits.items()}
    return Column(names, logits, last.num_left, last.mass_left, last.log_normaliser)
