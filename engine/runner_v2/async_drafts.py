"""The drafts that a step of runner V2 verifies, on their way to the host for the grammars of their requests."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..device import Device
from ..streams import Event


class AsyncDrafts:
    """Only the device knows V2's drafts, and a grammar has to see them before it can say what may follow.

    `start` queues their copy behind the work that makes them and before the step's forward; `wait`, when that forward
    is under way, is the grammars' own wait, and the only one inside a step of V2.
    """

    def __init__(self, device: Device, max_num_logits: int) -> None:
        self._device = device
        # i32; one is enough, for it is read in the step that it is written in.
        self._host = device.empty_host((max_num_logits,), torch.int32)
        self._tokens = self._host.numpy()
        self._copied: Event | None = None
        self._kept: torch.Tensor | None = None

    def start(self, tokens: Callable[[], torch.Tensor]) -> None:
        """`tokens()`, called on the copy stream: the input token of each row of logits, i32 [l]."""
        device = self._device
        if self._copied is not None:
            # A step that nobody waited for: its tensor is let go, and its memory may not be used under the copy.
            device.compute.wait_event(self._copied)
        device.copy.wait_event(device.compute.record_event(for_host=False))
        device.copy.submit("drafts", self._copy, tokens)
        self._copied = device.copy.record_event()

    def _copy(self, tokens: Callable[[], torch.Tensor]) -> None:
        self._kept = tokens()
        self._host[: self._kept.shape[0]].copy_(self._kept, non_blocking=True)

    def wait(self, num_logits: int) -> list[int]:
        """The tokens [num_logits] of the last `start`."""
        assert self._copied is not None, "wait: start comes first"
        self._device.wait(self._copied, "drafts", inside_step=True)
        self._copied = self._kept = None
        return self._tokens[:num_logits].tolist()
