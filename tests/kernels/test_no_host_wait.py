"""The torch forms never make the host wait for the device, as far as a CPU can tell."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import kernels
from tests.kernels.batches import host_sizes, on, random_batch, run_step

aten = torch.ops.aten
WAITING_METHODS = (
    "item",
    "tolist",
    "nonzero",
    "numpy",
    "cpu",
    "__bool__",
    "__int__",
    "__float__",
    "__index__",
    "__iter__",
    "__len__",
    "__contains__",
    "masked_select",
    "unique",
)
WAITING_OPS = {
    aten._local_scalar_dense,
    aten.nonzero,
    aten.masked_select,
    aten.is_nonzero,
    aten.equal,
    aten.repeat_interleave,
    aten._unique2,
    aten.bincount,
}


class NoHostWait(TorchDispatchMode):
    """Raises on operators that wait on CUDA: reads of a value, data-dependent shapes, copies between devices."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        tensors: list[torch.Tensor] = []
        torch.utils._pytree.tree_map_only(torch.Tensor, tensors.append, (args, kwargs or {}))
        assert func.overloadpacket not in WAITING_OPS, f"{func} waits for the device"
        assert all(t.device.type == self.device for t in tensors), f"{func} copies between devices"
        if func.overloadpacket in (aten.index, aten.index_put, aten.index_put_):
            assert all(i is None or i.dtype != torch.bool for i in args[1]), f"{func} has a boolean mask"
        result = func(*args, **(kwargs or {}))
        assert not isinstance(result, torch.Tensor) or result.device.type == self.device, f"{func} leaves the device"
        return result


def forbid_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in WAITING_METHODS:

        def refuse(*_: Any, name: str = name, **__: Any) -> None:
            raise AssertionError(f"Tensor.{name} waits for the device")

        monkeypatch.setattr(torch.Tensor, name, refuse)


def gumbel(device: str, form: str) -> list[Callable[[], torch.Tensor]]:
    args = [
        x.to(device)
        for x in (
            torch.randn(3, 1100),
            torch.tensor([1, 0, 1], dtype=torch.int32),
            torch.tensor([0.0, 0.7]),
            torch.tensor([-3, 2**40]),
            torch.tensor([5, 6, 7]),
        )
    ]
    return [
        partial(
            kernels.gumbel_sample,
            *args,
            purpose=kernels.Purpose.DRAFT,
            all_greedy=greedy,
            apply_temperature=scale,
            form=form,
        )
        for greedy in (False, True)
        for scale in (False, True)
    ]


def writes(device: str, form: str) -> Callable[[], None]:
    def i32(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    args = (torch.zeros(4, 9, dtype=torch.int32, device=device), i32(3, 0), i32(1, 0), i32(0, 4, 5), i32(1, 2, 3, 4, 5))
    return partial(kernels.apply_write, *args, form=form)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("num_reqs", [0, 1, 4])
def test_torch_forms(num_reqs: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = random_batch(3, num_reqs=num_reqs)
    sizes, batch = host_sizes(batch), on(device, batch)
    calls = [lambda: run_step(batch, "torch", sizes=sizes), writes(device, "torch"), *gumbel(device, "torch")]
    with monkeypatch.context() as patch, NoHostWait(device):
        forbid_waits(patch)
        for call in calls:
            call()


@pytest.mark.parametrize(
    "reads",
    [
        lambda x: x[0].item(),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: bool(x[0] > 0),
        lambda x: x.tolist(),
        lambda x: x.repeat_interleave(x),
        lambda x: x.index_put_((x > 0,), x.new_ones(())),
    ],
)
def test_the_detector_detects(reads: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.tensor([1, 2])
    with monkeypatch.context() as patch, NoHostWait("cpu"), pytest.raises(AssertionError):
        forbid_waits(patch)
        reads(x)


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["torch", "triton"])
def test_no_synchronisation_on_a_gpu(form: str) -> None:
    batch = random_batch(3, num_reqs=4)
    sizes, batch = host_sizes(batch), on("cuda", batch)
    calls = [lambda: run_step(batch, form, sizes=sizes), writes("cuda", form), *gumbel("cuda", form)]
    for call in calls:
        call()  # compiles, fills the allocator's cache
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        for call in calls:
            call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
