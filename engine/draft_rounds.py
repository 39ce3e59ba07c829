"""How many drafts of each step were accepted, by row of the running table, until somebody asks a request for its own.

A step with drafts is a round of every request that decodes in it. To book it request by request would cost the host a
loop over all of them in every step, for numbers that are read once, at the end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from .request import Request

ROUNDS_AT_ONCE = 64
"""So many steps are kept at most."""


class DraftRounds:
    """Rounds of the requests that stand in R rows; `requests[row]` is the row's, None if it is free.

    A request takes its rounds along when it leaves its row, so that the next tenant finds none.
    """

    def __init__(self, requests: np.ndarray) -> None:
        self._requests = requests
        # [steps, R]: tokens that came of the row's drafts, and drafts; a round has both
        self._counts = np.zeros((ROUNDS_AT_ONCE, len(requests)), dtype=np.int32)
        self._drafts = np.zeros((ROUNDS_AT_ONCE, len(requests)), dtype=np.int32)
        self._count = 0

    def add(self, at: np.ndarray | slice, num_drafts: np.ndarray, counts: np.ndarray) -> None:
        """A round of the rows `at`, r of them: `counts` [r] tokens came of `num_drafts` i64 [r] drafts and the token
        behind them. It is none of those without drafts, or without tokens."""
        if self._count == ROUNDS_AT_ONCE:
            self.settle()
        self._counts[self._count, at] = counts
        self._drafts[self._count, at] = num_drafts
        self._count += 1

    def leave(self, row: int) -> None:
        """Books the rounds of the row's request, which is about to leave it."""
        if not self._count:
            return
        counts, drafts = self._counts[: self._count, row], self._drafts[: self._count, row]
        request: Request | None = self._requests[row]
        if request is not None:
            is_round = (counts > 0) & (drafts > 0)
            request.add_rounds((counts[is_round] - 1).tolist(), int(drafts[is_round].sum()))
        counts[:] = drafts[:] = 0

    def settle(self) -> None:
        """Every round kept so far is in its request's books afterwards, in order."""
        if not self._count:
            return
        counts, drafts = self._counts[: self._count], self._drafts[: self._count]
        is_round = (counts > 0) & (drafts > 0)
        has_some = np.flatnonzero(is_round.any(axis=0))
        accepted = np.where(is_round, counts - 1, -1)[:, has_some].T.tolist()
        of_all = np.where(is_round, drafts, 0).sum(axis=0)[has_some].tolist()
        for row, own, num_drafts in zip(has_some.tolist(), accepted, of_all, strict=True):
            request: Request | None = self._requests[row]
            assert request is not None, f"row {row} has rounds and is nobody's"
            request.add_rounds(own if -1 not in own else [n for n in own if n >= 0], num_drafts)
        counts[:] = drafts[:] = 0
        self._count = 0
