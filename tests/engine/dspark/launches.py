"""How many launches a GPU would see, counted where there is none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from kernels import triton_support

NO_LAUNCH = (
    "view", "reshape", "_unsafe_view", "_reshape_alias", "slice", "select", "t", "transpose", "permute", "unbind",
    "split", "split_with_sizes", "expand", "squeeze", "unsqueeze", "detach", "alias", "as_strided", "chunk",
    "empty", "new_empty", "empty_like", "empty_strided",
)  # fmt: skip
"""Views and allocations."""


class _Counted(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.launches, self.is_inside_kernel = 0, False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if not self.is_inside_kernel and func.overloadpacket.__name__ not in NO_LAUNCH:
            self.launches += 1
        return func(*args, **(kwargs or {}))


def count_launches(call: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> int:
    """Operators of torch that compute, and kernels of the form "interpret"."""
    counted = _Counted()
    interpreter = triton_support._interpreter

    @contextmanager
    def counting() -> Iterator[None]:
        counted.launches += 1
        counted.is_inside_kernel = True
        try:
            with interpreter():
                yield
        finally:
            counted.is_inside_kernel = False

    with monkeypatch.context() as patch, counted:
        patch.setattr(triton_support, "_interpreter", counting)
        call()
    return counted.launches
