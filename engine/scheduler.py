"""Which tokens of which requests run in the next step. Knows counts, not tensors: nothing of a device or a runner.

A step is a token budget. Requests that decode come first, then prompts that are partly computed, then waiting requests,
whose prompts are cut into chunks by what is left. When blocks run out the last running request is preempted and
computed again later; as in vLLM that happens only for a running request's need, never to admit a waiting one, not
even one of higher priority.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Sequence, Set
from typing import Literal

import numpy as np

from .admission import AdmissionLimits
from .config import EngineConfig
from .hooks import (
    Hooks,
    RequestAdded,
    RequestFinished,
    RequestPreempted,
    RequestResumed,
    RequestScheduled,
)
from .kv_cache import KVCacheManager
from .request import Request, RequestStatus
from .running_table import RunningTable
from .sched_output import SchedulerOutput
from .step_plan import ScheduledBatch, StepPlan
from .token_intake import TokenIntake


class Scheduler(TokenIntake):
    """The queue, the running set and the KV blocks of one engine. `config` must be resolved.

    `num_device_drafts` follow each token that a step samples, known to the device alone (V2); their drafter wants KV
    slots for `num_lookahead_tokens` beyond a step's own.

    With `async_scheduling` a step is scheduled before the tokens of the last one have arrived: each of those is
    counted by `Request.num_output_placeholders`, reserved by the step that computes a request's last known token.
    What a step does to all running requests alike is done to the columns of `table` at once.
    """

    def __init__(
        self,
        config: EngineConfig,
        hooks: Hooks,
        use_v2_model_runner: bool,
        num_device_drafts: int = 0,
        num_lookahead_tokens: int = 0,
    ) -> None:
        if config.max_model_len is None or config.max_num_seqs is None or config.num_gpu_blocks_override is None:
            raise ValueError("the scheduler needs a resolved config: call EngineConfig.resolve first")
        kv_cache = KVCacheManager(config.num_gpu_blocks_override, config.block_size, config.enable_prefix_caching)
        super().__init__(config.max_model_len, hooks, RunningTable(config.max_num_seqs), kv_cache)
        self.config = config
        self.max_num_seqs = config.max_num_seqs
        self._limits = AdmissionLimits(config.max_model_len, config.block_size, config.num_gpu_blocks_override - 1)
        self.requests: dict[str, Request] = {}
        """Every unfinished request."""
        self.waiting: list[Request] = []
        """In the order of admission; preempted requests too."""
        self._v2 = use_v2_model_runner
        self._by_priority = config.scheduling_policy == "priority"
        self._num_added = 0
        """The number of the next request, which a request without a seed derives its own from."""
        self._seed_index: dict[str, int] = {}
        self._last_batch: ScheduledBatch | None = None
        self._last_step = 0
        """The last step that was not empty."""
        self._num_device_drafts = num_device_drafts
        self._num_lookahead_tokens = num_lookahead_tokens
        self._steady_steps = 0
        """So many steps can be scheduled like the last one unless a request comes or goes."""
        self._steps_in_blocks = 0
        """In so many of those nobody needs a block."""
        self._runner_ids: set[str] = set()
        """Ids of which the runner keeps state."""
        self._finished_req_ids: set[str] = set()

    # -- requests come and go

    @property
    def running(self) -> list[Request]:
        """In the order in which they were admitted."""
        return self.table.running()

    def check_request(self, request: Request) -> None:
        """Raises ValueError if the id of `request` is taken or it can never run, saying why."""
        rid = request.request_id
        if rid in self.requests:
            raise ValueError(f"request id {rid!r} belongs to an unfinished request; choose another or abort that one")
        self._limits.check(request)

    def add_request(self, request: Request) -> None:
        """Queues `request`. Raises ValueError as `check_request` does."""
        self.check_request(request)
        rid = request.request_id
        self._seed_index[rid] = self._num_added
        self._num_added += 1
        self.requests[rid] = request
        self._enqueue(request)
        if RequestAdded in self._hooks.wanted:
            self._hooks.emit(RequestAdded(*self._hooks.stamp(), rid, tuple(request.prompt_token_ids)))

    def finish_requests(self, request_ids: Iterable[str], reason: str = "abort") -> None:
        """Ends requests at any moment, in flight too; their late tokens are dropped. Unknown ids are ignored."""
        for request_id in request_ids:
            if request_id in self.requests:
                self._finish(self.requests[request_id], reason)

    def has_unfinished(self) -> bool:
        return bool(self.requests)

    def has_requests(self) -> bool:
        """True also while the runner hasn't been told of requests that ended: one more `schedule` does that."""
        return bool(self.requests or self._finished_req_ids)

    @property
    def runner_request_ids(self) -> Set[str]:
        """Ids of which the runner keeps state when it has executed every scheduled step."""
        return self._runner_ids | self._finished_req_ids

    def max_new_tokens(self, num_prompt_tokens: int) -> int:
        """The most tokens that can answer a prompt of this length; below 1 means that the prompt itself can't run."""
        return self._limits.max_new_tokens(num_prompt_tokens)

    def _priority_key(self, request: Request) -> tuple[int, float, int]:
        return request.priority, request.arrival_time, self._seed_index[request.request_id]

    def _enqueue(self, request: Request, front: bool = False) -> None:
        if self._by_priority:
            insort(self.waiting, request, key=self._priority_key)
        elif front:
            self.waiting.insert(0, request)
        else:
            self.waiting.append(request)

    def _finish(self, request: Request, reason: str) -> None:
        rid = request.request_id
        if request.status is RequestStatus.RUNNING:
            self.table.remove(request)
            self.kv_cache.cache_blocks(request)
        else:
            self.waiting.remove(request)
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        # NOTE: a step in flight may still write into these blocks; whoever gets them next writes later in stream order.
        self.kv_cache.free(rid)
        del self.requests[rid], self._seed_index[rid]
        if rid in self._runner_ids:
            self._runner_ids.remove(rid)
            self._finished_req_ids.add(rid)
        if RequestFinished in self._hooks.wanted:
            self._hooks.emit(RequestFinished(*self._hooks.stamp(), rid, reason))

    # -- one step

    def schedule(self, step: int) -> SchedulerOutput:
        """The next step. It may be empty: nothing to run, or every request waits for a token in flight."""
        plan = StepPlan(self.config.max_num_batched_tokens, device_drafts=self._num_device_drafts > 0)
        steady = self._steady_batch(plan)
        if steady is not None:
            plan.take_same(steady, self.table.num_computed_tokens[steady.at].copy())
        else:
            self._schedule_running(plan)
        if RequestScheduled in self._hooks.wanted:
            for row, count in zip(plan.rows.tolist(), plan.num_tokens.tolist(), strict=True):
                self._emit_scheduled(self._request(row), count, "running", 0)
        if self.waiting and plan.can_admit:
            self._schedule_waiting(plan)
        batch = steady if steady is not None and not plan.admits else plan.batch(self.table, self._last_batch)
        if batch is steady:
            self.table.advance_decodes(batch.at, batch.num_tokens, step)
        elif batch.requests:
            self.table.advance(batch.rows, batch.num_tokens, batch.num_drafts, step)
            if self._num_device_drafts:
                self._expect_drafts(batch.rows)
        if batch.requests:
            self._in_flight[step] = self._last_batch = batch
            self._last_step = step
        finished = frozenset(self._finished_req_ids)
        self._finished_req_ids.clear()
        return plan.output(step, batch, finished)

    def _steady_batch(self, plan: StepPlan) -> ScheduledBatch | None:
        """The last step's batch, if this step's running part is the same: it has its blocks then."""
        batch = self._last_batch
        if self._steady_steps == 0 or batch is None or batch.version != self.table.version:
            return None
        if self._steps_in_blocks > 0:
            self._steps_in_blocks -= 1
        else:
            left = self._slots_left(batch.at, batch.num_tokens)
            if not self._add_blocks(plan, batch.rows, left):
                return None
            self._steps_in_blocks = int(left.min()) // (1 + self._num_device_drafts)
        self._steady_steps -= 1
        return batch

    def _note_steadiness(self, plan: StepPlan) -> None:
        """Counts the steps from now on in which all will decode again, with as many drafts and to no end."""
        table, rows = self.table, plan.rows
        self._steady_steps = 0
        if self.config.speculative_config is not None and not self._num_device_drafts:
            return  # what comes after a step depends on drafts that aren't there yet
        each = 1 + self._num_device_drafts
        if not len(rows) or len(rows) != len(table) or plan.all_token_ids or (plan.num_tokens != each).any():
            return
        # Of drafts that are not accepted less will be known, and the end is further.
        known = table.num_tokens[rows] + table.num_output_placeholders[rows]
        if (known != plan.num_computed_tokens + 1).any():
            return
        steps = int((table.limit[rows] - known).min()) // each - 1
        if each == 1 and not self.config.async_scheduling:
            # A step of which every token is known publishes the block that it fills.
            steps = min(steps, int((table.publish_at[rows] - known).min()) - 1)
        self._steady_steps = max(0, steps)
        self._steps_in_blocks = max(0, int(self._slots_left(rows, plan.num_tokens).min()) // each)

    def _schedule_running(self, plan: StepPlan) -> None:
        table = self.table
        rows = table.schedule_order(self._by_priority)
        num_tokens, num_drafts = table.num_tokens_to_compute(rows)
        num_tokens = _within(plan.budget, num_tokens)
        if num_drafts.any():
            # Drafts get what is left: they never keep a token out of the step that has to be computed anyway.
            num_drafts = _within(plan.budget - int(num_tokens.sum()), np.where(num_tokens > 0, num_drafts, 0))
        num_tokens = num_tokens + num_drafts
        rows = self._give_blocks(plan, rows, num_tokens, num_drafts)
        num_tokens, num_drafts = num_tokens[: len(rows)], num_drafts[: len(rows)]
        if not num_tokens.all():
            rows, num_tokens, num_drafts = (array[num_tokens > 0] for array in (rows, num_tokens, num_drafts))
        plan.take_running(rows, num_tokens, num_drafts, table.num_computed_tokens[rows])
        for row in rows[table.last_step[rows] != self._last_step].tolist():
            request = self._request(row)
            plan.all_token_ids[request.request_id] = request.all_token_ids
        self._note_steadiness(plan)

    def _expect_drafts(self, rows: np.ndarray) -> None:
        """Behind each token that a step samples V2's drafter proposes more, which the next step verifies unseen."""
        table = self.table
        decodes = table.num_computed_tokens[rows] >= table.prefill_len[rows]
        table.num_drafts[rows] = np.where(decodes, self._num_device_drafts, 0)

    def update_draft_token_ids(self, draft_token_ids: dict[str, list[int]]) -> None:
        """The drafts that the host has for the next step (V1), by request; requests that have ended are ignored.

        As in vLLM, those from the first one on that a request's grammar refuses are left out.
        """
        for request_id, token_ids in draft_token_ids.items():
            request = self.requests.get(request_id)
            if request is not None and request.row >= 0:
                if request.structured_output is not None:
                    token_ids = token_ids[: request.structured_output.num_allowed(token_ids)]
                request.spec_token_ids = token_ids
                self.table.num_drafts[request.row] = len(token_ids)

    def _give_blocks(
        self, plan: StepPlan, rows: np.ndarray, num_tokens: np.ndarray, num_drafts: np.ndarray
    ) -> np.ndarray:
        """Makes room for `num_tokens` of each of `rows`, of which the last `num_drafts` are drafts; returns the rows
        that have it.

        If blocks run out the one in need goes without its drafts (both arrays are changed); then the last of `rows` is
        preempted, down to the one in need, which at last sits the step out with all behind it.
        """
        table, end = self.table, len(rows)
        left = np.where(num_tokens > 0, self._slots_left(rows, num_tokens), 0)
        ends, known = table.num_computed_tokens[rows] + num_tokens, table.num_tokens[rows]
        # A block is full, and all its tokens are known: the request publishes it, and at the latest with its next one.
        usable = np.minimum(ends, known)
        publishes = (usable >= table.publish_at[rows]) & ((ends <= known) | (left < 0)) & (num_tokens > 0)
        in_need = np.flatnonzero((left < 0) | publishes)
        if self._add_blocks(plan, rows, left):
            self._publish_rows(rows[publishes], usable[publishes])
            return rows
        for i in in_need.tolist():
            if i >= end:
                break
            request = self._request(rows[i])
            block_ids = self._allocate(request, int(num_tokens[i]))
            if block_ids is None and num_drafts[i]:
                num_tokens[i] -= num_drafts[i]
                num_drafts[i] = 0
                block_ids = self.kv_cache.allocate_slots(request, int(num_tokens[i]))
            while block_ids is None and i + 1 < end:
                end -= 1
                self._preempt(self._request(rows[end]), request, plan)
                block_ids = self.kv_cache.allocate_slots(request, int(num_tokens[i]))
            if block_ids is None:
                others_run = bool(num_tokens[:i].any()) or bool(self._in_flight)
                assert others_run, f"request {request.request_id!r} alone doesn't fit the pool"
                plan.short_of_blocks = True
                end = i
                break
            if block_ids:
                plan.new_block_ids[request.request_id] = block_ids
            self._note_blocks(request)
        return rows[:end]

    def _slots_left(self, at: np.ndarray | slice, num_tokens: np.ndarray) -> np.ndarray:
        """i64, of the rows `at`: slots of their blocks behind `num_tokens` more and the drafter's; too few are less
        than 0."""
        ends = self.table.num_computed_tokens[at] + num_tokens
        return self.table.num_slots[at] - np.minimum(ends + self._num_lookahead_tokens, self.max_model_len)

    def _add_blocks(self, plan: StepPlan, rows: np.ndarray, left: np.ndarray) -> bool:
        """Gives `rows` blocks until none of `left` i64, slots left of each, is below 0, and counts them there. False,
        with nothing changed, if there are not enough blocks for all."""
        short = left < 0
        if not np.count_nonzero(short):
            return True
        block_size, needy = self.config.block_size, rows[short]
        num_blocks = -(left[short] // block_size)
        ids = [self._request(row).request_id for row in needy.tolist()]
        block_ids = self.kv_cache.add_blocks(ids, num_blocks.tolist())
        if block_ids is None:
            return False
        plan.new_block_ids.update(zip(ids, block_ids, strict=True))
        left[short] += num_blocks * block_size
        self.table.num_slots[needy] += num_blocks * block_size
        return True

    def _allocate(self, request: Request, num_new_tokens: int, hits: Sequence[int] = ()) -> list[int] | None:
        """As `KVCacheManager.allocate_slots`, with the drafter's slots if there are blocks for them."""
        end = request.num_computed_tokens + len(hits) * self.config.block_size + num_new_tokens
        beyond = min(self._num_lookahead_tokens, self.max_model_len - end)
        block_ids = self.kv_cache.allocate_slots(request, num_new_tokens, hits, beyond)
        if block_ids is None and beyond > 0:
            block_ids = self.kv_cache.allocate_slots(request, num_new_tokens, hits)
        return block_ids

    def _preempt(self, victim: Request, by: Request, plan: StepPlan) -> None:
        rid = victim.request_id
        if RequestPreempted in self._hooks.wanted:
            self._hooks.emit(RequestPreempted(*self._hooks.stamp(), rid, victim.num_computed_tokens, by.request_id))
        self.table.remove(victim)
        victim.spec_token_ids = []
        self.kv_cache.free(rid)
        victim.status = RequestStatus.PREEMPTED
        victim.num_computed_tokens = 0
        victim.num_preemptions += 1
        self._enqueue(victim, front=True)
        plan.preempted.add(rid)
        if self._v2:
            self._runner_ids.discard(rid)

    def _schedule_waiting(self, plan: StepPlan) -> None:
        index = 0
        while index < len(self.waiting) and len(self.table) < self.max_num_seqs and plan.budget > 0:
            request = self.waiting[index]
            if not request.is_ready:
                # NOTE: preempted with a token in flight, what to compute is known once that token has arrived.
                index += 1
                continue
            hits, num_hit_tokens = self.kv_cache.get_computed_blocks(request)
            if request.skip_reading_prefix_cache:
                hits, num_hit_tokens = [], 0
            num_new_tokens = request.num_tokens - num_hit_tokens
            if num_new_tokens > plan.budget:
                if not self.config.enable_chunked_prefill:
                    break
                num_new_tokens = plan.budget
            block_ids = self._allocate(request, num_new_tokens, hits)
            if block_ids is None:
                break
            self.waiting.pop(index)
            self._admit(plan, request, num_new_tokens, block_ids, num_hit_tokens)

    def _admit(
        self, plan: StepPlan, request: Request, num_new_tokens: int, block_ids: list[int], num_hit_tokens: int
    ) -> None:
        rid, resumed = request.request_id, request.status is RequestStatus.PREEMPTED
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = num_hit_tokens
        if request.num_cached_tokens < 0:
            request.num_cached_tokens = num_hit_tokens
        limit = min(request.num_prompt_tokens + request.max_tokens, self.max_model_len)
        self.table.add(request, limit, self._seed_index[rid])
        self._steady_steps = 0
        self._note_blocks(request)
        if rid in self._runner_ids:
            plan.take_resumed(request, num_new_tokens, block_ids)
        else:
            self._runner_ids.add(rid)
            plan.take_new(request, num_new_tokens, block_ids, self._seed_index[rid])
        if resumed and RequestResumed in self._hooks.wanted:
            self._hooks.emit(RequestResumed(*self._hooks.stamp(), rid))
        if RequestScheduled in self._hooks.wanted:
            self._emit_scheduled(request, num_new_tokens, "resumed" if resumed else "new", num_hit_tokens)

    def _emit_scheduled(
        self, request: Request, num_tokens: int, kind: Literal["new", "running", "resumed"], num_hit_tokens: int
    ) -> None:
        stamp, rid, num_computed = self._hooks.stamp(), request.request_id, request.num_computed_tokens
        self._hooks.emit(RequestScheduled(*stamp, rid, num_tokens, num_computed, kind, num_hit_tokens))

    def structured_output_requests(self, scheduler_output: SchedulerOutput) -> list[Request]:
        """Of a step whose forward is launched: the requests for which it will sample a token that a grammar allows.
        The tokens of earlier steps must have arrived."""
        requests = self._in_flight[scheduler_output.step].structured_output_requests
        return [request for request in requests if not request.is_finished and request.num_output_placeholders > 0]

    def recover(self) -> None:
        """After a failed step: what was in flight is void, and what was running is computed again, before the rest.

        Works from `requests` alone, in whatever state the failure left the other books. The runner must be made empty
        too: it is told of every request anew.
        """
        self._in_flight.clear()
        self._runner_ids.clear()
        self._finished_req_ids.clear()
        self.kv_cache.reset()
        running = self.table.running()
        self.table.rounds.settle()
        for request in running:
            request.leave()
        self.table = RunningTable(self.max_num_seqs)
        self._last_batch = None
        self._steady_steps = 0
        known = dict.fromkeys([*running, *self.waiting, *self.requests.values()])
        self.waiting = [r for r in known if self.requests.get(r.request_id) is r]
        for request in self.waiting:
            if request.status is RequestStatus.RUNNING:
                request.status = RequestStatus.PREEMPTED
            request.num_computed_tokens = request.num_output_placeholders = 0
        if self._by_priority:
            self.waiting.sort(key=self._priority_key)

    def check_integrity(self) -> None:
        """Raises AssertionError if queue, running set, counters and blocks don't agree."""
        table, now_running = self.table, self.running
        queued = [*self.waiting, *now_running]
        assert len(queued) == len(self.requests), f"{len(queued)} queued or running, {len(self.requests)} requests"
        running = set(now_running)
        assert len(running) == len(table), f"{len(running)} different requests in {len(table)} rows"
        for request in queued:
            rid = request.request_id
            where = f"request {rid!r} ({request.status.value}): "
            assert self.requests.get(rid) is request, where + "queued, but not among the requests"
            assert (request.status is RequestStatus.RUNNING) == (request in running), where + "in the wrong list"
            slots, computed = len(self.kv_cache.block_ids(rid)) * self.config.block_size, request.num_computed_tokens
            assert slots >= computed, where + f"{computed} tokens computed in {slots} slots"
            assert request in running or slots == 0, where + "waits and owns blocks"
            placeholders = request.num_output_placeholders
            steps = sum(request in batch.requests for batch in self._in_flight.values())
            most = steps * (1 + max(self._num_device_drafts, len(request.spec_token_ids)))
            assert 0 <= placeholders <= most, where + f"{placeholders} placeholders with {steps} steps in flight"
            known = request.num_tokens + placeholders
            assert computed <= known, where + f"{computed} tokens computed of {known}"
            if request in running:
                row = request.row
                assert table.requests[row] is request, where + f"its row {row} is another's"
                assert table.num_tokens[row] == request.num_tokens, where + f"{table.num_tokens[row]} tokens in its row"
                assert table.num_slots[row] == slots, where + f"{table.num_slots[row]} slots in its row, right {slots}"
        self.kv_cache.check_integrity()


def _within(budget: int, wanted: np.ndarray) -> np.ndarray:
    """What each gets of `budget`, i64, if they are served in order."""
    if wanted.sum() <= budget:
        return wanted
    return np.diff(np.minimum(np.cumsum(wanted), budget), prepend=0)
