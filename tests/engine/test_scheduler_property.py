"""Random traces: arrivals, aborts and failed steps, few blocks, both runners, both loops.

The books are checked after every call; the fake runner checks that each token reads its own request's KV.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kv_cache import KVCacheManager
from engine.request import Request
from engine.sched_output import SchedulerOutput
from engine.speculative_config import SpeculativeConfig
from tests.engine.scheduler_helpers import Driver, make_request, make_scheduler, next_token, reference

MAX_MODEL_LEN = 24


@dataclass
class Trace:
    config: dict
    delay: int
    collide: bool
    requests: list[Request]
    arrivals: list[int]
    aborts: dict[int, list[int]] = field(default_factory=dict)
    """Step -> numbers of the requests aborted: before the step if the step is even, with it in flight if it is odd."""
    failures: frozenset[int] = frozenset()


@st.composite
def request_lists(draw: st.DrawFn) -> list[Request]:
    # Two tokens and some common beginnings: prefixes are shared, and whole prompts are equal.
    stems = draw(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=16), min_size=1, max_size=3))
    requests = []
    for i in range(draw(st.integers(1, 7))):
        prompt = [*draw(st.sampled_from(stems)), *draw(st.lists(st.integers(0, 1), max_size=6))][: MAX_MODEL_LEN - 1]
        max_tokens = draw(st.integers(1, 14))
        stops = frozenset(draw(st.lists(st.integers(0, 49), max_size=4)))
        if draw(st.booleans()):
            stops |= {next_token(prompt)}
        requests.append(
            make_request(
                prompt, max_tokens, f"r{i}", stop_token_ids=stops, priority=draw(st.integers(0, 2)),
                arrival_time=float(draw(st.integers(0, 3))),
                params={"min_tokens": draw(st.integers(0, max_tokens))},
            )
        )  # fmt: skip
    return requests


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    requests = draw(request_lists())
    block_size = draw(st.integers(1, 5))
    most = max(min(r.num_prompt_tokens + r.max_tokens, MAX_MODEL_LEN) - 1 for r in requests)
    chunked = draw(st.booleans())
    budget = draw(st.integers(1, 20)) if chunked else draw(st.integers(MAX_MODEL_LEN, 40))
    config = {
        "v2": draw(st.booleans()),
        "block_size": block_size,
        "num_usable_blocks": -(-most // block_size) + draw(st.integers(0, 6)),
        "max_model_len": MAX_MODEL_LEN,
        "max_num_batched_tokens": budget,
        "max_num_seqs": draw(st.integers(1, min(5, budget))),
        "enable_chunked_prefill": chunked,
        "enable_prefix_caching": draw(st.booleans()),
        "scheduling_policy": draw(st.sampled_from(["fcfs", "priority"])),
    }
    delay = draw(st.integers(0, 1))
    # V1's drafts are made of tokens that have arrived, so only in the plain loop.
    num_drafts = draw(st.integers(0, 3)) if config["v2"] or delay == 0 else 0
    if num_drafts:
        config["speculative_config"] = SpeculativeConfig("ngram", num_drafts)
        config["lookahead"] = draw(st.sampled_from([0, num_drafts, num_drafts + 2])) if config["v2"] else 0
    arrivals = [draw(st.integers(0, 12)) for _ in requests]
    aborts = draw(
        st.dictionaries(st.integers(0, 20), st.lists(st.integers(0, len(requests) - 1), max_size=2), max_size=3)
    )
    failures = frozenset(draw(st.lists(st.integers(0, 25), max_size=2)))
    return Trace(config, delay, draw(st.booleans()), requests, arrivals, aborts, failures)


def check_step(d: Driver, out: SchedulerOutput, decodes: list[Request]) -> None:
    config = d.scheduler.config
    assert out.total_num_scheduled_tokens == sum(out.num_scheduled_tokens.values()) <= config.max_num_batched_tokens
    assert all(n > 0 for n in out.num_scheduled_tokens.values())
    assert len(out.num_scheduled_tokens) <= d.scheduler.max_num_seqs and len(d.runner.rows) <= 7
    assert not out.preempted_req_ids & out.num_scheduled_tokens.keys()
    if out.preempted_req_ids:
        assert out.scheduled_new_reqs == [] and out.scheduled_cached_reqs.resumed_req_ids == frozenset()
    if config.scheduling_policy == "fcfs":
        # Only a lack of blocks keeps a decode out of a step, never a prefill.
        left_out = [r for r in decodes if r.request_id not in out.num_scheduled_tokens]
        assert all(r.request_id in out.preempted_req_ids or d.scheduler.kv_cache.num_free_blocks == 0 for r in left_out)
        first = list(out.num_scheduled_tokens)[: len(decodes) - len(left_out)]
        assert {r.request_id for r in decodes} - {r.request_id for r in left_out} == set(first), "decodes come first"
    assert d.scheduler.running or d.in_flight or not d.scheduler.waiting, "nothing runs and somebody waits"


def decoding(d: Driver) -> list[Request]:
    """The running requests past their prefill that need another token."""
    result = []
    for r in d.scheduler.running:
        num_outputs = r.num_output_tokens + r.num_output_placeholders
        more = num_outputs < r.max_tokens and r.num_prompt_tokens + num_outputs < MAX_MODEL_LEN
        if more and r.num_computed_tokens >= d.scheduler.table.prefill_len[r.row]:
            result.append(r)
    return result


def play(trace: Trace) -> Driver:
    scheduler = make_scheduler(**trace.config)
    if trace.collide:
        args = scheduler.kv_cache.pool.num_blocks, scheduler.config.block_size, scheduler.config.enable_prefix_caching
        scheduler.kv_cache = KVCacheManager(*args, hash_function=lambda parent, tokens: b"same")
    d = Driver(scheduler, trace.delay)
    step = 0
    while step <= 25 or scheduler.has_requests() or d.in_flight:
        d.add(*[r for r, arrival in zip(trace.requests, trace.arrivals, strict=True) if arrival == step])
        aborted = [f"r{i}" for i in trace.aborts.get(step, [])]
        if step % 2 == 0:
            scheduler.finish_requests(aborted)
            scheduler.check_integrity()
        decodes = decoding(d)
        out = d.schedule()
        check_step(d, out, decodes)
        if step in trace.failures:
            d.fail()
        if step % 2:
            scheduler.finish_requests(aborted)
            scheduler.check_integrity()
        if d.in_flight and (len(d.in_flight) > d.delay or not out.num_scheduled_tokens):
            before = {r.request_id: r.num_output_tokens for r in trace.requests}
            for request, tokens in d.update():
                assert request.num_output_tokens == before[request.request_id] + len(tokens)
                assert 1 <= len(tokens) <= 1 + d.num_drafts
        step += 1
        assert step < 1500, "no end"
    return d


def check_end(d: Driver, trace: Trace) -> None:
    assert d.scheduler.requests == {} and d.scheduler.running == d.scheduler.waiting == []
    assert d.scheduler.kv_cache.num_free_blocks == trace.config["num_usable_blocks"], "a block leaked"
    assert d.runner.rows == {}, "the runner was told of every end"
    assert d.scheduler._seed_index == {} and len(d.scheduler.table) == 0 and d.scheduler._runner_ids == set()
    may_be_aborted = {f"r{i}" for numbers in trace.aborts.values() for i in numbers}
    for request in trace.requests:
        output, reason = reference(request, MAX_MODEL_LEN)
        assert request.is_finished
        if request.finish_reason == "abort":
            assert request.request_id in may_be_aborted
            assert request.output_token_ids == output[: request.num_output_tokens]
        else:
            assert (request.output_token_ids, request.finish_reason) == (output, reason)


@given(traces())
@settings(max_examples=100)
def test_every_request_gets_its_tokens_and_the_books_balance(trace):
    check_end(play(trace), trace)


@pytest.mark.slow
@given(traces())
@settings(max_examples=1500)
def test_every_request_gets_its_tokens_and_the_books_balance_at_length(trace):
    check_end(play(trace), trace)
