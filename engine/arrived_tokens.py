"""The last tokens of each running request, by row of the running table, until somebody asks the request for its own.

To append a step's tokens request by request would cost the host a loop over all of them in every step, for lists that
nobody reads before a request ends, if nobody watches it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from .request import Request

TOKENS_KEPT = 256
"""Of each row, if not so many come at once that it takes more; a power of two."""


class ArrivedTokens:
    """Tokens of the requests that stand in R rows; `requests[row]` is the row's, None if it is free, and
    `num_tokens[row]`, i64, how many of its tokens are known, the prompt's included.

    A token comes here first, and then `num_tokens` counts it. A request takes its tokens along when it leaves its row.
    """

    def __init__(self, requests: np.ndarray, num_tokens: np.ndarray) -> None:
        self._requests = requests
        self._num_tokens = num_tokens
        self._entered = np.zeros(len(requests), dtype=np.int64)
        """Tokens that each request had when it came: those before are not here."""
        self._settled = np.zeros(len(requests), dtype=np.int64)
        """Tokens of each request that are in its own list too."""
        self._make(TOKENS_KEPT)

    def _make(self, size: int) -> None:
        rows = len(self._requests)
        # [R, size] i64: the token at position p in column p modulo size
        self._kept = np.zeros((rows, size), dtype=np.int64)
        self._flat, self._begin, self._mask = self._kept.reshape(-1), np.arange(rows) * size, size - 1
        self._room = size
        """So many may still come to a row before some would be lost that are in no list."""

    def enter(self, row: int) -> None:
        """The row has got its request, all of whose tokens are in its own list."""
        self._entered[row] = self._settled[row] = self._num_tokens[row]

    def add(self, at: np.ndarray | slice, tokens: np.ndarray) -> None:
        """Tokens i64 [r, w], the next of the rows `at`, r of them, as far as they will be counted."""
        width = tokens.shape[1]
        if self._room < width:
            self._make_room(width)
        self._room -= width
        known, begin = self._num_tokens[at], self._begin[at]
        if width == 1:
            self._flat[(known & self._mask) + begin] = tokens[:, 0]
        else:
            self._flat[((known[:, None] + np.arange(width)) & self._mask) + begin[:, None]] = tokens

    def add_one(self, row: int, token_id: int) -> None:
        """The row's next token, which is in the request's own list already, with all before it; counts it."""
        self._kept[row, self._num_tokens.item(row) & self._mask] = token_id
        self._num_tokens[row] += 1
        self._settled[row] += 1

    def settle(self, row: int) -> None:
        """Every token that is counted is in the request's own list afterwards."""
        begin, end = self._settled.item(row), self._num_tokens.item(row)
        request: Request | None = self._requests[row]
        if begin < end and request is not None:
            request.take_tokens(self._between(row, begin, end).tolist())
            self._settled[row] = end

    def read(self, row: int, begin: int, end: int) -> np.ndarray | None:
        """The row's tokens from position `begin` to `end`, i64; None if they are not kept."""
        # What came with the last ones and was not counted lies where the oldest did.
        if begin < self._entered.item(row) or begin < self._num_tokens.item(row) - self._kept.shape[1] // 2:
            return None
        return self._between(row, begin, end)

    def ending_at(self, rows: np.ndarray, ends: np.ndarray, count: int) -> list[bytes | None]:
        """`read` for `rows`, i64 as `ends`: the `count` tokens before position `ends`, of 8 bytes each."""
        begins, size = ends - count, count * self._kept.itemsize
        tokens = self._flat[((begins[:, None] + np.arange(count)) & self._mask) + self._begin[rows, None]].tobytes()
        oldest = np.maximum(self._entered[rows], self._num_tokens[rows] - self._kept.shape[1] // 2)
        kept = (begins >= oldest).tolist()
        return [tokens[i * size : (i + 1) * size] if is_kept else None for i, is_kept in enumerate(kept)]

    def _between(self, row: int, begin: int, end: int) -> np.ndarray:
        first, last = begin & self._mask, end & self._mask
        if first < last:
            return self._kept[row, first:last]
        return np.concatenate((self._kept[row, first:], self._kept[row, :last]))

    def _make_room(self, width: int) -> None:
        for row in np.flatnonzero(self._settled < self._num_tokens).tolist():
            self.settle(row)
        self._room = size = self._kept.shape[1]
        if size < 4 * width:
            self._make(1 << (4 * width).bit_length())
            self._entered[:] = self._num_tokens
