"""Runner V1's inputs: pinned buffers that the host writes anew in each step, and what the device makes of their copies.

R max requests, T max batched tokens.
"""

from __future__ import annotations

import numpy as np
import torch

from ..device import Device
from ..streams import Event
from .input_batch import CpuGpuBuffer, InputBatch

MADE_BY = {
    "input_ids": "host index_select from token_ids_cpu, pinned copy",
    "positions": "device, from the copied computed counts",
    "query_start_loc": "host numpy, pinned copy",
    "seq_lens": "device, from the copied computed counts",
    "slot_mapping": "device, from the copied block table",
    "logits_indices": "device, query_start_loc[1:] - 1",
}
MADE_BY_ASYNC = {**MADE_BY, "input_ids": MADE_BY["input_ids"] + ", then scatter of the last step's sampled tokens"}


class InputBuffers:
    def __init__(self, device: Device, max_num_reqs: int, max_num_tokens: int, block_size: int) -> None:
        r, t = max_num_reqs, max_num_tokens
        self._device, self._block_size = device, block_size
        self.input_ids = CpuGpuBuffer(device, t, dtype=torch.int32)
        self.query_start_loc = CpuGpuBuffer(device, r + 1, dtype=torch.int32)
        self._req_indices = CpuGpuBuffer(device, t, dtype=torch.int64)
        self._query_pos = CpuGpuBuffer(device, t, dtype=torch.int32)
        self._num_scheduled_tokens = CpuGpuBuffer(device, r, dtype=torch.int32)
        self._num_computed_tokens = CpuGpuBuffer(device, r, dtype=torch.int32)
        # Made on the device: i64 [T], i32 [R], i64 [T]
        self.positions = device.zeros(t, dtype=torch.int64)
        self.seq_lens = device.zeros(r, dtype=torch.int32)
        self.slot_mapping = torch.full((t,), -1, dtype=torch.int64, device=device.torch_device)
        self.copied: Event | None = None
        """The last step's buffers are on the device, the batch's block table too; until then the host must not write
        them."""

    def write(self, batch: InputBatch, scheduled: np.ndarray) -> None:
        """Writes and sends the inputs of the rows as they stand, with so many tokens each, i32 [r]."""
        r, t = len(scheduled), int(scheduled.sum())
        req_indices = np.repeat(np.arange(r, dtype=np.int64), scheduled)
        ends = np.cumsum(scheduled)
        query_pos = np.arange(t, dtype=np.int32) - np.repeat(ends - scheduled, scheduled)
        computed = batch.num_computed_tokens_cpu[:r]
        positions = computed[req_indices] + query_pos
        flat = torch.from_numpy(positions + req_indices * batch.max_model_len)
        torch.index_select(batch.token_ids_cpu_tensor.flatten(), 0, flat, out=self.input_ids.cpu[:t])
        self.query_start_loc.np[0] = 0
        self.query_start_loc.np[1 : r + 1] = ends
        self.query_start_loc.np[r + 1 :] = t
        self._req_indices.np[:t] = req_indices
        self._query_pos.np[:t] = query_pos
        self._num_scheduled_tokens.np[:r] = scheduled
        self._num_computed_tokens.np[:r] = computed
        for buffer, n in (
            (self.query_start_loc, len(self.query_start_loc.np)), (self._req_indices, t), (self._query_pos, t),
            (self._num_scheduled_tokens, r), (self._num_computed_tokens, r), (self.input_ids, t),
        ):  # fmt: skip
            buffer.copy_to_gpu(n)
        self.copied = self._device.compute.record_event()
        self._device.compute.submit("positions, slots", self._make_on_device, batch.block_table.gpu, r, t)

    def _make_on_device(self, block_table: torch.Tensor, r: int, t: int) -> None:
        """On the stream: positions i64 [t], seq_lens i32 [r], slots i64 [t] from what was copied."""
        req_indices = self._req_indices.gpu[:t]
        positions = self.positions[:t]
        positions.copy_(self._num_computed_tokens.gpu[req_indices] + self._query_pos.gpu[:t])
        self.seq_lens[:r].copy_(self._num_computed_tokens.gpu[:r] + self._num_scheduled_tokens.gpu[:r])
        self.seq_lens[r:].zero_()
        blocks = block_table[req_indices, positions // self._block_size]
        # A captured batch is larger: its rows beyond t must write nothing.
        self.slot_mapping[t:].fill_(-1)
        self.slot_mapping[:t].copy_(blocks.long() * self._block_size + positions % self._block_size)
