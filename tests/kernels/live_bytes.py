"""How much memory tensors hold while code runs, counted at every operator."""

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class LiveBytes(TorchDispatchMode):
    """Counts the storages that operators make while it is active; `peak` is the most that was alive at once.

    What an operator holds for itself is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        given: list[torch.Tensor] = []
        torch.utils._pytree.tree_map_only(torch.Tensor, given.append, (args, kwargs or {}))
        old = {t.untyped_storage()._cdata for t in given}
        result = func(*args, **(kwargs or {}))
        torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: self._count(t, old), result)
        return result

    def _count(self, tensor: torch.Tensor, old: set[int]) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in old or key in self._known:
            return
        self._known.add(key)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(tensor, self._release, key, size)

    def _release(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size
