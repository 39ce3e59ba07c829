"""V2's transfer primitives: what the host writes next never reaches a step in flight."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from engine.device import Device
from engine.hooks import Hooks
from engine.runner_v2.buffers import StagedWriteTensor, UvaBackedTensor, publish
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
    staged = StagedWriteTensor(device, (4, 6), torch.int32, "torch")
    assert not staged.apply("write")
    staged.stage(1, 0, [])
    assert not staged.apply("write") and len(device.compute._tasks) == 1


def test_staged_writes_are_ragged_and_travel_in_copies(device: Device) -> None:
    staged, values = StagedWriteTensor(device, (3, 5), torch.int32, "torch"), np.array([7, 8, 9], dtype=np.int32)
    staged.stage(2, 1, values)
    staged.stage(0, 4, [5])
    assert staged.apply("write")
    values[:] = 0
    staged.stage(2, 0, [6])
    assert staged.apply("write") and not staged.apply("write")
    assert staged.gpu.tolist() == [[0] * 5] * 3
    device.drain()
    assert staged.gpu.tolist() == [[0, 0, 0, 0, 5], [0] * 5, [6, 7, 8, 9, 0]]


def test_a_ring_of_staged_writes_keeps_each_steps_own_while_it_fits(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two writes a step are 7 words and two for each value; a ring for two rows has room for 17."""
    staged = StagedWriteTensor(device, (STEPS_IN_FLIGHT, 40), torch.int64, "torch", STEPS_IN_FLIGHT)
    fresh, to_device = [], Device.to_device

    def counted(device: Device, array: np.ndarray) -> torch.Tensor:
        fresh.append(len(array))
        return to_device(device, array)

    monkeypatch.setattr(Device, "to_device", counted)
    rows: list[list[int]] = [[] for _ in range(STEPS_IN_FLIGHT)]
    for count in (3, 20, 2, 5, 10):
        for step, row in enumerate(rows):
            values = [2**40 * (step + 1) + len(row) + i for i in range(count)]
            staged.stage_all([step, step], [len(row), len(row) + 1], [values[:1], values[1:]])
            assert staged.apply("write")
            row += values
        device.drain()
    assert staged.gpu.tolist() == rows
    assert fresh == [7 + 2 * count for count in (20, 10) for _ in rows], "what does not fit travels by itself"
