"""Drafts from a request's own tokens: kernels/ngram.py has the rule, here are the device's form and the host's."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from kernels import propose_ngram
from kernels.keep_drafts import keep_drafts

from .interface import FinishedStep, SpecDecoder


class NgramDecoder(SpecDecoder):
    on_host = True
    keeps_drafts = True

    def __init__(
        self, num_drafts: int, prompt_lookup_min: int, prompt_lookup_max: int, max_model_len: int, form: str = "auto"
    ) -> None:
        super().__init__(num_drafts)
        self._min, self._max = prompt_lookup_min, prompt_lookup_max
        self._max_model_len = max_model_len
        self._form = form

    @property
    def num_lookahead_tokens(self) -> int:
        """It has no KV cache."""
        return 0

    def propose(self, step: FinishedStep) -> torch.Tensor:
        rows = step.rows
        assert rows.all_token_ids is not None and rows.total_len is not None, "the runner keeps its tokens on the host"
        drafts = propose_ngram(
            step.idx_mapping, rows.all_token_ids, rows.total_len, num_drafts=self.num_drafts, min_ngram=self._min,
            max_ngram=self._max, max_total_len=step.metadata.max_seq_len + 1, form=self._form,
        )  # fmt: skip
        keep_drafts(
            drafts, step.idx_mapping, step.num_sampled, None, self._max_model_len, rows.draft_tokens, form=self._form
        )  # fmt: skip
        return drafts

    def propose_from_tokens(self, tokens: Sequence[np.ndarray]) -> list[list[int]]:
        return [self._lookup(own) for own in tokens]

    def _lookup(self, tokens: np.ndarray) -> list[int]:
        """Narrows the places that agree with the last token, then with the last two, and so on: the last places that
        are left agree for longest."""
        count = min(self.num_drafts, self._max_model_len - len(tokens))
        if count < 1 or not len(tokens):
            return []
        # A place is the index of the token that followed there.
        places = np.flatnonzero(tokens[:-1] == tokens[-1]) + 1
        length = 1
        while length < self._max and len(places):
            longer = places[places > length]
            longer = longer[tokens[longer - length - 1] == tokens[len(tokens) - length - 1]]
            if not len(longer):
                break
            places, length = longer, length + 1
        if not len(places) or length < self._min:
            return []
        return [int(token) for token in tokens[places[0] : places[0] + count]]
