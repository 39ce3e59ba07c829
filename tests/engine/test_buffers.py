"""V2's transfer primitives: what the host writes next never reaches a step in flight."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from engine.device import Device
from engine.graphs import Factory
from engine.hooks import Hooks
from engine.runner_v2 import row_ends
from engine.runner_v2.block_tables import BlockTables
from engine.runner_v2.buffers import StagedWrites, UvaBackedTensor, publish
from engine.runner_v2.row_ends import RowEnds
from engine.runner_v2.runner import STEPS_IN_FLIGHT
from tests.engine.late_device import device_timing


@pytest.fixture
def device() -> Iterator[Device]:
    with device_timing("late"):
        device = Device(torch.device("cpu"), Hooks("v2"))
    yield device
    device.close()


def test_each_step_in_flight_has_its_own_snapshot(device: Device) -> None:
    table = UvaBackedTensor(device, (4,), torch.int32, STEPS_IN_FLIGHT)
    address, seen = table.gpu.data_ptr(), []
    for step in range(STEPS_IN_FLIGHT):
        table.set(1, 10 + step)
        table.set(2, 20 + step)
        publish(device, "publish", table)
        device.compute.submit("read", lambda: seen.append(table.gpu.tolist()))
    assert seen == []
    device.drain()
    assert seen == [[0, 10 + step, 20 + step, 0] for step in range(STEPS_IN_FLIGHT)]
    assert table.gpu.data_ptr() == address, "a captured graph holds the address"


def test_nothing_is_sent_when_nothing_changed(device: Device) -> None:
    tables = [UvaBackedTensor(device, (4,), torch.int32, 2) for _ in range(2)]
    publish(device, "publish", *tables)
    assert not device.compute._tasks
    tables[1].set(0, 5)
    publish(device, "publish", *tables)
    publish(device, "publish", *tables)
    assert len(device.compute._tasks) == 1
    writes = StagedWrites(device, "torch", {"table": (4, 6)})
    assert not writes.apply("write")
    writes.tables["table"].stage(1, 0, [])
    assert not writes.apply("write") and len(device.compute._tasks) == 1


@pytest.mark.parametrize("form", ["torch", "interpret"])
def test_staged_writes_are_ragged_and_travel_in_copies(device: Device, form: str) -> None:
    """Those of several tables together, in one piece of work."""
    writes, values = StagedWrites(device, form, {"cells": (3, 5), "ends": (3,)}), np.array([7, 8, 9], dtype=np.int32)
    cells, ends = writes.tables["cells"], writes.tables["ends"]
    cells.stage(2, 1, values)
    cells.stage(0, 4, [5])
    ends.stage(2, 0, [4])
    assert writes.apply("write") and len(device.compute._tasks) == 1
    values[:] = 0
    cells.stage(2, 0, [6])
    ends.stage(0, 0, [1])
    assert writes.apply("write") and not writes.apply("write")
    assert cells.gpu.tolist() == [[0] * 5] * 3
    device.drain()
    assert cells.gpu.tolist() == [[0, 0, 0, 0, 5], [0] * 5, [6, 7, 8, 9, 0]] and ends.gpu.tolist() == [1, 0, 4]
    with pytest.raises(AssertionError, match="2 values do not fit behind 4 of 5"):
        cells.stage(0, 4, [1, 2])


# -- rows that grow ----------------------------------------------------------------------------------------------------


class RunAgain:
    """A `GraphPool` on the CPU: the work itself, run again over the same tensors."""

    def __init__(self) -> None:
        self.captured: dict[Hashable, Callable[[], Any]] = {}

    def capture(self, key: Hashable, factory: Factory) -> None:
        factory()()
        self.captured[key] = factory()

    def replay(self, key: Hashable) -> Any:
        return self.captured[key]()


@pytest.mark.parametrize("captured", [False, True])
def test_rows_grow_by_what_each_step_in_flight_appends(
    device: Device, captured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = torch.zeros(5, 24, dtype=torch.int32)
    ends = RowEnds(device, table, STEPS_IN_FLIGHT, "interpret" if captured else "torch")
    address, pool = ends.gpu.data_ptr(), RunAgain()
    if captured:
        monkeypatch.setattr(row_ends, "resolve_form", lambda form, tensor: "triton")
        ends.capture(pool)
    expected, drawn = [[0] * 24 for _ in range(5)], np.random.default_rng(0)
    for step in range(8):
        rows = drawn.permutation(4)[: 1 + step % 4].tolist()
        pieces = [drawn.integers(1, 99, drawn.integers(1, 3)).tolist() for _ in rows]
        for row, piece in zip(rows, pieces, strict=True):
            end = int(ends.np[row])
            expected[row][end : end + len(piece)] = piece
        assert ends.append(rows, pieces) and ends.apply("write") and not ends.apply("write")
        if step % STEPS_IN_FLIGHT:
            device.drain()
    device.drain()
    assert table.tolist() == expected and ends.gpu.tolist() == ends.np.tolist()
    assert ends.gpu.data_ptr() == address and len(pool.captured) == captured


def test_rows_end_where_they_are_set_and_too_much_at_once_is_refused(device: Device) -> None:
    table = torch.zeros(3, 9, dtype=torch.int32)
    ends = RowEnds(device, table, STEPS_IN_FLIGHT, "torch")
    ends.set(1, 3)
    assert ends.append([0, 1], [[1], [2, 3, 4, 5, 6]]), "six cells are two a row"
    assert ends.apply("write")
    device.drain()
    assert ends.gpu.tolist() == [1, 8, 0] and table[:2].tolist() == [[1, *[0] * 8], [0, 0, 0, 2, 3, 4, 5, 6, 0]]
    assert not ends.append([0], [[5] * 7]) and not ends.apply("write") and ends.np.tolist() == [1, 8, 0]


@pytest.mark.parametrize("num_blocks", [1, 2, 7])
def test_blocks_are_appended_however_many(device: Device, num_blocks: int) -> None:
    tables = BlockTables(device, 2, 16, 8, 4, STEPS_IN_FLIGHT, "torch")
    tables.set_block_ids(1, [3])
    tables.set_block_ids(0, [8, 9])
    assert tables.apply_staged_writes()
    tables.append_block_ids([0, 1], [[*range(20, 20 + num_blocks)], [*range(40, 40 + num_blocks)]])
    assert tables.apply_staged_writes() and not tables.apply_staged_writes()
    device.drain()
    rows, ends = tables.block_table.gpu.tolist(), tables.num_blocks.gpu.tolist()
    assert rows[0][: ends[0]] == [8, 9, *range(20, 20 + num_blocks)]
    assert rows[1][: ends[1]] == [3, *range(40, 40 + num_blocks)] and ends[2] == 0
