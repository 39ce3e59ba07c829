"""What a step of runner V2 runs on: persistent buffers, and the small index that is made afresh for each step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from ..device import Device
from .sample import SamplerPlan


class InputBuffers:
    """The model's inputs. Their addresses never change, so that a graph may capture them. R, T as everywhere.

    `query_start_loc` i32 [R + 1], `idx_mapping` i32 [R] and `cu_num_logits` i32 [R + 1] are the parts of `index`, which
    the host writes whole.
    """

    def __init__(self, device: Device, max_num_reqs: int, max_tokens: int) -> None:
        self._device = device
        self.input_ids = device.zeros(max_tokens, dtype=torch.int32)
        self.positions = device.zeros(max_tokens, dtype=torch.int64)
        self.index = device.zeros(3 * max_num_reqs + 2, dtype=torch.int32)
        sizes = max_num_reqs + 1, max_num_reqs, max_num_reqs + 1
        self.query_start_loc, self.idx_mapping, self.cu_num_logits = self.index.split(sizes)
        self.seq_lens = device.zeros(max_num_reqs, dtype=torch.int32)
        self._sent: np.ndarray | None = None

    def send_index(self, index_np: np.ndarray) -> None:
        """Writes the index, unless it is the very one that was sent last."""
        if index_np is not self._sent:
            self._device.write("query_start_loc, idx_mapping, cu_num_logits", self.index, index_np)
            self._sent = index_np

    def hold_nobody(self, padding_row: int, cu_num_logits: torch.Tensor) -> None:
        """At once: an index of padding alone, with so many rows of logits before each, i32 [R + 1]."""
        self.idx_mapping.fill_(padding_row)
        self.query_start_loc.zero_()
        self.cu_num_logits.copy_(cu_num_logits)
        self._sent = None


@dataclass(frozen=True)
class InputBatch:
    """r requests and t tokens of one step, decodes first; the host's side of it. Steps that decode the same requests
    share one."""

    req_ids: tuple[str, ...]
    # [r] i64: the place of each in the schedule
    order: np.ndarray
    # [3 R + 2] i32: query_start_loc, padded with its last value; idx_mapping, padded with a row that is nobody's;
    # cu_num_logits, padded with a row of logits each
    index_np: np.ndarray
    # [r] i32
    num_scheduled_tokens: np.ndarray
    plan: SamplerPlan
    num_tokens: int
    num_tokens_padded: int
    num_reqs_padded: int
    num_decodes: int
    has_prefill: bool

    @property
    def query_start_loc_np(self) -> np.ndarray:
        """i32 [R + 1]."""
        return self.index_np[: len(self.index_np) // 3 + 1]

    @property
    def idx_mapping_np(self) -> np.ndarray:
        """i32 [r]: batch position -> state row."""
        begin = len(self.index_np) // 3 + 1
        return self.index_np[begin : begin + self.num_reqs]

    @property
    def cu_num_logits_np(self) -> np.ndarray:
        """i32 [r + 1]: rows of logits before each request's, one for each and one for each draft."""
        begin = 2 * (len(self.index_np) // 3) + 1
        return self.index_np[begin : begin + self.num_reqs + 1]

    @property
    def num_logits(self) -> int:
        return int(self.cu_num_logits_np[-1])

    @property
    def num_reqs(self) -> int:
        return len(self.req_ids)


@dataclass(frozen=True)
class ExecutionDescriptor:
    """How big the step is run."""

    num_tokens: int
    num_reqs: int


def choose_descriptor(
    num_reqs: int, num_tokens: int, sizes: tuple[int, ...], max_num_reqs: int, max_tokens: int
) -> ExecutionDescriptor:
    """The smallest of the ascending `sizes` that holds a pure decode batch; as it is for any other batch."""
    if num_tokens == num_reqs:
        for size in sizes:
            if num_reqs <= size <= min(max_num_reqs, max_tokens):
                return ExecutionDescriptor(size, size)
    return ExecutionDescriptor(num_tokens, num_reqs)
