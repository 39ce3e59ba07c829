"""A step while the scheduler puts it together, and the SchedulerOutput made of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from .request import Request
from .running_table import RunningTable
from .sched_output import CachedRequestData, NewRequestData, SchedulerOutput

_NO_ROWS = np.empty(0, dtype=np.int64)


@dataclass(eq=False)
class ScheduledBatch:
    """Whose tokens a step computes, in schedule order. Steps that do the same for the same requests share one.

    rows i64 [r] of the running table, num_tokens i64 [r], of which num_drafts i64 [r] are drafts, generations i64 [r]
    of the rows then: the row of a request that ends or is preempted in flight may be another's when the tokens arrive.
    """

    version: int
    rows: np.ndarray
    num_tokens: np.ndarray
    num_drafts: np.ndarray
    generations: np.ndarray
    requests: tuple[Request, ...]
    awaits_first_token: bool = True
    """Some request may have sampled no token yet."""

    @cached_property
    def req_ids(self) -> tuple[str, ...]:
        return tuple(request.request_id for request in self.requests)

    @cached_property
    def structured_output_requests(self) -> tuple[Request, ...]:
        """Those whose output is held to a grammar."""
        return tuple(request for request in self.requests if request.structured_output is not None)

    @cached_property
    def at(self) -> slice | np.ndarray:
        """`rows` as an index of the running table's columns: a slice, which costs less, where it can be one. What is
        read by it may be a view."""
        first, count = int(self.rows[0]), len(self.rows)
        return slice(first, first + count) if (self.rows == np.arange(first, first + count)).all() else self.rows

    @cached_property
    def quiet(self) -> np.ndarray:
        """bool [r]: whose tokens nobody wants before they are all there."""
        return np.array([request.quiet for request in self.requests], dtype=np.bool_)

    @cached_property
    def all_quiet(self) -> bool:
        return bool(self.quiet.all())

    @cached_property
    def constrained(self) -> np.ndarray:
        """bool [r]: whose output is held to a grammar, which has to see each token."""
        return np.array([request.structured_output is not None for request in self.requests], dtype=np.bool_)

    @cached_property
    def any_constrained(self) -> bool:
        return bool(self.constrained.any())

    @cached_property
    def num_scheduled_tokens(self) -> dict[str, int]:
        return dict(zip(self.req_ids, self.num_tokens.tolist(), strict=True))

    @cached_property
    def has_drafts(self) -> bool:
        return bool(self.num_drafts.any())

    @cached_property
    def total_num_tokens(self) -> int:
        return int(self.num_tokens.sum())

    @cached_property
    def num_sampled_at_most(self) -> np.ndarray:
        """i64 [r], of those that sample."""
        return self.num_drafts + 1

    @cached_property
    def device_drafts(self) -> dict[str, list[int]]:
        """For each request with drafts as many -1: they are known to the device alone."""
        counts = zip(self.req_ids, self.num_drafts.tolist(), strict=True)
        return {req_id: [-1] * count for req_id, count in counts if count}

    def in_order(self, req_ids: tuple[str, ...]) -> ScheduledBatch:
        """The same batch in the order of the runner's `req_ids`. ValueError if those aren't the scheduled ones."""
        if req_ids == self.req_ids:
            return self
        if self._reordered is None or self._reordered.req_ids != req_ids:
            index = {req_id: i for i, req_id in enumerate(self.req_ids)}
            if index.keys() != set(req_ids) or len(req_ids) != len(index):
                raise ValueError(f"the runner answers for {sorted(req_ids)}, scheduled were {sorted(index)}")
            at = np.array([index[req_id] for req_id in req_ids], dtype=np.int64)
            requests = tuple(self.requests[i] for i in at)
            self._reordered = ScheduledBatch(
                self.version, self.rows[at], self.num_tokens[at], self.num_drafts[at], self.generations[at], requests
            )
        return self._reordered

    _reordered: ScheduledBatch | None = field(default=None, init=False)


@dataclass
class StepPlan:
    """`budget` is what is left of the step's tokens. Running requests stand as rows, admitted ones follow one by
    one."""

    budget: int
    device_drafts: bool = False
    """The drafts are known to the device alone."""
    rows: np.ndarray = field(default_factory=lambda: _NO_ROWS)
    num_tokens: np.ndarray = field(default_factory=lambda: _NO_ROWS)
    num_drafts: np.ndarray = field(default_factory=lambda: _NO_ROWS)
    num_computed_tokens: np.ndarray = field(default_factory=lambda: _NO_ROWS)
    """i64 [rows], before this step."""
    new_block_ids: dict[str, list[int]] = field(default_factory=dict)
    all_token_ids: dict[str, list[int]] = field(default_factory=dict)
    preempted: set[str] = field(default_factory=set)
    short_of_blocks: bool = False
    """A running request sits this step out because no block is left for it."""
    _admitted: list[tuple[Request, int]] = field(default_factory=list)
    _new: list[NewRequestData] = field(default_factory=list)
    _resumed: dict[str, int] = field(default_factory=dict)
    """Request id -> computed tokens."""

    @property
    def can_admit(self) -> bool:
        """False when an admission would take the blocks that a preempted or left-out request is waiting for."""
        return self.budget > 0 and not self.preempted and not self.short_of_blocks

    @property
    def admits(self) -> bool:
        """A request begins, or comes back, in this step."""
        return bool(self._admitted)

    def take_running(
        self, rows: np.ndarray, num_tokens: np.ndarray, num_drafts: np.ndarray, num_computed_tokens: np.ndarray
    ) -> None:
        """Requests that the runner holds, by their rows of the running table; each array i64 [rows]."""
        self.rows, self.num_tokens, self.num_drafts = rows, num_tokens, num_drafts
        self.num_computed_tokens = num_computed_tokens
        self.budget -= int(num_tokens.sum())

    def take_same(self, last: ScheduledBatch, num_computed_tokens: np.ndarray) -> None:
        """As `take_running`, of what the step before ran: `last`."""
        self.rows, self.num_tokens, self.num_drafts = last.rows, last.num_tokens, last.num_drafts
        self.num_computed_tokens = num_computed_tokens
        self.budget -= last.total_num_tokens

    def take_resumed(self, request: Request, num_tokens: int, block_ids: list[int]) -> None:
        """A preempted request that the runner holds still (V1), with all its blocks."""
        self._resumed[request.request_id] = request.num_computed_tokens
        self.new_block_ids[request.request_id] = block_ids
        self.all_token_ids[request.request_id] = request.all_token_ids
        self._take(request, num_tokens)

    def take_new(self, request: Request, num_tokens: int, block_ids: list[int], seed_index: int) -> None:
        """A request that the runner doesn't hold, with all its blocks."""
        data = NewRequestData(
            req_id=request.request_id,
            prompt_token_ids=request.prompt_token_ids,
            prefill_token_ids=request.all_token_ids if request.output_token_ids else request.prompt_token_ids,
            num_prompt_tokens=request.num_prompt_tokens,
            sampling_params=request.sampling_params,
            block_ids=block_ids,
            num_computed_tokens=request.num_computed_tokens,
            request_seed_index=seed_index,
            stop_token_ids=request.stop_token_ids,
        )
        self._new.append(data)
        self._take(request, num_tokens)

    def _take(self, request: Request, num_tokens: int) -> None:
        self.budget -= num_tokens
        self._admitted.append((request, num_tokens))

    def batch(self, table: RunningTable, last: ScheduledBatch | None) -> ScheduledBatch:
        """The step's requests; `last` itself if they and their counts are those of the step before."""
        rows, num_tokens, num_drafts = self.rows, self.num_tokens, self.num_drafts
        if self._admitted:
            num_drafts = np.concatenate((num_drafts, np.zeros(len(self._admitted), dtype=np.int64)))
            rows = np.concatenate((rows, [request.row for request, _ in self._admitted]))
            num_tokens = np.concatenate((num_tokens, [count for _, count in self._admitted]))
        elif (
            last is not None
            and last.version == table.version
            and np.array_equal(last.rows, rows)
            and np.array_equal(last.num_tokens, num_tokens)
            and np.array_equal(last.num_drafts, num_drafts)
        ):
            return last
        requests = tuple(request for row in rows.tolist() if (request := table.requests[row]) is not None)
        return ScheduledBatch(table.version, rows, num_tokens, num_drafts, table.generation[rows], requests)

    def output(self, step: int, batch: ScheduledBatch, finished_req_ids: frozenset[str]) -> SchedulerOutput:
        num_running = len(self.rows)
        # The very tuple of the batch where it can be: a runner sees by it that nothing came or went.
        running_ids = batch.req_ids if num_running == len(batch.req_ids) else batch.req_ids[:num_running]
        computed = self.num_computed_tokens
        if self._resumed:
            running_ids = (*running_ids, *self._resumed)
            computed = np.concatenate((computed, list(self._resumed.values())))
        cached = CachedRequestData(
            req_ids=running_ids,
            resumed_req_ids=frozenset(self._resumed),
            new_block_ids=self.new_block_ids,
            num_computed_tokens=computed,
            all_token_ids=self.all_token_ids,
        )
        return SchedulerOutput(
            step=step,
            scheduled_new_reqs=self._new,
            scheduled_cached_reqs=cached,
            num_scheduled_tokens=batch.num_scheduled_tokens,
            total_num_scheduled_tokens=batch.total_num_tokens,
            finished_req_ids=finished_req_ids,
            preempted_req_ids=frozenset(self.preempted),
            has_structured_output_requests=bool(batch.structured_output_requests),
            scheduled_spec_decode_tokens=batch.device_drafts if self.device_drafts else _drafts(batch),
        )


def _drafts(batch: ScheduledBatch) -> dict[str, list[int]]:
    """The drafts of each request that has some, which the host knows."""
    if not batch.has_drafts:
        return {}
    drafts = {}
    for i in np.flatnonzero(batch.num_drafts).tolist():
        request, count = batch.requests[i], int(batch.num_drafts[i])
        drafts[request.request_id] = request.spec_token_ids[:count]
    return drafts
