"""How many drafts of each step were accepted, kept by step until somebody asks a request for its own.

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


class DraftRounds:
    """Rounds of requests that stand in the scheduler's table; `settle` gives them to the requests."""

    def __init__(self) -> None:
        self._requests: Sequence[Request] = ()
        self._kept: list[tuple[np.ndarray, np.ndarray]] = []

    def add(self, requests: Sequence[Request], num_drafts: np.ndarray, counts: np.ndarray) -> None:
        """A round of `requests`, r of them: `counts` [r] tokens came of `num_drafts` i64 [r] drafts and the token
        behind them. It is none of those without drafts, or without tokens.

        The very same sequence in each step is kept; `num_drafts` must not change afterwards, `counts` may.
        """
        if requests is not self._requests or len(self._kept) == ROUNDS_AT_ONCE:
            self.settle()
            self._requests = requests
        self._kept.append((num_drafts, counts.copy()))

    def settle(self) -> None:
        """Every round kept so far is in its request's books afterwards, in order."""
        if not self._kept:
            return
        drafts = np.stack([num_drafts for num_drafts, _ in self._kept], axis=1)
        counts = np.stack([count for _, count in self._kept], axis=1)
        requests, self._requests, self._kept = self._requests, (), []
        is_round = (drafts > 0) & (counts > 0)
        drafts_of_all = np.where(is_round, drafts, 0).sum(axis=1).tolist()
        if is_round.all():
            for request, accepted, num_drafts in zip(requests, (counts - 1).tolist(), drafts_of_all, strict=True):
                request.add_rounds(accepted, num_drafts)
            return
        for i in np.flatnonzero(drafts_of_all).tolist():
            requests[i].add_rounds((counts[i, is_round[i]] - 1).tolist(), drafts_of_all[i])
