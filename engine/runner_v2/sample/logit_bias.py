"""Allowed token ids, logit biases, and the stop ids that min_tokens holds back: kernel 12.

R max requests, A, B, S the most ids of a list.
"""

from __future__ import annotations

import numpy as np
import torch

from kernels import LogitBiasTables, MaxLengths, apply_logit_bias

from ...device import Device
from ...sampling_params import MAX_ALLOWED_TOKEN_IDS, MAX_LOGIT_BIASES, MAX_STOP_IDS, SamplingParams
from ..buffers import StagedWrites, UvaBackedTensor, publish
from .tables import set_if_new


class LogitBias:
    def __init__(self, device: Device, num_rows: int, ring_depth: int, form: str) -> None:
        def counts() -> UvaBackedTensor:
            return UvaBackedTensor(device, (num_rows,), torch.int32, ring_depth)

        widths = {"allowed_ids": MAX_ALLOWED_TOKEN_IDS, "bias_ids": MAX_LOGIT_BIASES, "biases": MAX_LOGIT_BIASES}
        widths["stop_ids"] = MAX_STOP_IDS
        self._writes = StagedWrites(device, form, {name: (num_rows, width) for name, width in widths.items()})
        tables = self._writes.tables
        self._device = device
        self._form = form
        self.num_allowed, self.num_biases, self.num_stop_ids, self.min_len = (counts() for _ in range(4))
        # [R, A], [R, B], [R, S] i32
        self.allowed_ids, self.bias_ids, self.stop_ids = (tables[n] for n in ("allowed_ids", "bias_ids", "stop_ids"))
        # [R, B] f32, written as the i32 of the same bits
        self.biases = tables["biases"]
        self._tables = LogitBiasTables(
            num_allowed=self.num_allowed.gpu,
            allowed_ids=self.allowed_ids.gpu,
            num_biases=self.num_biases.gpu,
            bias_ids=self.bias_ids.gpu,
            biases=self.biases.gpu.view(torch.float32),
            num_stop_ids=self.num_stop_ids.gpu,
            stop_ids=self.stop_ids.gpu,
            min_len=self.min_len.gpu,
        )

    def add_request(self, row: int, params: SamplingParams, prompt_len: int, stop_ids: frozenset[int]) -> None:
        allowed, biases = params.allowed_token_ids or (), params.logit_bias or {}
        held_back = sorted(stop_ids) if params.min_tokens else []
        set_if_new(self.num_allowed, row, len(allowed))
        set_if_new(self.num_biases, row, len(biases))
        set_if_new(self.num_stop_ids, row, len(held_back))
        set_if_new(self.min_len, row, prompt_len + params.min_tokens if held_back else 0)
        self.allowed_ids.stage(row, 0, allowed)
        self.bias_ids.stage(row, 0, tuple(biases))
        self.biases.stage(row, 0, np.array(list(biases.values()), dtype=np.float32).view(np.int32).tolist())
        self.stop_ids.stage(row, 0, held_back)

    def apply_staged_writes(self) -> list[str]:
        """Sends what changed; returns the names of the launches."""
        publish(self._device, "publish logit_bias", self.num_allowed, self.num_biases, self.num_stop_ids, self.min_len)
        name = "write logit_bias"
        return [name] if self._writes.apply(name) else []

    def max_lengths(self, rows: np.ndarray) -> MaxLengths | None:
        """The longest lists that requests of these state rows have; None if they have none."""
        lengths = MaxLengths(
            *(int(table.np[rows].max(initial=0)) for table in (self.num_allowed, self.num_biases, self.num_stop_ids))
        )
        return lengths if any(lengths) else None

    def apply(
        self, logits: torch.Tensor, idx_mapping: torch.Tensor, positions: torch.Tensor, max_lengths: MaxLengths
    ) -> None:
        """Called on the stream; logits f32 [l, V] changed in place, idx_mapping i32 [l], positions i64 [l]."""
        apply_logit_bias(logits, idx_mapping, positions, self._tables, max_lengths=max_lengths, form=self._form)
