"""Repetition, frequency and presence penalties: kernels 13 and 14.

The prompt's tokens are a bitmap and the output's are counted, both on the device, where kernel 10 adds what is sampled.
R max requests, V vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch

from kernels import PenaltyTables, apply_penalties, bincount

from ...device import Device
from ...sampling_params import SamplingParams
from ..buffers import UvaBackedTensor, publish
from .tables import DraftRows, TokenTable, set_if_new


class Penalties:
    def __init__(
        self, device: Device, num_rows: int, vocab_size: int, ring_depth: int, form: str, tokens: TokenTable
    ) -> None:
        def uva() -> UvaBackedTensor:
            return UvaBackedTensor(device, (num_rows,), torch.float32, ring_depth)

        self._device = device
        self._form = form
        self._shape = (num_rows, vocab_size)
        self._tokens = tokens
        self.repetition, self.frequency, self.presence = (uva() for _ in range(3))
        self.repetition.np.fill(1)
        self.repetition.gpu.fill_(1)
        self._used = np.zeros(num_rows, dtype=bool)
        # Rows that have to be counted, with how many tokens they have.
        self._new: dict[int, int] = {}
        # R * V * 4 bytes of counts, hundreds of megabytes: made for the first request that needs them.
        self._tables: PenaltyTables | None = None

    @property
    def output_bin_counts(self) -> torch.Tensor | None:
        """i32 [R, V], None until a request has used penalties. To be read on the stream only."""
        return self._tables.output_bin_counts if self._tables is not None else None

    def add_request(self, row: int, params: SamplingParams, prefill_len: int) -> None:
        set_if_new(self.repetition, row, params.repetition_penalty)
        set_if_new(self.frequency, row, params.frequency_penalty)
        set_if_new(self.presence, row, params.presence_penalty)
        self._used[row] = params.uses_penalties
        self._new.pop(row, None)
        if params.uses_penalties:
            self._new[row] = prefill_len

    def apply_staged_writes(self) -> list[str]:
        """Sends what changed and counts the new requests' tokens, whose rows must have been written before."""
        publish(self._device, "publish penalties", self.repetition, self.frequency, self.presence)
        if not self._new:
            return []
        rows = self._device.to_device(np.fromiter(self._new, dtype=np.int32, count=len(self._new)))
        self._device.compute.submit("bincount", self._count, rows, max(self._new.values()))
        self._new = {}
        return ["bincount"]

    def _count(self, rows: torch.Tensor, max_prefill_len: int) -> None:
        tables = self._tables = self._tables or self._make_tables(rows.device)
        bincount(
            rows, *self._tokens, tables.prompt_bin_mask, tables.output_bin_counts, max_prefill_len, form=self._form
        )

    def _make_tables(self, device: torch.device) -> PenaltyTables:
        num_rows, vocab_size = self._shape
        return PenaltyTables(
            repetition=self.repetition.gpu,
            frequency=self.frequency.gpu,
            presence=self.presence.gpu,
            prompt_bin_mask=torch.zeros(num_rows, -(-vocab_size // 32), dtype=torch.int32, device=device),
            output_bin_counts=torch.zeros(num_rows, vocab_size, dtype=torch.int32, device=device),
        )

    def in_use(self, rows: np.ndarray) -> bool:
        """Whether a request of these state rows uses it."""
        return bool(self._used[rows].any())

    def apply(self, logits: torch.Tensor, idx_mapping: torch.Tensor, drafts: DraftRows) -> None:
        """Called on the stream; logits f32 [l, V] changed in place, idx_mapping i32 [l]."""
        assert self._tables is not None, "penalties: apply_staged_writes comes first"
        apply_penalties(
            logits, idx_mapping, drafts.expanded_local_pos, drafts.token_ids, self._tables,
            max_drafts=drafts.max_drafts, form=self._form,
        )  # fmt: skip
