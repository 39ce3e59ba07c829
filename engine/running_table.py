"""What the scheduler counts of each running request: numpy columns with a fixed row a request.

A steady step changes every request in the same way, so it is a handful of array operations here, however many requests
run; Python sees a request only when something happens to it. A row is fixed from admission until the request ends or is
preempted; `order` says who was admitted first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .arrived_tokens import ArrivedTokens
from .draft_rounds import DraftRounds

if TYPE_CHECKING:
    from .request import Request

NEVER = np.iinfo(np.int64).max


class RunningTable:
    """R rows. The columns are i64 [R] unless said otherwise; those of a free row mean nothing."""

    def __init__(self, max_num_seqs: int) -> None:
        def column(dtype: type = np.int64) -> np.ndarray:
            return np.zeros(max_num_seqs, dtype=dtype)

        self.num_tokens = column()
        """Tokens known to the host."""
        self.num_output_placeholders = column()
        self.num_computed_tokens = column()
        self.num_drafts = column()
        """Drafted tokens behind the known ones, which its next step may verify."""
        self.prefill_len = column()
        """Tokens that it had to compute when it was admitted."""
        self.limit = column()
        """Tokens, prompt included, at which it ends whatever they are."""
        self.num_slots = column()
        """Token slots of the blocks that it owns."""
        self.publish_at = column()
        """Computed tokens from which its next full block can be published; NEVER without a prefix cache."""
        self.last_step = column()
        """The last step that ran it; 0 before that."""
        self.last_token_time = column(np.float64)
        """Seconds on `time.monotonic`'s clock."""
        self.quiet = column(np.bool_)
        """bool [R]: nobody wants its tokens before it is finished."""
        self.constrained = column(np.bool_)
        """bool [R]: its output is held to a grammar, which has to see each token."""
        self.generation = column()
        """Counts the tenants of a row: a step in flight knows by it whether the row is still its request's."""
        self.requests = np.full(max_num_seqs, None, dtype=object)
        """Request objects [R]; None in a free row."""
        self.req_ids = np.full(max_num_seqs, "", dtype=object)
        """[R] of str objects."""
        self.rounds = DraftRounds(self.requests)
        """Of the requests in the table, as `arrived`."""
        self.arrived = ArrivedTokens(self.requests, self.num_tokens)
        self.version = 0
        """Changes whenever a request comes or goes."""
        self._priority = column()
        self._seed_index = column()
        self._arrival = column(np.float64)
        self._order = column()
        self._stop_sets: dict[frozenset[int], int] = {}
        """How many running requests end at these ids: nearly always all at the same."""
        self._stop_token_ids: np.ndarray | None = None
        self._free = list(range(max_num_seqs - 1, -1, -1))

    def __len__(self) -> int:
        return len(self.requests) - len(self._free)

    @property
    def order(self) -> np.ndarray:
        """The rows in use, i64, in the order of admission. A view: copy it before anything comes or goes."""
        return self._order[: len(self)]

    def running(self) -> list[Request]:
        """In the order of admission."""
        return self.requests[self.order].tolist()

    @property
    def stop_token_ids(self) -> np.ndarray:
        """i64: every id at which some running request may end."""
        if self._stop_token_ids is None:
            self._stop_token_ids = np.array(sorted(frozenset().union(*self._stop_sets)), dtype=np.int64)
        return self._stop_token_ids

    def add(self, request: Request, limit: int, seed_index: int) -> int:
        """Gives `request` a row, as the last in order; its counts live there from now on."""
        count, row = len(self), self._free.pop()
        self._order[count] = row
        self.requests[row], self.req_ids[row] = request, request.request_id
        self.num_tokens[row] = self.prefill_len[row] = request.num_tokens
        self.limit[row] = limit
        self.last_step[row] = 0
        self.num_drafts[row] = 0
        self.quiet[row] = request.quiet
        self.constrained[row] = request.structured_output is not None
        self._priority[row] = request.priority
        self._seed_index[row] = seed_index
        self._arrival[row] = request.arrival_time
        self._count_stop_set(request.stop_token_ids, 1)
        request.enter(self, row)
        self.version += 1
        return row

    def remove(self, request: Request) -> None:
        """Frees the row of `request`, which takes its counts along."""
        self.rounds.leave(request.row)
        row, order = request.leave(), self.order
        place = int(np.flatnonzero(order == row)[0])
        order[place:-1] = order[place + 1 :].copy()
        self._count_stop_set(request.stop_token_ids, -1)
        self.requests[row] = None
        self.generation[row] += 1
        self._free.append(row)
        self.version += 1

    def _count_stop_set(self, stop_set: frozenset[int], change: int) -> None:
        before = self._stop_sets.get(stop_set, 0)
        self._stop_sets[stop_set] = before + change
        if before + change == 0:
            del self._stop_sets[stop_set]
        if before == 0 or before + change == 0:
            self._stop_token_ids = None

    def schedule_order(self, by_priority: bool) -> np.ndarray:
        """Rows, i64: decodes, then partial prefills, in the order of admission; by priority, each priority so, by
        arrival."""
        order = self.order
        is_prefill = self.num_computed_tokens[order] < self.prefill_len[order]
        if by_priority:
            keys = self._seed_index[order], self._arrival[order], is_prefill, self._priority[order]
            return order[np.lexsort(keys)]
        if not np.count_nonzero(is_prefill):
            return order.copy()
        return np.concatenate((order[~is_prefill], order[is_prefill]))

    def num_tokens_to_compute(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """i64, for each of `rows`: tokens that no step computes yet, 0 also when those in flight complete it; and how
        many drafts may be computed behind them: no more than the request can still take."""
        known = self.num_tokens[rows] + self.num_output_placeholders[rows]
        room = self.limit[rows] - known
        num_tokens, drafts = np.where(room <= 0, 0, known - self.num_computed_tokens[rows]), self.num_drafts[rows]
        if not np.count_nonzero(drafts):
            return num_tokens, drafts
        return num_tokens, np.where(num_tokens > 0, np.minimum(drafts, room - 1), 0)

    def advance(self, rows: np.ndarray, num_tokens: np.ndarray, num_drafts: np.ndarray, step: int) -> None:
        """Books `num_tokens`, of which the last `num_drafts` are drafts (i64), into `step` for each of `rows`, and
        placeholders for as many tokens as the step may sample: until they arrive every draft counts as accepted."""
        computed = self.num_computed_tokens[rows] + num_tokens
        self.num_computed_tokens[rows] = computed
        self.last_step[rows] = step
        samples = computed - num_drafts == self.num_tokens[rows] + self.num_output_placeholders[rows]
        self.num_output_placeholders[rows] += np.where(samples, num_drafts + 1, 0)

    def advance_decodes(self, at: np.ndarray | slice, num_tokens: np.ndarray, step: int) -> None:
        """`advance` where each of the rows `at` samples: behind its last known token its `num_tokens` i64 are drafts
        but for the first."""
        self.num_computed_tokens[at] += num_tokens
        self.num_output_placeholders[at] += num_tokens
        self.last_step[at] = step

    def reject(self, rows: np.ndarray | slice, num_rejected: np.ndarray) -> None:
        """Takes back what `advance` counted for drafts that were not accepted, i64 for each of `rows`."""
        self.num_computed_tokens[rows] -= num_rejected
        self.num_output_placeholders[rows] -= num_rejected
