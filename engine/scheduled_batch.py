"""The requests of a step as the scheduler keeps them until its tokens arrive."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from .request import Request
from .running_table import RunningTable
from .sched_output import ModelRunnerOutput, ScheduledRows


@dataclass(eq=False)
class ScheduledBatch(ScheduledRows):
    """With what a row's request was when the step was made: by the time its tokens arrive the row may be another's.

    generations i64 [r] of the rows, requests [r] of Request objects. quiet bool [r]: whose tokens nobody wants before
    they are all there. constrained bool [r]: whose output is held to a grammar, which has to see each token.
    """

    version: int
    generations: np.ndarray
    requests: np.ndarray
    quiet: np.ndarray
    constrained: np.ndarray
    awaits_first_token: bool = True
    """Some request may have sampled no token yet."""
    _reordered: ScheduledBatch | None = field(default=None, init=False)
    _order: np.ndarray | tuple[str, ...] | None = field(default=None, init=False)
    """What `_reordered` was made by."""

    @classmethod
    def of_table(
        cls, table: RunningTable, rows: np.ndarray, num_tokens: np.ndarray, num_drafts: np.ndarray
    ) -> ScheduledBatch:
        return cls(
            rows, num_tokens, num_drafts, table.req_ids[rows], table.version, table.generation[rows],
            table.requests[rows], table.quiet[rows], table.constrained[rows],
        )  # fmt: skip

    @property
    def structured_output_requests(self) -> list[Request]:
        """Those whose output is held to a grammar."""
        return self.requests[self.constrained].tolist()

    @cached_property
    def at(self) -> slice | np.ndarray:
        """`rows` as an index of the running table's columns: a slice, which costs less, where it can be one. What is
        read by it may be a view."""
        first, count = int(self.rows[0]), len(self.rows)
        return slice(first, first + count) if (self.rows == np.arange(first, first + count)).all() else self.rows

    @cached_property
    def all_quiet(self) -> bool:
        return not np.count_nonzero(~self.quiet)

    @cached_property
    def any_constrained(self) -> bool:
        return bool(np.count_nonzero(self.constrained))

    @cached_property
    def num_sampled_at_most(self) -> np.ndarray:
        """i64 [r], of those that sample."""
        return self.num_drafts + 1

    def in_order_of(self, output: ModelRunnerOutput) -> ScheduledBatch:
        """The same batch in the runner's order. ValueError if its ids aren't the scheduled ones."""
        order = output.req_ids if output.order is None else output.order
        if self._reordered is None or self._order is not order:
            self._order = order
            if output.order is not None:
                self._reordered = self._taken(output.order)
            else:
                self._reordered = self if output.req_ids == self.req_ids else self._taken(self._places(output.req_ids))
        return self._reordered

    def _places(self, req_ids: tuple[str, ...]) -> np.ndarray:
        """i64 [r]: where each of `req_ids` stands here."""
        places = {req_id: i for i, req_id in enumerate(self.req_ids)}
        if places.keys() != set(req_ids) or len(req_ids) != len(places):
            raise ValueError(f"the runner answers for {sorted(req_ids)}, scheduled were {sorted(places)}")
        return np.array([places[req_id] for req_id in req_ids], dtype=np.int64)

    def _taken(self, at: np.ndarray) -> ScheduledBatch:
        return ScheduledBatch(
            self.rows[at], self.num_tokens[at], self.num_drafts[at], self.ids[at], self.version, self.generations[at],
            self.requests[at], self.quiet[at], self.constrained[at],
        )  # fmt: skip
