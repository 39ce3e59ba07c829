"""A runner that has a KV cache but no model, and the loop that drives a scheduler with it."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.config import EngineConfig
from engine.hooks import Hooks
from engine.kv_cache import KVCacheManager
from engine.request import Request
from engine.sampling_params import SamplingParams
from engine.sched_output import ModelRunnerOutput, SchedulerOutput
from engine.scheduler import Scheduler

VOCAB = 50
_ids = itertools.count()


def make_scheduler(
    *, num_usable_blocks: int = 100, max_model_len: int = 64, v2: bool = True, lookahead: int = 0, **config: Any
) -> Scheduler:
    """`num_usable_blocks` leaves out the null block."""
    config = {"block_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 64} | config
    spec = config.pop("speculative_config", None)
    resolved = EngineConfig(**config).resolve(model_max_len=max_model_len, num_gpu_blocks=num_usable_blocks + 1)
    object.__setattr__(resolved, "speculative_config", spec)  # the scheduler doesn't ask what the runners can do
    drafts = spec.num_speculative_tokens if spec and v2 else 0
    return Scheduler(resolved, Hooks("v2" if v2 else "v1"), v2, drafts, lookahead)


def make_request(
    prompt: Sequence[int] | int, max_tokens: int = 4, request_id: str | None = None, **kwargs: Any
) -> Request:
    """A prompt given as a length gets tokens that no other prompt has."""
    number = next(_ids)
    if isinstance(prompt, int):
        prompt = [1000 * (number + 1) + i for i in range(prompt)]
    params = SamplingParams(max_tokens=max_tokens, **kwargs.pop("params", {}))
    return Request(request_id or f"r{number}", list(prompt), params, max_tokens, **kwargs)


def manager(num_usable: int = 8, block_size: int = 4, caching: bool = True) -> KVCacheManager:
    return KVCacheManager(num_usable + 1, block_size, caching)


def admit(kv: KVCacheManager, request: Request, num_new_tokens: int | None = None) -> tuple[list[int] | None, int]:
    """As the scheduler does: look up, allocate, count. Returns (added blocks, hit tokens)."""
    hits, num_hit = kv.get_computed_blocks(request)
    num_new = request.num_tokens - num_hit if num_new_tokens is None else num_new_tokens
    added = kv.allocate_slots(request, num_new, hits)
    if added is not None:
        request.num_computed_tokens = num_hit + num_new
        kv.check_integrity()
    return added, num_hit


def runner_output(req_ids: Iterable[str], token_ids: Sequence[Sequence[int]]) -> ModelRunnerOutput:
    """As a runner answers: tokens past a request's count are whatever was there."""
    req_ids, width = tuple(req_ids), max((len(tokens) for tokens in token_ids), default=1) or 1
    sampled = np.full((len(req_ids), width), -7, dtype=np.int64)
    for row, tokens in zip(sampled, token_ids, strict=True):
        row[: len(tokens)] = tokens
    return ModelRunnerOutput(req_ids, sampled, np.array([len(tokens) for tokens in token_ids], dtype=np.int32))


def next_token(token_ids: Sequence[int]) -> int:
    """The fake model: a function of the whole prefix, so that equal prompts give equal outputs."""
    return hash(tuple(token_ids)) % VOCAB


def reference(request: Request, max_model_len: int) -> tuple[list[int], str]:
    """What `request` must end with, run alone: its output tokens and why it ends."""
    tokens, output = list(request.prompt_token_ids), []
    while True:
        tokens.append(next_token(tokens))
        output.append(tokens[-1])
        if tokens[-1] in request.stop_token_ids and len(output) >= request.sampling_params.min_tokens:
            return output, "stop"
        if len(output) == request.max_tokens or len(tokens) == max_model_len:
            return output, "length"


@dataclass
class _Row:
    block_ids: list[int]
    token_ids: list[int]
    """With the sampled ones that the host doesn't know yet."""
    num_computed: int


