"""What grows in nearly every step: the rows of a device table, by a few cells each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain

import numpy as np
import torch

from kernels import apply_write
from kernels.dispatch import resolve_form

from ..device import Device
from ..graphs import GraphPool

_CELLS_A_ROW = 2
"""Room for the cells that a step appends, on average."""


class RowEnds:
    """Where each row of `table`, i32 [R, C] on the device, ends: `np` and `gpu`, i32 [R], the host's and the device's;
    and what the host appends there.

    A step's pieces and all ends travel in one copy, through a ring as deep as the steps in flight, to an address that
    stays. So the write itself (kernel 1) can be captured: on a GPU's host its launch would cost as much as the rest of
    a step that gives some requests a block.
    """

    def __init__(self, device: Device, table: torch.Tensor, ring_depth: int, form: str) -> None:
        self._device, self._table, self._form = device, table, form
        rows = table.shape[0]
        self.np: np.ndarray = np.zeros(rows, dtype=np.int32)
        # ends [R], rows [R], starts [R], cumulative lengths [R + 1], contents
        sizes = (rows, rows, rows, rows + 1, _CELLS_A_ROW * rows)
        self._sent = device.zeros(sum(sizes), dtype=torch.int32)
        self.gpu, *self._pieces = self._sent.split(sizes)
        buffers = [device.empty_host((sum(sizes),), torch.int32) for _ in range(ring_depth)]
        self._ring = [(buffer, np.split(buffer.numpy(), np.cumsum(sizes[:-1]))) for buffer in buffers]
        self._next = 0
        self._moved = False
        self._rows: list[int] = []
        self._starts: np.ndarray = np.empty(0, dtype=np.int32)
        self._values: list[Sequence[int]] = []
        self._replay: Callable[[], object] | None = None

    def set(self, row: int, end: int) -> None:
        """From now on `row` ends there."""
        self.np[row] = end
        self._moved = True

    def append(self, rows: list[int], values: list[Sequence[int]]) -> bool:
        """Will write some `values` behind each of `rows`, which are different ones, and moves their ends. Once a step
        at the most. False, with nothing changed, if there is no room for so many values."""
        lengths = list(map(len, values))
        if sum(lengths) > _CELLS_A_ROW * len(self.np):
            return False
        self._rows, self._values, self._starts = rows, values, self.np[rows]
        self.np[rows] = self._starts + lengths
        self._moved = True
        return True

    def capture(self, pool: GraphPool) -> None:
        """Waits for the device. Before the first step: nothing is written then."""
        if resolve_form(self._form, self._table) == "triton":
            key = "write rows' ends"
            pool.capture(key, lambda: partial(apply_write, self._table, *self._pieces, form=self._form))
            self._replay = partial(pool.replay, key)

    def apply(self, name: str) -> bool:
        """Sends what has changed, as the work called `name`; False if that was nothing. Once a step at the most."""
        if not self._moved:
            return False
        self._moved = False
        self._next = (self._next + 1) % len(self._ring)
        buffer, (ends, rows, starts, cumulative, contents) = self._ring[self._next]
        ends[:] = self.np
        count = len(self._rows)
        rows[:count] = self._rows
        starts[:count] = self._starts
        values = list(chain.from_iterable(self._values))
        contents[: len(values)] = values
        np.cumsum(list(map(len, self._values)), out=cumulative[1 : count + 1])
        cumulative[count + 1 :] = len(values)  # no write: a captured one goes over R of them
        self._rows, self._starts, self._values = [], self._starts[:0], []
        self._device.compute.submit(name, self._write, buffer, count, len(values))
        return True

    def _write(self, buffer: torch.Tensor, count: int, num_values: int) -> None:
        self._sent.copy_(buffer, non_blocking=True)
        if not count:
            return
        if self._replay is not None:
            self._replay()
            return
        rows, starts, cumulative, contents = self._pieces
        apply_write(
            self._table, rows[:count], starts[:count], cumulative[: count + 1], contents[:num_values], form=self._form
        )
