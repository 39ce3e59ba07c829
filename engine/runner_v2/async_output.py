"""The output of a step of runner V2, on its way to the host on the copy stream."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from ..device import Device
from ..sched_output import ModelRunnerOutput
from .sample.logprobs import LogprobsPlan, row_to_dict
from .sample.prompt_logprobs import PromptLogprobsPlan


def empty_tokens(num_rows: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One tensor for all that the host always wants of a step, so that one copy brings it: (it, sampled, num_sampled).

    i64 [r + ceil(r / 2)]: the tokens, then their counts as i32. `sampled` i64 [r, 1] and `num_sampled` i32 [r] are its
    parts.
    """
    tokens = torch.empty(num_rows + (num_rows + 1) // 2, dtype=torch.int64, device=device)
    return tokens, *_parts(tokens, num_rows)


def split_tokens(tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`sampled` i64 [r, 1] and `num_sampled` i32 [r] of what `empty_tokens` made."""
    return _parts(tokens, tokens.shape[0] * 2 // 3)


def _parts(tokens: torch.Tensor, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    return tokens[:num_rows].unsqueeze(1), tokens[num_rows:].view(torch.int32)[:num_rows]


class AsyncOutput:
    """Starts the copies when made; `get_output` waits for them, in the engine's loop and never inside a step.

    `tensors()`, called on the copy stream after the sampler, gives `tokens` (see `empty_tokens`; its rows may be more
    than `req_ids`), and those of `SampledLogprobs.as_dict()` where logprobs were asked for. The device tensors stay
    referenced until the copy ended, so that their memory is not reused under it. Logprobs of prompts have been sent to
    the host by then.
    """

    def __init__(
        self,
        device: Device,
        req_ids: tuple[str, ...],
        num_logprobs: np.ndarray,
        logprobs_plan: LogprobsPlan,
        prompt_logprobs: PromptLogprobsPlan | None,
        tensors: Callable[[], dict[str, torch.Tensor]],
    ) -> None:
        self._device = device
        self._req_ids = req_ids
        self._num_logprobs = num_logprobs
        self._logprobs_plan = logprobs_plan
        self._prompt_logprobs = prompt_logprobs
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
        sampled, num_sampled = (part.numpy() for part in split_tokens(self._host["tokens"]))
        # The rows of a captured batch's padding are cut.
        num_reqs, logprobs = len(self._req_ids), None
        if self._logprobs_plan.wanted:
            logprobs = {
                req_id: [row_to_dict(self._logprobs_plan, host, i, int(self._num_logprobs[i]))]
                for i, req_id in enumerate(self._req_ids)
                if self._num_logprobs[i] >= 0 and num_sampled[i]
            }
        prompt_logprobs = None if self._prompt_logprobs is None else self._prompt_logprobs.result()
        return ModelRunnerOutput(self._req_ids, sampled[:num_reqs], num_sampled[:num_reqs], logprobs, prompt_logprobs)
