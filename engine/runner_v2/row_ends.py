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
"""Room for what a step appends, on average."""


class RowEnds:
    """Where each row of `table`, i32 [R, C] on the device, ends: `np` and `gpu`, i32 [R], the host's and the device's;
    and what the host appends there. The table's last row is nobody's.

    A step's cells and all ends travel in one copy, through a ring as deep as the steps in flight, to an address that
    stays. So the write itself (kernel 1) can be captured: on a GPU's host its launch would cost as much as the rest of
    a step that gives some requests a block. A captured write has as many cells as there is room for; those that the
    step doesn't need are zeros in the last row.
    """

    def __init__(self, device: Device, table: torch.Tensor, ring_depth: int, form: str) -> None:
        self._device, self._table, self._form = device, table, form
        rows, self._room = table.shape[0], _CELLS_A_ROW * table.shape[0]
        self.np: np.ndarray = np.zeros(rows, dtype=np.int32)
        # ends [R]; of each cell its row, its column and what is written there: [3, cells]
        self._sent = device.zeros(rows + 3 * self._room, dtype=torch.int32)
        self.gpu, self._cells = self._sent[:rows], self._sent[rows:].view(3, self._room)
        self._every_one = torch.arange(self._room + 1, dtype=torch.int32, device=table.device)
        self._no_cell = np.array([[rows - 1], [0], [0]], dtype=np.int32)
        buffers = [device.empty_host((rows + 3 * self._room,), torch.int32) for _ in range(ring_depth)]
        self._ring = [(host, array[:rows], array[rows:].reshape(3, -1)) for host in buffers for array in [host.numpy()]]
        self._next = 0
        self._moved = False
        self._appended: tuple[Sequence[int] | np.ndarray, ...] = ((), (), ())
        self._replay: Callable[[], object] | None = None

    def set(self, row: int, end: int) -> None:
        """From now on `row` ends there."""
        self.np[row] = end
        self._moved = True

    def append(self, rows: Sequence[int], values: Sequence[Sequence[int]]) -> bool:
        """Will write some `values` behind each of `rows`, which are different ones, and moves their ends. Once a step
        at the most. False, with nothing changed, if there is no room for so many values."""
        cells, at = list(chain.from_iterable(values)), np.array(rows)
        if len(cells) > self._room:
            return False
        starts = self.np[at]
        if len(cells) == len(at):
            self.np[at] = starts + 1
            self._appended = rows, starts, cells
        else:
            lengths = list(map(len, values))
            self.np[at] = starts + lengths
            columns = starts.repeat(lengths) + list(chain.from_iterable(map(range, lengths)))
            self._appended = at.repeat(lengths), columns, cells
        self._moved = True
        return True

    def capture(self, pool: GraphPool) -> None:
        """Waits for the device. Before the first step."""
        if resolve_form(self._form, self._table) == "triton":
            self._cells[0] = len(self.np) - 1
            key = "append to rows"
            pool.capture(key, lambda: partial(self._launch, self._room))
            self._replay = partial(pool.replay, key)

    def apply(self, name: str) -> bool:
        """Sends what has changed, as the work called `name`; False if that was nothing. Once a step at the most."""
        if not self._moved:
            return False
        self._moved = False
        self._next = (self._next + 1) % len(self._ring)
        host, ends, cells = self._ring[self._next]
        count = len(self._appended[0])
        ends[:] = self.np
        cells[:, :count] = self._appended
        cells[:, count:] = self._no_cell
        self._appended = ((), (), ())
        self._device.compute.submit(name, self._write, host, count)
        return True

    def _write(self, host: torch.Tensor, count: int) -> None:
        self._sent.copy_(host, non_blocking=True)
        if self._replay is not None and count:
            self._replay()
        elif count:
            self._launch(count)

    def _launch(self, count: int) -> None:
        rows, columns, values = self._cells[:, :count]
        apply_write(self._table, rows, columns, self._every_one[: count + 1], values, form=self._form)
