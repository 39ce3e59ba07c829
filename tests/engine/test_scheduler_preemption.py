"""Blocks run out, requests are aborted, steps fail."""

from __future__ import annotations

import pytest

from engine.hooks import Event, RequestPreempted, RequestResumed, RequestScheduled
from engine.request import RequestStatus
from tests.engine.scheduler_helpers import Driver, make_request, make_scheduler, reference


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("v2", [True, False])
def test_t4_a_resumed_requests_blocks_replace_the_old_ones(v2, delay):
    d = Driver(make_scheduler(num_usable_blocks=6, v2=v2), delay)
    first, second = make_request(10, 8), make_request(10, 8)
    d.add(first, second)
    rid, old, events = second.request_id, [], []
    with d.scheduler._hooks.subscribe(Event, events.append):
        while second.status is not RequestStatus.PREEMPTED:
            old = d.scheduler.kv_cache.block_ids(rid)
            out = d.step()
        assert out.preempted_req_ids == {rid} and rid not in out.num_scheduled_tokens
        assert d.scheduler.kv_cache.block_ids(rid) == [] and second.num_computed_tokens == 0
        assert d.scheduler.waiting == [second] and second.num_preemptions == 1
        if v2:
            assert rid not in d.runner.rows
        while second.status is not RequestStatus.RUNNING:
            out = d.step()
    now = d.scheduler.kv_cache.block_ids(rid)
    assert now != old
    if v2:
        (new,) = out.scheduled_new_reqs
        assert new.prompt_token_ids == second.prompt_token_ids and new.num_prompt_tokens == 10
        blocks, known, hit = new.block_ids, new.prefill_token_ids, new.num_computed_tokens
    else:
        cached = out.scheduled_cached_reqs
        assert cached.resumed_req_ids == {rid} and out.scheduled_new_reqs == []
        hit = cached.num_computed_tokens[cached.req_ids.index(rid)]
        blocks, known = cached.new_block_ids[rid], cached.all_token_ids[rid]
    assert blocks == now == d.runner.rows[rid].block_ids, "the runner's row is the scheduler's list, nothing old left"
    assert known == second.all_token_ids[: len(known)] and len(known) > 10
    resumed = [e for e in events if isinstance(e, RequestScheduled) and e.kind == "resumed"]
    assert [(e.num_computed_tokens, e.num_cached_tokens) for e in resumed] == [(hit, hit)], "restarts at the hit length"
    assert out.num_scheduled_tokens[rid] == len(known) - hit and second.num_cached_tokens == 0
    assert [(e.request_id, e.by) for e in events if isinstance(e, RequestPreempted)] == [(rid, first.request_id)]
    assert [e.request_id for e in events if isinstance(e, RequestResumed)] == [rid]
    d.run()
    for request in (first, second):
        assert (request.output_token_ids, request.finish_reason) == reference(request, 64)


def test_the_seed_index_is_stable_over_preemption():
    d = Driver(make_scheduler(num_usable_blocks=6))
    d.add(make_request(10, 8), make_request(10, 8))
    news = [(new.req_id, new.request_seed_index) for out in d.run() for new in out.scheduled_new_reqs]
    assert len(news) == 3 and len(set(news)) == 2 and {index for _, index in news} == {0, 1}


def test_a_preempted_requests_token_in_flight_is_kept_and_it_waits_for_it():
    d = Driver(make_scheduler(num_usable_blocks=6), delay=1)
    first, second = make_request(10, 8), make_request(10, 8)
    d.add(first, second)
    while second.status is not RequestStatus.PREEMPTED:
        d.schedule()
        if second.status is not RequestStatus.PREEMPTED and len(d.in_flight) > 1:
            d.update()
    before = second.num_output_tokens
    assert second.num_output_placeholders == 1
    # Blocks enough are free after this, yet what to compute is not known.
    d.scheduler.finish_requests([first.request_id])
    d.add(other := make_request(2))
    out = d.schedule()
    assert second.request_id not in out.num_scheduled_tokens and other.request_id in out.num_scheduled_tokens
    d.update()
    assert second.num_output_tokens == before + 1 and second.num_output_placeholders == 0
    assert d.schedule().num_scheduled_tokens[second.request_id] >= 1
    d.run()
    assert second.output_token_ids == reference(second, 64)[0]


def test_the_last_of_the_order_is_preempted_and_never_one_already_scheduled():
    d = Driver(make_scheduler(num_usable_blocks=6))
    a, b, c = make_request(8, 8, "a"), make_request(8, 8, "b"), make_request(8, 8, "c")
    d.add(a, b, c)
    d.step()
    out = d.step()
    # a and b each need a third block, and c's two serve them.
    assert out.preempted_req_ids == {"c"} and list(out.num_scheduled_tokens) == ["a", "b"]
    outs = d.run()
    assert all(not out.preempted_req_ids & out.num_scheduled_tokens.keys() for out in outs)
    assert a.num_preemptions == 0 and d.scheduler.kv_cache.num_free_blocks == 6


