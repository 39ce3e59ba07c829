"""Numbers of drafts that were judged: acceptance by position, and accepted lengths over time.

A round is the drafts of one request in one step. Position k counts from 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from engine.hooks import DraftProposed, DraftVerified

COLUMNS = 16
"""At most so many stretches of time."""


class Round(NamedTuple):
    """`step` is the session's step in which the judgement came."""

    step: int
    proposed: DraftProposed
    verified: DraftVerified

    @property
    def num_drafts(self) -> int:
        return len(self.proposed.token_ids)


def by_position(rounds: Sequence[Round]) -> list[dict[str, Any]]:
    """Of each position k the shares c of the drafts whose forerunners all stand, and a of all k-th drafts, that stand.

    A round with fewer than k drafts counts for neither. c is None where no draft came so far.
    """
    shown = []
    for k in range(1, max((one.num_drafts for one in rounds), default=0) + 1):
        accepted = [one.verified.num_accepted for one in rounds if one.num_drafts >= k]
        reached = sum(count >= k - 1 for count in accepted)
        stand = sum(count >= k for count in accepted)
        shown.append(
            {
                "k": k,
                "c": round(stand / reached, 4) if reached else None,
                "a": round(stand / len(accepted), 4),
                "of": [stand, reached, len(accepted)],
            }
        )
    return shown


def over_time(rounds: Sequence[Round]) -> dict[str, Any]:
    """The histogram of accepted lengths in stretches of steps, and over all of them.

    `steps`: first and last step of each column. `rows`, longest first: [length, of each column and of all the number of
    rounds]; `totals`: the rounds of each column and of all.
    """
    if not rounds:
        return {"steps": [], "rows": [], "totals": []}
    first, last = rounds[0].step, rounds[-1].step
    width = -(-(last - first + 1) // COLUMNS)
    num_columns = (last - first) // width + 1
    counts = np.zeros((max(one.num_drafts for one in rounds) + 1, num_columns + 1), dtype=np.int64)
    for one in rounds:
        counts[one.verified.num_accepted, [(one.step - first) // width, num_columns]] += 1
    edges = [first + width * i for i in range(num_columns)]
    return {
        "steps": [[begin, min(begin + width - 1, last)] for begin in edges],
        "rows": [[length, counts[length].tolist()] for length in reversed(range(len(counts)))],
        "totals": counts.sum(axis=0).tolist(),
    }
