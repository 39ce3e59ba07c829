"""The output of a step of runner V1: at hand after wait B (plain loop), or on its way on the copy stream
(overlapped)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from ..device import Device
from ..sample.draft_trace import read_draft_traces
from ..sample.logprobs import rows_to_dicts
from ..sample.prompt_logprobs import PromptLogprobs, prompt_logprobs_of
from ..sample.trace import read_traces
from ..sched_output import ModelRunnerOutput


@dataclass(frozen=True)
class OutputRows:
    """What the host knows of a step's rows. A discarded row was still inside its prompt."""

    req_ids: tuple[str, ...]
    discarded: frozenset[int]
    num_logprobs: tuple[int | None, ...]
    prompt_logprobs: dict[str, tuple[int, int]] = field(default_factory=dict)
    """By request: the position of the first of the step's prompt logprobs, and k."""
    num_drafts: tuple[int, ...] = ()
    """Of each row, in a step that verified some: it has a row of logits more for each."""

    def build(self, host: dict[str, torch.Tensor]) -> ModelRunnerOutput:
        drafted = "num_sampled" in host
        num_sampled = host["num_sampled"].numpy() if drafted else np.ones(len(self.req_ids), dtype=np.int32)
        num_sampled[list(self.discarded)] = 0
        logprobs = None
        if "token_ids" in host:
            token_ids, values, ranks = (host[name].numpy() for name in ("token_ids", "logprobs", "ranks"))
            first = np.cumsum([0, *(count + 1 for count in self.num_drafts or [0] * len(self.req_ids))]).tolist()
            logprobs = {
                req_id: [rows_to_dicts(token_ids, values, ranks, first[row] + j, k) for j in range(num_sampled[row])]
                for row, (req_id, k) in enumerate(zip(self.req_ids, self.num_logprobs, strict=True))
                if k is not None and row not in self.discarded
            }
        arrays = {name: tensor.numpy() for name, tensor in host.items()}
        traces = read_traces(arrays, self.req_ids, self.discarded)
        draft_traces = read_draft_traces(arrays, self.req_ids, arrays["sampled"], num_sampled)
        return ModelRunnerOutput(
            self.req_ids, arrays["sampled"], num_sampled, logprobs, self._prompt_logprobs(host), traces, draft_traces
        )

    def _prompt_logprobs(self, host: dict[str, torch.Tensor]) -> dict[str, PromptLogprobs] | None:
        if not self.prompt_logprobs:
            return None
        result = {}
        for req_id, (start, k) in self.prompt_logprobs.items():
            own = {name: host[prompt_key(req_id, name)] for name in ("token_ids", "logprobs", "ranks")}
            result[req_id] = prompt_logprobs_of(own, start, k)
        return result


def prompt_key(req_id: str, name: str) -> str:
    """The name of a request's tensor of prompt logprobs among a step's."""
    return f"prompt {name} {req_id}"


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
        device.copy.wait_event(device.compute.record_event(for_host=False))
        device.copy.submit("output", copy_to_host, device, tensors, self._host)
        self._event = device.copy.record_event()

    def wait_for_sampled(self) -> np.ndarray:
        """The step's tokens, i64 [r, 1], while the next step is being made."""
        self._device.wait(self._event, "output token ids", inside_step=True)
        return self._host["sampled"].numpy()

    def get_output(self) -> ModelRunnerOutput:
        self._device.wait(self._event, "output", inside_step=False)
        return self._rows.build(self._host)
