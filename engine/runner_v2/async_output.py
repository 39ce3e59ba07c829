"""The output of a step of runner V2, on its way to the host on the copy stream."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from ..device import Device
from ..sample.logprobs import rows_to_dicts
from ..sched_output import ModelRunnerOutput


class AsyncOutput:
    """Starts the copies when made; `get_output` waits for them, in the engine's loop and never inside a step.

    `tensors()`, called on the copy stream after the sampler, gives `sampled` i64 [r, N + 1], `num_sampled` i32 [r],
    and `token_ids`, `logprobs`, `ranks` where logprobs were asked for. The device tensors stay referenced until the
    copy ended, so that their memory is not reused under it.
    """

    def __init__(
        self,
        device: Device,
        req_ids: tuple[str, ...],
        num_logprobs: np.ndarray,
        tensors: Callable[[], dict[str, torch.Tensor]],
    ) -> None:
        self._device = device
        self._req_ids = req_ids
        self._num_logprobs = num_logprobs
        self._tensors = tensors
        self._host: dict[str, torch.Tensor] = {}
        self._kept: dict[str, torch.Tensor] = {}
        device.copy.wait_event(device.compute.record_event())
        device.copy.submit("output", self._copy)
        self._event = device.copy.record_event()

    def _copy(self) -> None:
        self._kept = self._tensors()
        for name, tensor in self._kept.items():
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self._device.is_cuda)
            self._host[name] = host.copy_(tensor, non_blocking=True)

    def get_output(self) -> ModelRunnerOutput:
        self._device.wait(self._event, "output", inside_step=False)
        host = {name: tensor.numpy() for name, tensor in self._host.items()}
        # Columns past num_sampled are whatever was there: always cut. So are the rows of a captured batch's padding.
        sampled, counts = host["sampled"].tolist(), host["num_sampled"].tolist()
        tokens = [sampled[i][: counts[i]] for i in range(len(self._req_ids))]
        logprobs = None
        if "token_ids" in host:
            rows = (host["token_ids"], host["logprobs"], host["ranks"])
            logprobs = {
                req_id: [rows_to_dicts(*rows, i, int(self._num_logprobs[i]))]
                for i, req_id in enumerate(self._req_ids)
                if self._num_logprobs[i] >= 0 and tokens[i]
            }
        return ModelRunnerOutput(list(self._req_ids), tokens, logprobs)
