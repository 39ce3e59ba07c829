"""A step while the scheduler puts it together, and the SchedulerOutput made of it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from .request import Request
from .running_table import RunningTable
from .sched_output import CachedRequestData, NewRequestData, SchedulerOutput
from .scheduled_batch import ScheduledBatch

_NO_ROWS = np.empty(0, dtype=np.int64)


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
        return ScheduledBatch.of_table(table, rows, num_tokens, num_drafts)

    def output(self, step: int, batch: ScheduledBatch, finished_req_ids: frozenset[str]) -> SchedulerOutput:
        running_ids = batch.req_ids[: len(self.rows)]
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
            scheduled=batch,
            scheduled_new_reqs=self._new,
            scheduled_cached_reqs=cached,
            finished_req_ids=finished_req_ids,
            preempted_req_ids=frozenset(self.preempted),
            host_drafts=None if self.device_drafts else _host_drafts(batch),
            has_structured_output_requests=batch.any_constrained,
        )


def _host_drafts(batch: ScheduledBatch) -> dict[str, list[int]]:
    """The drafts of each request that has some, which the host knows."""
    if not batch.has_drafts:
        return {}
    drafts = {}
    for i in np.flatnonzero(batch.num_drafts).tolist():
        request, count = batch.requests[i], int(batch.num_drafts[i])
        drafts[request.request_id] = request.spec_token_ids[:count]
    return drafts
