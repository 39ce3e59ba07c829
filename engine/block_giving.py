"""Which running requests get KV blocks for a step, and who is preempted if there are not enough."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .block_turns import BlockTurns
from .hooks import RequestPreempted
from .request import Request, RequestStatus
from .request_books import RequestBooks
from .scheduled_batch import ScheduledBatch
from .step_plan import StepPlan


class BlockGiving(RequestBooks):
    """All who need blocks get them at once; one by one only where there are not enough for all."""

    _turns: BlockTurns | None = None
    """Of the steps from now on that are like the last one, once there was one."""

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
        if self._add_blocks(plan, rows, left):
            if np.count_nonzero(publishes):
                self._publish_rows(rows[publishes], usable[publishes])
            return rows
        for i in np.flatnonzero((left < 0) | publishes).tolist():
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
        short = np.flatnonzero(left < 0)
        if not len(short):
            return True
        block_size, missing, needy = self.config.block_size, left[short], rows[short]
        num_blocks = -(missing // block_size)
        ids = self.table.req_ids[needy].tolist()
        block_ids = self.kv_cache.add_blocks(ids, num_blocks.tolist())
        if block_ids is None:
            return False
        plan.new_block_ids.update(zip(ids, block_ids, strict=True))
        added = num_blocks * block_size
        left[short] = missing + added
        self.table.num_slots[needy] += added
        return True

    def _give_turn(self, plan: StepPlan, batch: ScheduledBatch) -> bool:
        """`_add_blocks` for steps in which each of `batch` decodes one token again."""
        block_size = self.config.block_size
        if self._turns is None:
            self._turns = BlockTurns(batch, self._slots_left(batch.at, batch.num_tokens), block_size)
        rows, ids = self._turns.next()
        if not ids:
            return True
        block_ids = self.kv_cache.add_blocks(ids, [1] * len(ids))
        if block_ids is None:
            return False
        plan.new_block_ids = dict(zip(ids, block_ids, strict=True))
        self.table.num_slots[rows] += block_size
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
