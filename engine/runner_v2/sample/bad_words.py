"""Sequences of tokens that must not appear in the output: kernel 15. R max requests."""

from __future__ import annotations

import itertools

import numpy as np
import torch

from kernels import BadWordsTables, apply_bad_words

from ...device import Device
from ...sampling_params import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, SamplingParams
from ..buffers import StagedWrites, UvaBackedTensor, publish
from .tables import DraftRows, TokenTable, set_if_new


class BadWords:
    def __init__(self, device: Device, num_rows: int, ring_depth: int, form: str, tokens: TokenTable) -> None:
        self._device = device
        self._form = form
        self._tokens = tokens
        # [R] i32
        self.num_words = UvaBackedTensor(device, (num_rows,), torch.int32, ring_depth)
        # [R, MAX_BAD_WORDS + 1], [R, MAX_BAD_WORD_TOKENS] i32
        shapes = {"offsets": (num_rows, MAX_BAD_WORDS + 1), "word_token_ids": (num_rows, MAX_BAD_WORD_TOKENS)}
        self._writes = StagedWrites(device, form, shapes)
        self.offsets, self.word_token_ids = (self._writes.tables[name] for name in shapes)
        self._tables = BadWordsTables(self.num_words.gpu, self.offsets.gpu, self.word_token_ids.gpu)

    def add_request(self, row: int, params: SamplingParams) -> None:
        words = params.bad_words_token_ids
        set_if_new(self.num_words, row, len(words))
        if words:
            offsets = [0, *itertools.accumulate(len(word) for word in words)]
            self.offsets.stage(row, 0, offsets + [offsets[-1]] * (MAX_BAD_WORDS - len(words)))
            self.word_token_ids.stage(row, 0, list(itertools.chain(*words)))

    def apply_staged_writes(self) -> list[str]:
        """Sends what changed; returns the names of the launches."""
        publish(self._device, "publish bad_words", self.num_words)
        name = "write bad_words"
        return [name] if self._writes.apply(name) else []

    def max_words(self, rows: np.ndarray) -> int:
        """The most words that a request of these state rows has; 0 if none uses it."""
        return int(self.num_words.np[rows].max(initial=0))

    def apply(
        self,
        logits: torch.Tensor,
        idx_mapping: torch.Tensor,
        positions: torch.Tensor,
        drafts: DraftRows,
        max_words: int,
    ) -> None:
        """Called on the stream; logits f32 [l, V] changed in place, idx_mapping i32 [l], positions i64 [l]."""
        apply_bad_words(
            logits, idx_mapping, drafts.expanded_local_pos, drafts.token_ids, positions, self._tokens.all_token_ids,
            self._tokens.prompt_len, self._tables, max_words=max_words, form=self._form,
        )  # fmt: skip
