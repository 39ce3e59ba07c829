"""How runner V2's host changes device state without a barrier: UVA-backed tensors and staged writes.

Nothing the host writes is read by a step in flight: a UVA-backed tensor publishes a snapshot through the next buffer
of a ring that is as deep as the steps in flight, and a staged write travels in fresh copies.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from kernels import apply_write

from ..device import Device


class UvaBackedTensor:
    """A small table whose truth is `np` on the host; `gpu` is the device's copy of the last published snapshot.

    `publish` may run once a step at the most, or the ring would overtake a step in flight. vLLM lets the device read
    the ring's pinned memory itself (UVA) and so changes the address with each snapshot; here the stream copies the
    snapshot to an address that stays, which a captured graph may hold.
    """

    def __init__(self, device: Device, shape: tuple[int, ...], dtype: torch.dtype, ring_depth: int) -> None:
        buffers = [device.empty_host(shape, dtype) for _ in range(ring_depth)]
        self._ring = [(buffer, buffer.numpy()) for buffer in buffers]
        self._next = 0
        self._dirty = False
        self.np: np.ndarray = np.zeros(shape, dtype=self._ring[0][1].dtype)
        self.gpu = device.zeros(*shape, dtype=dtype)

    def set(self, rows: int | np.ndarray, value: object) -> None:
        self.np[rows] = value
        self._dirty = True

    def next_snapshot(self) -> torch.Tensor | None:
        """The host's values in the next buffer of the ring; None if nothing has changed."""
        if not self._dirty:
            return None
        self._dirty = False
        buffer, buffer_np = self._ring[self._next]
        self._next = (self._next + 1) % len(self._ring)
        np.copyto(buffer_np, self.np)
        return buffer


def publish(device: Device, name: str, *tables: UvaBackedTensor) -> None:
    """Makes the host's values of `tables` the device's, in stream order, in one piece of work called `name`."""
    changed = [(table.gpu, snapshot) for table in tables if (snapshot := table.next_snapshot()) is not None]
    if changed:
        device.compute.submit(name, _copy_all, changed)


def _copy_all(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for target, source in pairs:
        target.copy_(source, non_blocking=True)


class StagedTable:
    """A device table i32 [R] or [R, C] that is the truth, of `StagedWrites`."""

    def __init__(self, writes: StagedWrites, gpu: torch.Tensor, begin: int) -> None:
        self.gpu = gpu
        self._writes, self._begin, self._width = writes, begin, gpu[0].numel()

    def stage(self, row: int, start: int, values: Sequence[int] | np.ndarray) -> None:
        """Will write `values` to (row, start...). The cells of one step must not overlap."""
        assert start + len(values) <= self._width, f"{len(values)} values do not fit behind {start} of {self._width}"
        self._writes.stage(self._begin + row * self._width + start, values)


class StagedWrites:
    """Device tables whose host appends ragged row pieces and applies them, of all tables, with one kernel.

    The cost of a step is that of its changes, not of the tables. They travel in one piece of fresh pinned memory. For
    the kernel the tables are one row, for they lie behind one another.
    """

    def __init__(self, device: Device, form: str, shapes: Mapping[str, tuple[int, ...]]) -> None:
        sizes = list(map(math.prod, shapes.values()))
        self._flat = device.zeros(1, sum(sizes), dtype=torch.int32)
        parts, begins = self._flat[0].split(sizes), itertools.accumulate(sizes, initial=0)
        self.tables = {
            name: StagedTable(self, part.view(shape), begin)
            for (name, shape), part, begin in zip(shapes.items(), parts, begins, strict=False)
        }
        self._device = device
        self._form = form
        self._starts: list[int] = []
        self._lengths: list[int] = []
        self._contents: list[int] = []

    def stage(self, start: int, values: Sequence[int] | np.ndarray) -> None:
        """As `StagedTable.stage`, at a cell of them all."""
        if len(values):
            self._starts.append(start)
            self._lengths.append(len(values))
            self._contents.extend(values)

    def apply(self, name: str) -> bool:
        """Kernel 1: sends what was staged; False if that was nothing. `name` says whose write it is."""
        num_writes, begin = len(self._starts), len(self._contents)
        if not num_writes:
            return False
        # One transfer: contents, then rows, starts and cumulative lengths.
        packed = np.zeros(begin + 3 * num_writes + 1, dtype=np.int32)
        packed[:begin] = self._contents
        packed[begin + num_writes : begin + 2 * num_writes] = self._starts
        np.cumsum(self._lengths, out=packed[begin + 2 * num_writes + 1 :])
        self._starts, self._lengths, self._contents = [], [], []
        self._device.compute.submit(name, self._launch, self._device.to_device(packed), num_writes)
        return True

    def _launch(self, packed: torch.Tensor, num_writes: int) -> None:
        contents, rows, starts, cu_len = packed.split(
            (packed.shape[0] - 3 * num_writes - 1, num_writes, num_writes, num_writes + 1)
        )
        apply_write(self._flat, rows, starts, cu_len, contents, form=self._form)
