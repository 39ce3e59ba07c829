"""Runner V2's state table: a fixed row per request, from its first step until it finishes or is preempted.

R max requests, L max model length. Rows never move and nothing is backed up: a preempted request gives its row back and
returns as a new one whose prefill is its prompt and the tokens it had generated.
"""

from __future__ import annotations

import numpy as np
import torch

from ..device import Device
from ..sched_output import NewRequestData
from .buffers import StagedWrites, UvaBackedTensor, publish


class RequestState:
    def __init__(
        self, device: Device, max_num_reqs: int, max_model_len: int, ring_depth: int, form: str, num_drafts: int = 0
    ) -> None:
        self.max_num_reqs = max_num_reqs
        self._device = device
        # One row more than requests: it belongs to nobody, and the padding of a captured batch reads and writes it.
        self.padding_row = max_num_reqs
        rows = max_num_reqs + 1
        self.req_id_to_index: dict[str, int] = {}
        self.index_to_req_id: dict[int, str] = {}
        self.free_indices = list(range(max_num_reqs - 1, -1, -1))

        self._writes = StagedWrites(
            device, form, {"all_token_ids": (rows, max_model_len), "total_len": (rows,), "num_computed_tokens": (rows,)}
        )
        # [R, L] i32
        self.all_token_ids = self._writes.tables["all_token_ids"]
        # [R] i32; prefill_len >= prompt_len, and they differ after a preemption
        self.prompt_len = UvaBackedTensor(device, (rows,), torch.int32, ring_depth)
        self.prefill_len = UvaBackedTensor(device, (rows,), torch.int32, ring_depth)
        # Always inside a prompt, the padding samples nothing and its row stays as it is.
        self.prefill_len.set(self.padding_row, 1)
        # [R] i32, prompt + outputs so far
        self.total_len = self._writes.tables["total_len"]
        # [R] i32: the truth is the device's; the host has an upper bound
        self.num_computed_tokens = self._writes.tables["num_computed_tokens"]
        self.num_computed_tokens_np = np.zeros(rows, dtype=np.int32)
        # [R, 1] i64, [R, max(N, 1)] i64, [R] i32
        self.last_sampled_tokens = device.zeros(rows, 1, dtype=torch.int64)
        self.draft_tokens = device.zeros(rows, max(num_drafts, 1), dtype=torch.int64)
        self.next_prefill_tokens = device.zeros(rows, dtype=torch.int32)

    def add_request(self, new: NewRequestData) -> int:
        """Takes a free row for `new`, stages its values, and returns the row."""
        row = self.free_indices.pop()
        self.req_id_to_index[new.req_id] = row
        self.index_to_req_id[row] = new.req_id
        prefill_len = len(new.prefill_token_ids)
        self.prompt_len.set(row, new.num_prompt_tokens)
        self.prefill_len.set(row, prefill_len)
        self.num_computed_tokens_np[row] = new.num_computed_tokens
        self.all_token_ids.stage(row, 0, new.prefill_token_ids)
        self.total_len.stage(row, 0, [prefill_len])
        self.num_computed_tokens.stage(row, 0, [new.num_computed_tokens])
        return row

    def remove_request(self, req_id: str) -> int | None:
        """Gives the row of `req_id` back; None if it has none."""
        row = self.req_id_to_index.pop(req_id, None)
        if row is not None:
            del self.index_to_req_id[row]
            self.free_indices.append(row)
        return row

    def apply_staged_writes(self) -> list[str]:
        """Sends what `add_request` staged; returns the names of the launches."""
        publish(self._device, "publish lengths", self.prompt_len, self.prefill_len)
        name = "write request states"
        return [name] if self._writes.apply(name) else []
