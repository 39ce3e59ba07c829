"""Which tokens of which requests run in the next step. Knows counts, not tensors: nothing of a device or a runner.

A step is a token budget. Requests that decode come first, then prompts that are partly computed, then waiting requests,
whose prompts are cut into chunks by what is left. When blocks run out the last running request is preempted and
computed again later; as in vLLM that happens only for a running request's need, never to admit a waiting one, not
even one of higher priority.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from .block_giving import BlockGiving
from .config import EngineConfig
from .hooks import Hooks, RequestResumed, RequestScheduled
from .request import Request, RequestStatus
from .running_table import RunningTable
from .sched_output import SchedulerOutput
from .scheduled_batch import ScheduledBatch
from .step_plan import StepPlan
from .token_intake import TokenIntake


class Scheduler(TokenIntake, BlockGiving):
    """Makes the steps of one engine, out of its queue, its running set and its KV blocks. `config` must be resolved.

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
        super().__init__(config, hooks, use_v2_model_runner, num_device_drafts, num_lookahead_tokens)
        self._last_batch: ScheduledBatch | None = None
        self._last_step = 0
        """The last step that was not empty."""
        self._steady_steps = 0
        """So many steps can be scheduled like the last one unless a request comes or goes."""
        self._steps_in_blocks = 0
        """In so many of those nobody needs a block, even if every draft is accepted."""

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
        elif len(batch.rows):
            self.table.advance(batch.rows, batch.num_tokens, batch.num_drafts, step)
            if self._num_device_drafts:
                self._expect_drafts(batch.rows)
        if len(batch.rows):
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
        if not self._num_device_drafts:
            if not self._give_turn(plan, batch):
                return None
        elif self._steps_in_blocks > 0:
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
        self._steady_steps, self._turns = 0, None
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
        left = self._slots_left(rows, plan.num_tokens)
        if each == 1 and int(left.max()) >= self.config.block_size:
            steps = min(steps, self.config.block_size)  # so far nobody has two turns
        self._steady_steps = max(0, steps)
        self._steps_in_blocks = max(0, int(left.min()) // each)

    def _schedule_running(self, plan: StepPlan) -> None:
        table = self.table
        rows = table.schedule_order(self._by_priority)
        num_tokens, num_drafts = table.num_tokens_to_compute(rows)
        num_tokens = _within(plan.budget, num_tokens)
        if np.count_nonzero(num_drafts):
            # Drafts get what is left: they never keep a token out of the step that has to be computed anyway.
            num_drafts = _within(plan.budget - int(num_tokens.sum()), np.where(num_tokens > 0, num_drafts, 0))
        num_tokens = num_tokens + num_drafts
        rows = self._give_blocks(plan, rows, num_tokens, num_drafts)
        num_tokens, num_drafts = num_tokens[: len(rows)], num_drafts[: len(rows)]
        if np.count_nonzero(num_tokens) < len(rows):
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


def _within(budget: int, wanted: np.ndarray) -> np.ndarray:
    """What each gets of `budget`, i64, if they are served in order."""
    if wanted.sum() <= budget:
        return wanted
    return np.diff(np.minimum(np.cumsum(wanted), budget), prepend=0)
