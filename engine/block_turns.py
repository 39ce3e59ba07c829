"""Who gets a block in which step, while the same requests decode one token each."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from .scheduled_batch import ScheduledBatch


class BlockTurns:
    """A request's turn comes when its slots are used up, and again in every `block_size`-th step from then on: so who
    shares one turn shares them all.

    Args:
        left: i64 [r], slots that the coming step leaves each request of `batch`, -1 where it takes a new block. Who has
            `block_size` - 1 of them or more gets no turn.
    """

    def __init__(self, batch: ScheduledBatch, left: np.ndarray, block_size: int) -> None:
        order = np.argsort(left, kind="stable")
        rows, req_ids = batch.rows[order], batch.ids[order].tolist()
        ends = np.searchsorted(left[order], np.arange(-1, block_size)).tolist()
        self._turns = [(rows[begin:end], req_ids[begin:end]) for begin, end in pairwise(ends)]
        self._next = 0

    def next(self) -> tuple[np.ndarray, list[str]]:
        """Who needs a block in the next step: rows of the running table, i64, and ids, in schedule order."""
        turn = self._turns[self._next]
        self._next = (self._next + 1) % len(self._turns)
        return turn