class FakeRunner:
    """Keeps for each KV slot the prefix that was written there, and checks on each read that it is the reader's own."""

    def __init__(self, v2: bool, block_size: int, drafts: bool = False) -> None:
        self.v2 = v2
        self.drafts = drafts
        self.block_size = block_size
        self.rows: dict[str, _Row] = {}
        self.slots: dict[tuple[int, int], int] = {}
        self.last_ids: set[str] = set()
        """The requests of the last step that was not empty."""

    def reset(self) -> None:
        self.rows.clear()
        self.slots.clear()

    def execute(self, out: SchedulerOutput) -> ModelRunnerOutput:
        self._update_rows(out)
        told = [*out.scheduled_cached_reqs.req_ids, *[new.req_id for new in out.scheduled_new_reqs]]
        assert sorted(told) == sorted(out.num_scheduled_tokens)
        drafts = {rid: len(ids) for rid, ids in out.scheduled_spec_decode_tokens.items()}
        assert all(0 < count < out.num_scheduled_tokens[rid] for rid, count in drafts.items())
        for rid, num_tokens in out.num_scheduled_tokens.items():
            self._write(self.rows[rid], num_tokens - drafts.get(rid, 0))
            self._write_drafts(self.rows[rid], drafts.get(rid, 0))
        # A layer stores the keys of the whole batch before any row attends.
        for rid in out.num_scheduled_tokens:
            self._check_reads(rid)
        sampled = [self._sample(self.rows[rid], drafts.get(rid, 0)) for rid in out.num_scheduled_tokens]
        self.last_ids = set(out.num_scheduled_tokens) or self.last_ids
        return runner_output(out.num_scheduled_tokens, sampled)

    def _update_rows(self, out: SchedulerOutput) -> None:
        for rid in out.finished_req_ids:
            del self.rows[rid]
        for rid in out.preempted_req_ids:
            assert rid in self.rows
            if self.v2:
                del self.rows[rid]
        for new in out.scheduled_new_reqs:
            assert new.req_id not in self.rows
            assert new.prefill_token_ids[: new.num_prompt_tokens] == new.prompt_token_ids
            self.rows[new.req_id] = _Row(list(new.block_ids), list(new.prefill_token_ids), new.num_computed_tokens)
        cached = out.scheduled_cached_reqs
        assert (
            cached.all_token_ids.keys()
            == {r for r in cached.req_ids if r not in self.last_ids} | cached.resumed_req_ids
        )
        for rid, num_computed in zip(cached.req_ids, cached.num_computed_tokens.tolist(), strict=True):
            row, block_ids = self.rows[rid], cached.new_block_ids.get(rid, [])
            assert cached.all_token_ids.get(rid, row.token_ids) == row.token_ids
            if rid in cached.resumed_req_ids:
                assert not self.v2
                row.block_ids, row.num_computed = list(block_ids), num_computed
            else:
                # Until its tokens arrive every draft of a step in flight counts as accepted.
                assert num_computed == row.num_computed or (self.drafts and num_computed > row.num_computed)
                row.block_ids += block_ids

    def _slot(self, row: _Row, position: int) -> tuple[int, int]:
        return row.block_ids[position // self.block_size], position % self.block_size

    def _write(self, row: _Row, num_tokens: int) -> None:
        assert row.num_computed + num_tokens <= len(row.token_ids)
        for position in range(row.num_computed, row.num_computed + num_tokens):
            self.slots[self._slot(row, position)] = hash(tuple(row.token_ids[: position + 1]))
        row.num_computed += num_tokens

    def _check_reads(self, rid: str) -> None:
        row = self.rows[rid]
        for position in range(row.num_computed):
            right = hash(tuple(row.token_ids[: position + 1]))
            assert self.slots.get(self._slot(row, position)) == right, f"{rid}: wrong KV at position {position}"

    def _write_drafts(self, row: _Row, num_drafts: int) -> None:
        """Into slots of the request's own, which hold no known token's KV."""
        for position in range(row.num_computed, row.num_computed + num_drafts):
            self.slots[self._slot(row, position)] = -1

    def _sample(self, row: _Row, num_drafts: int) -> list[int]:
        if row.num_computed < len(row.token_ids):
            assert num_drafts == 0, "drafts stand behind the last known token"
            return []
        num_accepted = hash((*row.token_ids, "accepted")) % (num_drafts + 1)
        sampled = []
        for _ in range(num_accepted):
            sampled.append(next_token([*row.token_ids, *sampled]))
        sampled.append(next_token([*row.token_ids, *sampled]))
        row.token_ids += sampled
        self._write(row, num_accepted)
        return sampled


class Driver:
    """The plain loop (delay 0) or the overlapped one (delay 1: a step's tokens arrive after the next is scheduled)."""

    def __init__(self, scheduler: Scheduler, delay: int = 0) -> None:
        self.scheduler = scheduler
        self.delay = delay
        spec = scheduler.config.speculative_config
        self.num_drafts = spec.num_speculative_tokens if spec else 0
        self.runner = FakeRunner(scheduler._v2, scheduler.config.block_size, bool(spec))
        self.num_steps = 0
        self.in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.scheduler.add_request(request)

    def schedule(self) -> SchedulerOutput:
        """Schedules and executes a step; its tokens stay in flight."""
        self.num_steps += 1
        self.scheduler._hooks.step = self.num_steps
        out = self.scheduler.schedule(self.num_steps)
        self.scheduler.check_integrity()
        result = self.runner.execute(out)
        if out.num_scheduled_tokens:
            self.in_flight.append((out, result))
        return out

    def update(self) -> list[tuple[Request, list[int]]]:
        """The oldest step in flight delivers its tokens."""
        updates = self.scheduler.update_from_output(*self.in_flight.popleft())
        if self.num_drafts and not self.scheduler._v2:
            # V1's drafter sees the tokens on the host; it may find fewer than it was asked for.
            found = {request.request_id: hash(tuple(tokens)) % (self.num_drafts + 1) for request, tokens in updates}
            self.scheduler.update_draft_token_ids({rid: [7] * count for rid, count in found.items()})
        self.scheduler.check_integrity()
        return updates

    def step(self) -> SchedulerOutput:
        out = self.schedule()
        if self.in_flight and (len(self.in_flight) > self.delay or not out.num_scheduled_tokens):
            self.update()
        return out

    def run(self, limit: int = 2000) -> list[SchedulerOutput]:
        """Steps until nothing is left, the runner has been told so and no token is in flight."""
        outs = []
        while self.scheduler.has_requests() or self.in_flight:
            outs.append(self.step())
            assert len(outs) < limit, "no end"
        return outs

    def fail(self) -> None:
        """A step fails: what is in flight is lost and the runner is emptied."""
        self.scheduler.recover()
        self.runner.reset()
        self.in_flight.clear()
        self.scheduler.check_integrity()
