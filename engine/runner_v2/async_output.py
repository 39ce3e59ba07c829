"""The output of a step of runner V2, on its way to the host on the copy stream."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from ..device import Device
from ..sample.draft_trace import read_draft_traces
from ..sample.trace import read_traces
from ..sched_output import ModelRunnerOutput
from .sample.logprobs import LogprobsPlan, row_to_dict
from .sample.prompt_logprobs import PromptLogprobsPlan

CONFIDENCES = "confidences"


def empty_tokens(num_rows: int, width: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One tensor for all that the host always wants of a step, so that one copy brings it: (it, sampled, num_sampled).

    i64 [r * w + ceil(r / 2)]: the tokens, then their counts as i32. `sampled` i64 [r, w] and `num_sampled` i32 [r] are
    its parts.
    """
    size = num_rows * width
    tokens = torch.empty(size + (num_rows + 1) // 2, dtype=torch.int64, device=device)
    return tokens, tokens[:size].view(num_rows, width), tokens[size:].view(torch.int32)[:num_rows]


class HostRing:
    """As many pinned buffers for a step's tokens as steps can be in flight, and one that is read: i64 [size], each
    with its numpy view."""

    def __init__(self, device: Device, size: int, depth: int) -> None:
        buffers = [device.empty_host((size,), torch.int64) for _ in range(depth)]
        self._buffers = [(buffer, buffer.numpy()) for buffer in buffers]
        self._next = 0

    def next(self) -> tuple[torch.Tensor, np.ndarray]:
        self._next = (self._next + 1) % len(self._buffers)
        return self._buffers[self._next]


class AsyncOutput:
    """Starts the copies when made; `get_output` waits for them, in the engine's loop and never inside a step.

    `tensors()`, called on the copy stream after the sampler, gives `tokens` (see `empty_tokens`; its rows may be more
    than `req_ids`) for `host_tokens`, and those of `SampledLogprobs.as_dict()` where logprobs were asked for and of
    `trace_tensors` and `draft_tensors` where somebody watches. The device tensors stay referenced until the copy ended,
    so that their memory is not reused under it. Logprobs of prompts have been sent to the host by then.
    """

    def __init__(
        self,
        device: Device,
        req_ids: tuple[str, ...],
        num_logprobs: np.ndarray,
        logprobs_plan: LogprobsPlan,
        prompt_logprobs: PromptLogprobsPlan | None,
        host_tokens: tuple[torch.Tensor, np.ndarray],
        width: int,
        cu_num_logits: np.ndarray,
        tensors: Callable[[], dict[str, torch.Tensor]],
        observe_confidences: Callable[[np.ndarray], None] | None = None,
    ) -> None:
        self._device = device
        self._req_ids = req_ids
        self._observe_confidences = observe_confidences
        self._num_logprobs = num_logprobs
        self._logprobs_plan = logprobs_plan
        self._prompt_logprobs = prompt_logprobs
        self._host_tokens, self._host_tokens_np = host_tokens
        self._num_rows = 0
        self._width = width
        self._cu_num_logits = cu_num_logits
        self._tensors = tensors
        self._host: dict[str, torch.Tensor] = {}
        self._kept: dict[str, torch.Tensor] = {}
        device.copy.wait_event(device.compute.record_event())
        device.copy.submit("output", self._copy)
        self.copied = device.copy.record_event()
        """Behind the copies."""

    def _copy(self) -> None:
        self._kept = self._tensors()
        for name, tensor in self._kept.items():
            if name == "tokens":
                # Of r rows there are r * width tokens and ceil(r / 2) words of counts.
                self._num_rows = tensor.shape[0] * 2 // (2 * self._width + 1)
                self._host_tokens[: tensor.shape[0]].copy_(tensor, non_blocking=True)
            else:
                host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self._device.is_cuda)
                self._host[name] = host.copy_(tensor, non_blocking=True)

    def get_output(self) -> ModelRunnerOutput:
        self._device.wait(self.copied, "output", inside_step=False)
        host = {name: tensor.numpy() for name, tensor in self._host.items()}
        rows, tokens, size = self._num_rows, self._host_tokens_np, self._num_rows * self._width
        sampled, num_sampled = tokens[:size].reshape(rows, self._width), tokens[size:].view(np.int32)[:rows]
        if self._observe_confidences is not None and CONFIDENCES in host:
            self._observe_confidences(host[CONFIDENCES][: len(self._req_ids)])
        # The rows of a captured batch's padding are cut.
        num_reqs, logprobs = len(self._req_ids), None
        if self._logprobs_plan.wanted:
            logprobs = {
                req_id: [
                    row_to_dict(self._logprobs_plan, host, int(self._cu_num_logits[i]) + j, int(self._num_logprobs[i]))
                    for j in range(num_sampled[i])
                ]
                for i, req_id in enumerate(self._req_ids)
                if self._num_logprobs[i] >= 0 and num_sampled[i]
            }
        prompt_logprobs = None if self._prompt_logprobs is None else self._prompt_logprobs.result()
        traces = read_traces(host, self._req_ids, np.flatnonzero(num_sampled[:num_reqs] == 0))
        draft_traces = read_draft_traces(host, self._req_ids, sampled[:num_reqs], num_sampled[:num_reqs])
        return ModelRunnerOutput(
            self._req_ids, sampled[:num_reqs], num_sampled[:num_reqs], logprobs, prompt_logprobs, traces, draft_traces
        )
