"""The output of a step of runner V1: at hand after wait B (plain loop), or on its way on the copy stream
(overlapped)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from ..device import Device
from ..sample.logprobs import rows_to_dicts
from ..sched_output import ModelRunnerOutput


@dataclass(frozen=True)
class OutputRows:
    """What the host knows of a step's rows. A discarded row was still inside its prompt."""

    req_ids: tuple[str, ...]
    discarded: frozenset[int]
    num_logprobs: tuple[int | None, ...]

    def build(self, host: dict[str, torch.Tensor]) -> ModelRunnerOutput:
        num_sampled = np.ones(len(self.req_ids), dtype=np.int32)
        num_sampled[list(self.discarded)] = 0
        logprobs = None
        if "token_ids" in host:
            token_ids, values, ranks = (host[name].numpy() for name in ("token_ids", "logprobs", "ranks"))
            logprobs = {
                req_id: [rows_to_dicts(token_ids, values, ranks, row, k)]
                for row, (req_id, k) in enumerate(zip(self.req_ids, self.num_logprobs, strict=True))
                if k is not None and row not in self.discarded
            }
        return ModelRunnerOutput(self.req_ids, host["sampled"].numpy(), num_sampled, logprobs)


Tensors = Callable[[], dict[str, torch.Tensor]]


def copy_to_host(device: Device, tensors: Tensors, host: dict[str, torch.Tensor]) -> None:
    """On a stream: copies of `tensors()` into `host`."""
    for name, tensor in tensors().items():
        pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=device.is_cuda)
        host[name] = pinned.copy_(tensor, non_blocking=True)


@dataclass(frozen=True)
class ReadyOutput:
    output: ModelRunnerOutput

    def get_output(self) -> ModelRunnerOutput:
        return self.output


class AsyncGPUModelRunnerOutput:
    def __init__(self, device: Device, rows: OutputRows, tensors: Tensors) -> None:
        self._device = device
        self._rows = rows
        self._host: dict[str, torch.Tensor] = {}
        device.copy.wait_event(device.compute.record_event())
        device.copy.submit("output", copy_to_host, device, tensors, self._host)
        self._event = device.copy.record_event()

    def get_output(self) -> ModelRunnerOutput:
        self._device.wait(self._event, "output", inside_step=False)
        return self._rows.build(self._host)
