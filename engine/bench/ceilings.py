"""The memory limit, measured in the same run: what a step could take if it did nothing but read."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

_BYTES = {"cuda": 4 * 2**30, "cpu": 128 * 2**20}
"""Far beyond any cache, so that memory is measured."""
_REPEATS = 10


@dataclass(frozen=True)
class Ceilings:
    """Bytes per second. `copy` counts what is read and what is written."""

    copy: float
    read: float

    @property
    def limit(self) -> float:
        """The faster of both: no step that only reads should be judged by a slow way of reading."""
        return max(self.copy, self.read)


def measure_ceilings(device: torch.device) -> Ceilings:
    """Copies and sums one large tensor of random numbers; the median of ten, after three to warm up."""
    size = _BYTES[device.type]
    source = torch.randn(size // 4, device=device)
    target = torch.empty_like(source)
    copy = _seconds(device, lambda: target.copy_(source))
    read = _seconds(device, lambda: source.sum())
    return Ceilings(copy=2 * size / copy, read=size / read)


def _seconds(device: torch.device, fn: Callable[[], object]) -> float:
    for _ in range(3):
        fn()
    times = []
    for _ in range(_REPEATS):
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            fn()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1e3)
        else:
            start = time.perf_counter()
            fn()
            times.append(time.perf_counter() - start)
    return statistics.median(times)
