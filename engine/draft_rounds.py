"""How many drafts of each step were accepted, by row of the running table, until somebody asks a request for its own.

A step with drafts is a round of every request that decodes in it. To book it request by request would cost the host a
loop over all of them in every step, for numbers that are read once, at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from .request import Request

ROUNDS_AT_ONCE = 64
"""So many steps are kept at most."""
_NO_ROUND = -1


class DraftRounds:
    """Rounds of the requests that stand in R rows; `requests[row]` is the row's, None if it is free.

    A request takes its rounds along when it leaves its row, so that the next tenant finds none.
    """

    def __init__(self, requests: Sequence[Request | None]) -> None:
        self._requests = requests
        # [steps, R]: accepted drafts, _NO_ROUND where the row had no round; and how many there were
        self._accepted = np.full((ROUNDS_AT_ONCE, len(requests)), _NO_ROUND, dtype=np.int32)
        self._drafts = np.zeros((ROUNDS_AT_ONCE, len(requests)), dtype=np.int32)
        self._count = 0

    def add(self, at: np.ndarray | slice, num_drafts: np.ndarray, counts: np.ndarray) -> None:
        """A round of the rows `at`, r of them: `counts` [r] tokens came of `num_drafts` i64 [r] drafts and the token
        behind them. It is none of those without drafts, or without tokens."""
        if self._count == ROUNDS_AT_ONCE:
            self.settle()
        is_round = (num_drafts > 0) & (counts > 0)
        self._accepted[self._count, at] = np.where(is_round, counts - 1, _NO_ROUND)
        self._drafts[self._count, at] = np.where(is_round, num_drafts, 0)
        self._count += 1

    def leave(self, row: int) -> None:
        """Books the rounds of the row's request, which is about to leave it."""
        count, request = self._count, self._requests[row]
        if not count or request is None:
            return
        accepted = self._accepted[:count, row]
        request.add_rounds(accepted[accepted != _NO_ROUND].tolist(), int(self._drafts[:count, row].sum()))
        accepted[:] = _NO_ROUND
        self._drafts[:count, row] = 0

    def settle(self) -> None:
        """Every round kept so far is in its request's books afterwards, in order."""
        count = self._count
        if not count:
            return
        accepted, drafts = self._accepted[:count], self._drafts[:count]
        in_use = np.flatnonzero((accepted != _NO_ROUND).any(axis=0))
        columns = zip(in_use.tolist(), accepted[:, in_use].T.tolist(), drafts.sum(axis=0)[in_use].tolist(), strict=True)
        for row, own, num_drafts in columns:
            request = self._requests[row]
            assert request is not None, f"row {row} has rounds and is nobody's"
            request.add_rounds(own if _NO_ROUND not in own else [n for n in own if n != _NO_ROUND], num_drafts)
        accepted[:] = _NO_ROUND
        drafts[:] = 0
        self._count = 0
