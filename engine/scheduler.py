"""Which tokens of which requests run in the next step. Knows counts, not tensors: nothing of a device or a runner.

A step is a token budget. Requests that decode come first, then prompts that are partly computed, then waiting requests,
whose prompts are cut into chunks by what is left. When blocks run out the last running request is preempted and
computed again later; as in vLLM that happens only for a running request's need, never to admit a waiting one, not
even one of higher priority.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Set
from typing import Literal

from .admission import AdmissionLimits
from .config import EngineConfig
from .hooks import Hooks, RequestAdded, RequestFinished, RequestPreempted, RequestResumed, RequestScheduled
from .kv_cache import KVCacheManager
from .request import Request, RequestStatus
from .sched_output import ModelRunnerOutput, SchedulerOutput
from .step_plan import StepPlan


class Scheduler:
    """The queue, the running set and the KV blocks of one engine. `config` must be resolved.

    With `async_scheduling` a step is scheduled before the tokens of the last one have arrived: each of those is
    counted by `Request.num_output_placeholders`, reserved by the step that computes a request's last known token.
    """

    def __init__(self, config: EngineConfig, hooks: Hooks, use_v2_model_runner: bool) -> None:
        if config.max_model_len is None or config.max_num_seqs is None or config.num_gpu_blocks_override is None:
            raise ValueError("the scheduler needs a resolved config: call EngineConfig.resolve first")
        self.config = config
        self.max_model_len = config.max_model_len
        self.max_num_seqs = config.max_num_seqs
        self.kv_cache = KVCacheManager(config.num_gpu_blocks_override, config.block_size, config.enable_prefix_caching)
        self._limits = AdmissionLimits(config.max_model_len, config.block_size, config.num_gpu_blocks_override - 1)
        self.requests: dict[str, Request] = {}
        """Every unfinished request."""
        self.waiting: list[Request] = []
        """In the order of admission; preempted requests too."""
        self.running: list[Request] = []
        """In the order in which they were admitted."""
        self._hooks = hooks
        self._v2 = use_v2_model_runner
        self._by_priority = config.scheduling_policy == "priority"
        self._num_added = 0
        self._seed_index: dict[str, int] = {}
        self._prefill_len: dict[str, int] = {}
        """Per running request, the tokens it had to compute when it was admitted."""
        self._in_flight: dict[int, dict[str, Request]] = {}
        """By step. Holds the requests themselves: an id may belong to another request when the tokens arrive."""
        self._last_scheduled: Set[str] = frozenset()
        """Ids of the last step that was not empty."""
        self._runner_ids: set[str] = set()
        """Ids of which the runner keeps state."""
        self._finished_req_ids: set[str] = set()

    # -- requests come and go

    def add_request(self, request: Request) -> None:
        """Queues `request`. Raises ValueError if its id is taken or it can never run, saying why."""
        rid = request.request_id
        if rid in self.requests:
            raise ValueError(f"request id {rid!r} belongs to an unfinished request; choose another or abort that one")
        self._limits.check(request)
        self._seed_index[rid] = self._num_added
        self._num_added += 1
        self.requests[rid] = request
        self._enqueue(request)
        if self._hooks.active:
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
            self.running.remove(request)
            self.kv_cache.cache_blocks(request)
        else:
            self.waiting.remove(request)
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        # NOTE: a step in flight may still write into these blocks; whoever gets them next writes later in stream order.
        self.kv_cache.free(rid)
        del self.requests[rid], self._seed_index[rid]
        self._prefill_len.pop(rid, None)
        if rid in self._runner_ids:
            self._runner_ids.remove(rid)
            self._finished_req_ids.add(rid)
        if self._hooks.active:
            self._hooks.emit(RequestFinished(*self._hooks.stamp(), rid, reason))

    # -- one step

    def schedule(self, step: int) -> SchedulerOutput:
        """The next step. It may be empty: nothing to run, or every request waits for a token in flight."""
        plan = StepPlan(self.config.max_num_batched_tokens)
        self._schedule_running(plan)
        if plan.can_admit:
            self._schedule_waiting(plan)
        if plan.scheduled:
            self._in_flight[step] = plan.scheduled
            self._last_scheduled = plan.scheduled.keys()
        finished = frozenset(self._finished_req_ids)
        self._finished_req_ids.clear()
        return plan.output(step, finished)

    def _running_order(self) -> list[Request]:
        """Decodes, then partial prefills, in the order of admission; under "priority", each priority so, by arrival."""

        def is_prefill(request: Request) -> bool:
            return request.num_computed_tokens < self._prefill_len[request.request_id]

        if self._by_priority:
            return sorted(self.running, key=lambda r: (r.priority, is_prefill(r), self._priority_key(r)))
        return sorted(self.running, key=is_prefill)

    def _schedule_running(self, plan: StepPlan) -> None:
        order = self._running_order()
        index = 0
        while index < len(order) and plan.budget > 0:
            request = order[index]
            index += 1
            num_new_tokens = min(self._num_tokens_to_compute(request), plan.budget)
            if num_new_tokens == 0:
                continue
            block_ids = self._allocate_or_preempt(request, num_new_tokens, order, index, plan)
            if block_ids is None:
                plan.short_of_blocks = True
                break
            plan.add_cached(request, block_ids, resumed=False, in_last_step=request.request_id in self._last_scheduled)
            self._advance(plan, request, num_new_tokens, "running", 0)

    def _num_tokens_to_compute(self, request: Request) -> int:
        """Tokens of `request` that no step computes yet; 0 also when those in flight complete it."""
        num_in_flight = request.num_output_placeholders
        complete = (
            request.num_output_tokens + num_in_flight >= request.max_tokens
            or request.num_tokens + num_in_flight >= self.max_model_len
        )
        return 0 if complete else request.num_tokens + num_in_flight - request.num_computed_tokens

    def _allocate_or_preempt(
        self, request: Request, num_new_tokens: int, order: list[Request], index: int, plan: StepPlan
    ) -> list[int] | None:
        """Blocks for `request`, preempting from the end of `order` down to `index`; None: it sits this step out."""
        while (block_ids := self.kv_cache.allocate_slots(request, num_new_tokens)) is None:
            if len(order) == index:
                assert plan.scheduled or self._in_flight, f"request {request.request_id!r} alone doesn't fit the pool"
                return None
            self._preempt(order.pop(), request, plan)
        return block_ids

    def _preempt(self, victim: Request, by: Request, plan: StepPlan) -> None:
        rid = victim.request_id
        if self._hooks.active:
            self._hooks.emit(RequestPreempted(*self._hooks.stamp(), rid, victim.num_computed_tokens, by.request_id))
        self.running.remove(victim)
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
        while index < len(self.waiting) and len(self.running) < self.max_num_seqs and plan.budget > 0:
            request = self.waiting[index]
            if request.num_output_placeholders > 0:
                # NOTE: preempted with a token in flight: what to compute is known once that token has arrived.
                index += 1
                continue
            hits, num_hit_tokens = self.kv_cache.get_computed_blocks(request)
            num_new_tokens = request.num_tokens - num_hit_tokens
            if num_new_tokens > plan.budget:
                if not self.config.enable_chunked_prefill:
                    break
                num_new_tokens = plan.budget
            block_ids = self.kv_cache.allocate_slots(request, num_new_tokens, hits)
            if block_ids is None:
                break
            self.waiting.pop(index)
            self.running.append(request)
            self._admit(plan, request, num_new_tokens, block_ids, num_hit_tokens)

    def _admit(
        self, plan: StepPlan, request: Request, num_new_tokens: int, block_ids: list[int], num_hit_tokens: int
    ) -> None:
        rid, resumed = request.request_id, request.status is RequestStatus.PREEMPTED
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = num_hit_tokens
        if request.num_cached_tokens < 0:
            request.num_cached_tokens = num_hit_tokens
        self._prefill_len[rid] = request.num_tokens
        if rid in self._runner_ids:
            plan.add_cached(request, block_ids, resumed=True, in_last_step=False)
        else:
            self._runner_ids.add(rid)
            plan.add_new(request, block_ids, self._seed_index[rid])
        if resumed and self._hooks.active:
            self._hooks.emit(RequestResumed(*self._hooks.stamp(), rid))
        self._advance(plan, request, num_new_tokens, "resumed" if resumed else "new", num_hit_tokens)

    def _advance(
        self,
        plan: StepPlan,
        request: Request,
        num_new_tokens: int,
        kind: Literal["new", "running", "resumed"],
        num_hit_tokens: int,
    ) -> None:
        """Books `num_new_tokens` into the step, and a placeholder if the step samples a token for `request`."""
        plan.take(request, num_new_tokens)
        if self._hooks.active:
            stamp, rid, num_computed = self._hooks.stamp(), request.request_id, request.num_computed_tokens
            self._hooks.emit(RequestScheduled(*stamp, rid, num_new_tokens, num_computed, kind, num_hit_tokens))
        request.num_computed_tokens += num_new_tokens
        if request.num_computed_tokens == request.num_tokens + request.num_output_placeholders:
            request.num_output_placeholders += 1

    # -- the step's tokens arrive

    def update_from_output(
        self, scheduler_output: SchedulerOutput, runner_output: ModelRunnerOutput
    ) -> list[tuple[Request, list[int]]]:
        """Appends the step's tokens; returns each request that got any, in the runner's order, with the accepted ones.

        A request ends at a stop token (after min_tokens), at max_tokens or at max_model_len; what was sampled after
        that is dropped, as are tokens of requests that have ended and of a step that `recover` made void.
        """
        requests = self._in_flight.pop(scheduler_output.step, {})
        updates: list[tuple[Request, list[int]]] = []
        for request_id, token_ids in zip(runner_output.req_ids, runner_output.sampled_token_ids, strict=True):
            request = requests.get(request_id)
            if request is None or request.is_finished or not token_ids:
                continue
            request.num_output_placeholders -= len(token_ids)
            accepted: list[int] = []
            for token_id in token_ids:
                request.output_token_ids.append(token_id)
                accepted.append(token_id)
                if (reason := self._finish_reason(request, token_id)) is not None:
                    self._finish(request, reason)
                    break
            else:
                self.kv_cache.cache_blocks(request)
            updates.append((request, accepted))
        return updates

    def _finish_reason(self, request: Request, token_id: int) -> str | None:
        params = request.sampling_params
        if token_id in request.stop_token_ids and request.num_output_tokens >= params.min_tokens:
            request.stop_reason = token_id if token_id in params.stop_token_ids else None
            return "stop"
        if request.num_output_tokens >= request.max_tokens or request.num_tokens >= self.max_model_len:
            return "length"
        return None

    def recover(self) -> None:
        """After a failed step: what was in flight is void, and what was running is computed again, before the rest.

        Works from `requests` alone, in whatever state the failure left the other books. The runner must be made empty
        too: it is told of every request anew.
        """
        self._in_flight.clear()
        self._runner_ids.clear()
        self._finished_req_ids.clear()
        self.kv_cache.reset()
        known = dict.fromkeys([*self.running, *self.waiting, *self.requests.values()])
        self.running = []
        self.waiting = [r for r in known if self.requests.get(r.request_id) is r]
        for request in self.waiting:
            if request.status is RequestStatus.RUNNING:
                request.status = RequestStatus.PREEMPTED
            request.num_computed_tokens = request.num_output_placeholders = 0
        if self._by_priority:
            self.waiting.sort(key=self._priority_key)

    def check_integrity(self) -> None:
        """Raises AssertionError if queue, running set, counters and blocks don't agree."""
        queued = [*self.waiting, *self.running]
        assert len(queued) == len(self.requests), f"{len(queued)} queued or running, {len(self.requests)} requests"
        assert len(self.running) <= self.max_num_seqs, f"{len(self.running)} running, max_num_seqs={self.max_num_seqs}"
        running = set(self.running)
        for request in queued:
            rid = request.request_id
            where = f"request {rid!r} ({request.status.value}): "
            assert self.requests.get(rid) is request, where + "queued, but not among the requests"
            assert (request.status is RequestStatus.RUNNING) == (request in running), where + "in the wrong list"
            slots, computed = len(self.kv_cache.block_ids(rid)) * self.config.block_size, request.num_computed_tokens
            assert slots >= computed, where + f"{computed} tokens computed in {slots} slots"
            assert request in running or slots == 0, where + "waits and owns blocks"
            placeholders = request.num_output_placeholders
            steps = sum(step.get(rid) is request for step in self._in_flight.values())
            assert 0 <= placeholders <= steps, where + f"{placeholders} placeholders with {steps} steps in flight"
            known = request.num_tokens + placeholders
            assert computed <= known, where + f"{computed} tokens computed of {known}"
        self.kv_cache.check_integrity()
