"""What one step of runner V1 hands on from phase to phase: on the host, and between pieces of submitted work."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from ..attention import AttentionMetadata
from ..sample.logprobs import LogprobsTensors
from .forward_graphs import ForwardSize
from .outputs import prompt_key
from .rejection_sampler import RejectionSamplerOutput
from .sampler import SamplerOutput


@dataclass(frozen=True)
class StepInputs:
    """What `prepare_inputs` leaves for the rest of the step. r requests in row order, t tokens."""

    req_ids: tuple[str, ...]
    num_scheduled_tokens: np.ndarray
    query_start_loc_np: np.ndarray
    num_tokens: int
    discarded: frozenset[int]
    metadata: AttentionMetadata
    drafts: tuple[list[int], ...]
    """Of each row, the last tokens of its query."""
    size: ForwardSize | None
    """Of the captured forward that the step runs; None: piece by piece."""

    @property
    def num_drafts(self) -> tuple[int, ...]:
        return tuple(map(len, self.drafts))


@dataclass
class DeviceValues:
    """What a step computes on the device. Written and read by submitted work only."""

    hidden: torch.Tensor | None = None
    output: SamplerOutput | RejectionSamplerOutput | None = None
    drafts: torch.Tensor | None = None
    """For the next step, of a drafter that works on the device."""
    prompt_logprobs: dict[str, LogprobsTensors] = field(default_factory=dict)
    """By request."""
    trace: dict[str, torch.Tensor] = field(default_factory=dict)

    def tensors(self) -> dict[str, torch.Tensor]:
        assert self.output is not None
        tensors = {"sampled": self.output.sampled, **self.trace}
        if isinstance(self.output, RejectionSamplerOutput):
            tensors["num_sampled"] = self.output.num_sampled
        if self.drafts is not None:
            tensors["drafts"] = self.drafts
        if self.output.logprobs is not None:
            tensors |= self.output.logprobs.as_dict()
        for req_id, logprobs in self.prompt_logprobs.items():
            tensors |= {prompt_key(req_id, name): tensor for name, tensor in logprobs.as_dict().items()}
        return tensors
