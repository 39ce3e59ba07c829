"""What a step costs, measured at start: the tables that the schedules divide by."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class CostTable:
    """Microseconds by size; never falling, so that measuring noise can't make more work look cheaper.

    Up to ``step_limit`` a size costs what the next measured size does, since a captured graph runs at its own size;
    beyond, costs are interpolated, and behind the last size they go on as steeply as between the last two.

    Attributes:
        sizes: measured sizes (tokens or requests), ascending.
        costs: microseconds, one a size.
        step_limit: the largest captured size; 0 for none.
    """

    sizes: tuple[int, ...]
    costs: tuple[float, ...]
    step_limit: int = 0

    def __post_init__(self) -> None:
        if not self.sizes or len(self.sizes) != len(self.costs):
            raise ValueError(
                f"a cost table needs one cost a size, got {len(self.sizes)} sizes, {len(self.costs)} costs"
            )
        if any(a >= b for a, b in pairwise(self.sizes)) or self.sizes[0] < 0:
            raise ValueError(f"sizes of a cost table must ascend from 0 or more, got {list(self.sizes)}")
        if any(a > b for a, b in pairwise(self.costs)) or self.costs[0] <= 0:
            raise ValueError("costs of a cost table must be positive and never fall; CostTable.measured sees to it")

    @classmethod
    def measured(
        cls, sizes: Sequence[int], measure: Callable[[int], float], step_limit: int = 0, repeats: int = 5
    ) -> CostTable:
        """The median of ``repeats`` measurements a size, made monotone from the smallest up.

        Every size is measured once before any is measured again: what disturbs the machine for a while disturbs one
        measurement of each, and not all of one, which would make all larger sizes as dear.
        """
        rounds = [[measure(size) for size in sizes] for _ in range(repeats)]
        costs: list[float] = []
        for cost in map(statistics.median, zip(*rounds, strict=True)):
            costs.append(max(cost, costs[-1]) if costs else cost)
        return cls(tuple(sizes), tuple(costs), step_limit)

    def __call__(self, size: int) -> float:
        """Microseconds of ``size``."""
        above = next((i for i, s in enumerate(self.sizes) if s >= size), None)
        if above is not None and (self.sizes[above] == size or size <= self.step_limit or above == 0):
            return self.costs[above]
        if len(self.sizes) == 1:
            return self.costs[0]
        high = max(1, above if above is not None else len(self.sizes) - 1)
        low = high - 1
        slope = (self.costs[high] - self.costs[low]) / (self.sizes[high] - self.sizes[low])
        return self.costs[low] + slope * (size - self.sizes[low])

    def up_to(self, size: int) -> list[float]:
        """Costs of 0 .. size."""
        return [self(n) for n in range(size + 1)]
