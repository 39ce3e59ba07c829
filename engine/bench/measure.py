"""Interleaved repeats of several sides of one workload, with warm-up apart, and what they come to."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from .workload import Workload


@dataclass(frozen=True)
class Result:
    """One run of a workload: the tokens of each request, and the forward passes it took."""

    token_ids: tuple[tuple[int, ...], ...]
    steps: int


Side = Callable[[Workload], Result]


@dataclass(frozen=True)
class Timing:
    """What one side did on one workload. Seconds of each repeat; the warm-up is not among them."""

    seconds: tuple[float, ...]
    warm_up: float
    steps: int
    wanted_tokens: int
    token_ids: tuple[tuple[int, ...], ...]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def tokens_per_second(self) -> float:
        return self.wanted_tokens / self.median

    @property
    def spread(self) -> tuple[float, float]:
        """Lowest and highest tokens per second."""
        return self.wanted_tokens / max(self.seconds), self.wanted_tokens / min(self.seconds)

    @property
    def ms_per_step(self) -> float:
        return self.median / self.steps * 1e3

    def bandwidth(self, weight_bytes: int) -> float:
        """GB/s at which the weights were read, if every step reads them once."""
        return weight_bytes * self.steps / self.median / 1e9


@dataclass(frozen=True)
class Paired:
    """Runs of one side, each beside one of another that it is compared with: (the other's seconds, its own).

    What drifts for seconds drifts for both of a pair, so the ratio within a pair moves less than either of them.
    """

    seconds: tuple[tuple[float, float], ...]

    @property
    def losses(self) -> list[float]:
        """Of each pair the part of the other's rate that is lost; below 0 where this side was faster."""
        return [1 - other / own for other, own in self.seconds]

    @property
    def loss(self) -> float:
        return statistics.median(self.losses)


def interleave(workload: Workload, sides: Mapping[str, Side], repeats: int) -> dict[str, Timing]:
    """Runs each side once to warm up, then all sides in turn, `repeats` times: what drifts, drifts for all alike."""
    warm_up: dict[str, float] = {}
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    last: dict[str, Result] = {}
    for name, side in sides.items():
        warm_up[name], last[name] = _time(side, workload)
    for _ in range(repeats):
        for name, side in sides.items():
            elapsed, last[name] = _time(side, workload)
            seconds[name].append(elapsed)
    return {
        name: Timing(
            tuple(seconds[name]), warm_up[name], last[name].steps, workload.wanted_tokens, last[name].token_ids
        )
        for name in sides
    }


def _time(side: Side, workload: Workload) -> tuple[float, Result]:
    begin = time.perf_counter()
    result = side(workload)
    return time.perf_counter() - begin, result


def agreement(ours: tuple[tuple[int, ...], ...], theirs: tuple[tuple[int, ...], ...]) -> tuple[int, int]:
    """Tokens before each request's first difference, summed, and all tokens."""
    same = total = 0
    for a, b in zip(ours, theirs, strict=True):
        total += len(b)
        same += next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return same, total