def test_a_request_without_a_block_sits_out_keeps_its_own_and_lets_nobody_in():
    d = Driver(make_scheduler(num_usable_blocks=5, max_num_batched_tokens=9))
    d.add(a := make_request(4, 2, "a"), b := make_request(14, 2, "b"))
    assert d.step().num_scheduled_tokens == {"a": 4, "b": 5}
    d.add(small := make_request(1, 1, "small"))
    # a's second block leaves one free, and b's next chunk needs two.
    out = d.step()
    assert out.num_scheduled_tokens == {"a": 1} and not out.preempted_req_ids
    assert b.status is RequestStatus.RUNNING and len(d.scheduler.kv_cache.block_ids("b")) == 2
    assert small.status is RequestStatus.WAITING and d.scheduler.kv_cache.num_free_blocks == 3, "a has ended since"
    d.run()
    for request in (a, b, small):
        assert request.output_token_ids == reference(request, 64)[0]


@pytest.mark.parametrize("v2", [True, False])
@pytest.mark.parametrize("moment", ["waiting", "running", "in flight", "preempted", "twice", "unknown"])
def test_abort_at_any_moment(v2, moment):
    d = Driver(make_scheduler(num_usable_blocks=6, v2=v2), delay=1)
    other, victim = make_request(10, 8, "other"), make_request(10, 8, "victim")
    d.add(other, victim)
    if moment in ("running", "twice"):
        d.schedule()
        d.update()
    elif moment == "in flight":
        d.schedule()
        d.schedule()
    elif moment == "preempted":
        while victim.status is not RequestStatus.PREEMPTED:
            d.step()
    had, known = (
        victim.num_output_tokens,
        moment in ("running", "in flight", "twice") or (moment == "preempted" and not v2),
    )
    d.scheduler.finish_requests(["nobody"] if moment == "unknown" else ["victim", "nobody"])
    if moment == "twice":
        d.scheduler.finish_requests(["victim"])
    d.scheduler.check_integrity()
    outs = d.run()
    if moment == "unknown":
        assert victim.output_token_ids == reference(victim, 64)[0]
    else:
        assert (victim.finish_reason, victim.num_output_tokens) == ("abort", had)
        assert all("victim" not in out.num_scheduled_tokens for out in outs)
        told = [out.step for out in outs if "victim" in out.finished_req_ids]
        assert len(told) == known, "only a runner that keeps the request is told, once"
    assert other.output_token_ids == reference(other, 64)[0]
    assert d.scheduler.kv_cache.num_free_blocks == 6


def test_late_tokens_never_reach_a_new_request_of_the_same_id():
    d = Driver(make_scheduler(), delay=1)
    d.add(make_request(5, 8, "x"))
    d.schedule()
    d.scheduler.finish_requests(["x"])
    d.add(new := make_request(7, 3, "x"))
    out = d.schedule()
    assert out.finished_req_ids == {"x"} and [n.req_id for n in out.scheduled_new_reqs] == ["x"]
    assert d.update() == [] and new.output_token_ids == []
    d.run()
    assert new.output_token_ids == reference(new, 64)[0]


def test_a_stop_found_in_the_text_has_its_own_reason():
    d = Driver(make_scheduler())
    d.add(request := make_request(5, 8))
    d.step()
    d.scheduler.finish_requests([request.request_id], reason="stop")
    assert request.finish_reason == "stop" and request.is_finished


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("v2", [True, False])
def test_recover_voids_what_is_in_flight_and_computes_the_rest_again(v2, policy):
    d = Driver(make_scheduler(num_usable_blocks=9, v2=v2, scheduling_policy=policy), delay=1)
    requests = [make_request(10, 8, rid, priority=int(rid == "a")) for rid in "abcd"]
    d.add(*requests)
    for _ in range(4):
        d.step()
    running, waiting = [r.request_id for r in d.scheduler.running], [r.request_id for r in d.scheduler.waiting]
    assert running and waiting and d.in_flight
    void = d.in_flight[0]
    had = [r.num_output_tokens for r in requests]
    d.fail()
    order = [r.request_id for r in d.scheduler.waiting]
    assert order == ([*running, *waiting] if policy == "fcfs" else ["b", "c", "d", "a"])
    assert all(r.num_computed_tokens == r.num_output_placeholders == 0 for r in requests)
    assert d.scheduler.kv_cache.num_free_blocks == 9
    assert d.scheduler.update_from_output(*void) == [] and [r.num_output_tokens for r in requests] == had
    out = d.step()
    assert out.finished_req_ids == out.scheduled_cached_reqs.resumed_req_ids == frozenset()
    assert out.scheduled_new_reqs[0].num_computed_tokens == 0, "nothing of the old cache is trusted"
    assert all(n.prefill_token_ids == d.scheduler.requests[n.req_id].all_token_ids for n in out.scheduled_new_reqs)
    d.run()
    for request in requests:
        assert request.output_token_ids == reference(request, 64)[0]


def test_recover_finds_a_request_that_an_interrupt_left_in_no_list():
    d = Driver(make_scheduler())
    d.add(a := make_request(5, 3), b := make_request(5, 3))
    d.step()
    d.scheduler.table.remove(a)
    d.scheduler.kv_cache.pool.blocks[1].ref_cnt = 5
    d.fail()
    assert set(d.scheduler.waiting) == {a, b}
    d.run()
    assert all(r.output_token_ids == reference(r, 64)[0] for r in (a, b))
