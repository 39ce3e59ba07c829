"""A step while the scheduler puts it together, and the SchedulerOutput made of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from .request import Request
from .sched_output import CachedRequestData, NewRequestData, SchedulerOutput


@dataclass
class StepPlan:
    """`budget` is what is left of the step's tokens; `scheduled` is in schedule order."""

    budget: int
    scheduled: dict[str, Request] = field(default_factory=dict)
    preempted: set[str] = field(default_factory=set)
    short_of_blocks: bool = False
    """A running request sits this step out because no block is left for it."""
    _num_tokens: dict[str, int] = field(default_factory=dict)
    _new: list[NewRequestData] = field(default_factory=list)
    _new_block_ids: dict[str, list[int]] = field(default_factory=dict)
    _num_computed_tokens: list[int] = field(default_factory=list)
    _resumed: set[str] = field(default_factory=set)
    _all_token_ids: dict[str, list[int]] = field(default_factory=dict)

    @property
    def can_admit(self) -> bool:
        """False when an admission would take the blocks that a preempted or left-out request is waiting for."""
        return self.budget > 0 and not self.preempted and not self.short_of_blocks

    def add_cached(self, request: Request, block_ids: list[int], *, resumed: bool, in_last_step: bool) -> None:
        """A request that the runner holds; `block_ids` are the added ones, or all of them if `resumed`."""
        self._new_block_ids[request.request_id] = block_ids
        self._num_computed_tokens.append(request.num_computed_tokens)
        if resumed:
            self._resumed.add(request.request_id)
        if resumed or not in_last_step:
            self._all_token_ids[request.request_id] = request.all_token_ids

    def add_new(self, request: Request, block_ids: list[int], seed_index: int) -> None:
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

    def take(self, request: Request, num_tokens: int) -> None:
        """Spends `num_tokens` of the budget on `request`."""
        self.budget -= num_tokens
        self.scheduled[request.request_id] = request
        self._num_tokens[request.request_id] = num_tokens

    def output(self, step: int, finished_req_ids: frozenset[str]) -> SchedulerOutput:
        cached = CachedRequestData(
            req_ids=list(self._new_block_ids),
            resumed_req_ids=frozenset(self._resumed),
            new_block_ids=list(self._new_block_ids.values()),
            num_computed_tokens=self._num_computed_tokens,
            all_token_ids=self._all_token_ids,
        )
        return SchedulerOutput(
            step=step,
            scheduled_new_reqs=self._new,
            scheduled_cached_reqs=cached,
            num_scheduled_tokens=self._num_tokens,
            total_num_scheduled_tokens=sum(self._num_tokens.values()),
            finished_req_ids=finished_req_ids,
            preempted_req_ids=frozenset(self.preempted),
        )
