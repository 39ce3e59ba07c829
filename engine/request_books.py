"""The requests of one engine: who waits, who runs in which row and owns which blocks, and how they come and go."""

from __future__ import annotations

import itertools
from bisect import insort
from collections.abc import Iterable, Set

import numpy as np

from .admission import AdmissionLimits
from .config import EngineConfig
from .hooks import Hooks, RequestAdded, RequestFinished
from .kv_cache import KVCacheManager
from .request import Request, RequestStatus
from .running_table import RunningTable
from .scheduled_batch import ScheduledBatch

FEW_ROWS = 8
"""Up to so many blocks are read one by one, which is cheaper than numpy."""


class RequestBooks:
    """What the scheduler keeps; arguments as there."""

    def __init__(
        self,
        config: EngineConfig,
        hooks: Hooks,
        use_v2_model_runner: bool,
        num_device_drafts: int,
        num_lookahead_tokens: int,
    ) -> None:
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
        self.table = RunningTable(config.max_num_seqs)
        self._hooks = hooks
        self._by_priority = config.scheduling_policy == "priority"
        self._v2 = use_v2_model_runner
        self._num_device_drafts = num_device_drafts
        self._num_lookahead_tokens = num_lookahead_tokens
        self._num_added = 0
        """The number of the next request, which a request without a seed derives its own from."""
        self._seed_index: dict[str, int] = {}
        self._in_flight: dict[int, ScheduledBatch] = {}
        """By step."""
        self._runner_ids: set[str] = set()
        """Ids of which the runner keeps state."""
        self._finished_req_ids: set[str] = set()

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

    def _request(self, row: int) -> Request:
        request: Request | None = self.table.requests[row]
        assert request is not None, f"row {row} is nobody's"
        return request

    def _note_blocks(self, request: Request) -> None:
        self.table.num_slots[request.row], self.table.publish_at[request.row] = self.kv_cache.bounds(request.request_id)

    def _publish_rows(self, rows: np.ndarray, num_tokens: np.ndarray) -> None:
        """Each of `rows` has a block to publish: its first `num_tokens` i64 are known and computed."""
        block_size = self.kv_cache.block_size
        num_full = num_tokens // block_size
        requests = self.table.requests[rows].tolist()
        last: Iterable[bytes | None] = itertools.repeat(None)
        if len(rows) > FEW_ROWS:
            last = self.table.arrived.ending_at(rows, num_full * block_size, block_size)
        self.kv_cache.publish(requests, num_full.tolist(), last)
        self.table.publish_at[rows] = (num_full + 1) * block_size

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
