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


def words_of_tokens(num_rows: int, width: int) -> int:
    """Length of what `empty_tokens` returns."""
    return num_rows * width + (num_rows + 1) // 2


def empty_tokens(num_rows: int, width: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One tensor for all that the host always wants of a step, so that one copy brings it: (it, sampled, num_sampled).

    i64 [r * w + ceil(r / 2)]: the tokens, then their counts as i32. `sampled` i64 [r, w] and `num_sampled` i32 [r] are
    its parts.
    """
    tokens = torch.empty(words_of_tokens(num_rows, width), dtype=torch.int64, device=device)
    return tokens, *parts_of_tokens(tokens, num_rows, width)


def parts_of_tokens(tokens: torch.Tensor, num_rows: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`sampled` i64 [..., r, w] and `num_sampled` i32 [..., r] of such tensors, i64 [..., r * w + ceil(r / 2)]."""
    size = num_rows * width
    sampled = tokens[..., :size].unflatten(-1, (num_rows, width))
    return sampled, tokens[..., size:].view(torch.int32)[..., :num_rows]


class HostBuffers:
    """What one step's output is copied to, pinned and by name: `tokens` i64 [size], with its numpy view, and what else
    may come with it, made when it first does."""

    def __init__(self, device: Device, size: int) -> None:
        self._device = device
        tokens = device.empty_host((size,), torch.int64)
        self.tokens_np: np.ndarray = tokens.numpy()
        self._buffers = {"tokens": tokens}
        self._last: dict[str, torch.Tensor] = {}

    def like(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the shape and type of `tensor`, in the memory that the last one of this name had if it fits."""
        last = self._last.get(name)
        if last is not None and last.shape == tensor.shape and last.dtype == tensor.dtype:
            return last
        buffer = self._buffers.get(name)
        if buffer is None or buffer.dtype != tensor.dtype or buffer.numel() < tensor.numel():
            buffer = self._buffers[name] = self._device.empty_host((tensor.numel(),), tensor.dtype)
        self._last[name] = shaped = buffer[: tensor.numel()].view(tensor.shape)
        return shaped


class HostRing:
    """As many HostBuffers as steps can be in flight, and one that is read."""

    def __init__(self, device: Device, size: int, depth: int) -> None:
        self._buffers = [HostBuffers(device, size) for _ in range(depth)]
        self._next = 0

    def next(self) -> HostBuffers:
        self._next = (self._next + 1) % len(self._buffers)
        return self._buffers[self._next]


class AsyncOutput:
    """Starts the copies when made; `get_output` waits for them, in the engine's loop and never inside a step.

    `tensors()`, called on the copy stream after the sampler, gives what goes to `host`: `tokens` (see `empty_tokens`;
    its rows may be more than `req_ids`), and those of `SampledLogprobs.as_dict()` where logprobs were asked for and of
    `trace_tensors` and `draft_tensors` where somebody watches. The device tensors stay referenced until the copy ended,
    so that their memory is not reused under it. Logprobs of prompts have been sent to the host by then.
    """

    def __init__(
        self,
        device: Device,
        req_ids: tuple[str, ...],
        num_logprobs: np.ndarray | None,
        logprobs_plan: LogprobsPlan,
        prompt_logprobs: PromptLogprobsPlan | None,
        host: HostBuffers,
        width: int,
        cu_num_logits: np.ndarray,
        tensors: Callable[[], dict[str, torch.Tensor]],
        observe_confidences: Callable[[np.ndarray], None] | None = None,
        order: np.ndarray | None = None,
    ) -> None:
        self._device = device
        self._req_ids = req_ids
        self._order = order
        self._observe_confidences = observe_confidences
        self._num_logprobs = num_logprobs
        self._logprobs_plan = logprobs_plan
        self._prompt_logprobs = prompt_logprobs
        self._buffers = host
        self._width = width
        self._cu_num_logits = cu_num_logits
        self._tensors = tensors
        self._host: dict[str, torch.Tensor] = {}
        self._kept: dict[str, torch.Tensor] = {}
        device.copy.wait_event(device.compute.record_event(for_host=False))
        device.copy.submit("output", self._copy)
        self._copied = device.copy.record_event()
        self._has_arrived = False

    def _copy(self) -> None:
        self._kept = self._tensors()
        for name, tensor in self._kept.items():
            self._host[name] = self._buffers.like(name, tensor).copy_(tensor, non_blocking=True)

    def let_overwrite(self) -> None:
        """What the compute stream does from now on may overwrite the device's tensors: it comes behind the copies."""
        if not self._has_arrived:
            self._device.compute.wait_event(self._copied)

    def get_output(self) -> ModelRunnerOutput:
        self._device.wait(self._copied, "output", inside_step=False)
        self._has_arrived, self._kept = True, {}
        tokens, width = self._buffers.tokens_np, self._width
        # Of r rows there are r * width tokens and ceil(r / 2) words of counts.
        rows = self._host["tokens"].shape[0] * 2 // (2 * width + 1)
        size, host = rows * width, {name: tensor.numpy() for name, tensor in self._host.items() if name != "tokens"}
        sampled, num_sampled = tokens[:size].reshape(rows, width), tokens[size:].view(np.int32)[:rows]
        confidences = host.pop(CONFIDENCES, None)
        if self._observe_confidences is not None and confidences is not None:
            self._observe_confidences(confidences[: len(self._req_ids)].copy())
        # The rows of a captured batch's padding are cut.
        num_reqs, logprobs = len(self._req_ids), None
        if self._num_logprobs is not None:
            logprobs = {
                req_id: [
                    row_to_dict(self._logprobs_plan, host, int(self._cu_num_logits[i]) + j, int(self._num_logprobs[i]))
                    for j in range(num_sampled[i])
                ]
                for i, req_id in enumerate(self._req_ids)
                if self._num_logprobs[i] >= 0 and num_sampled[i]
            }
        prompt_logprobs = None if self._prompt_logprobs is None else self._prompt_logprobs.result()
        sampled, num_sampled = sampled[:num_reqs], num_sampled[:num_reqs]
        traces = draft_traces = None
        if host:
            traces = read_traces(host, self._req_ids, np.flatnonzero(num_sampled == 0))
            draft_traces = read_draft_traces(host, self._req_ids, sampled, num_sampled)
        return ModelRunnerOutput(
            self._req_ids, sampled, num_sampled, logprobs, prompt_logprobs, traces, draft_traces, self._order
        )
