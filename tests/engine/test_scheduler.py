"""One step after another: order, budget, chunks, placeholders, ends, and what the runner is told."""

from __future__ import annotations

import pytest

from engine.hooks import Event, RequestAdded, RequestFinished, RequestScheduled
from tests.engine.scheduler_helpers import Driver, make_request, make_scheduler, reference, runner_output


def start(delay: int = 0, **config) -> Driver:
    return Driver(make_scheduler(**config), delay)


@pytest.mark.parametrize("v2", [True, False])
def test_a_new_request_reaches_the_runner_once_and_then_by_its_new_blocks(v2):
    d = start(v2=v2)
    request = make_request(7, max_tokens=3, params={"temperature": 0.5})
    d.add(request)
    out = d.step()
    (new,) = out.scheduled_new_reqs
    assert new.req_id == request.request_id and new.sampling_params is request.sampling_params
    assert new.prompt_token_ids == new.prefill_token_ids == request.prompt_token_ids and new.num_prompt_tokens == 7
    assert (new.block_ids, new.num_computed_tokens, new.request_seed_index) == ([1, 2], 0, 0)
    assert out.scheduled_cached_reqs.req_ids == () and out.total_num_scheduled_tokens == 7
    outs = [d.step(), d.step()]
    assert [o.scheduled_cached_reqs.new_block_ids for o in outs] == [{}, {request.request_id: [3]}]
    assert [o.scheduled_cached_reqs.num_computed_tokens.tolist() for o in outs] == [[7], [8]]
    assert [o.num_scheduled_tokens for o in outs] == [{request.request_id: 1}] * 2
    assert request.finish_reason == "length" and not d.scheduler.has_unfinished() and d.scheduler.has_requests()
    last = d.step()
    assert last.finished_req_ids == {request.request_id} and last.total_num_scheduled_tokens == 0
    assert not d.scheduler.has_requests() and d.scheduler.kv_cache.num_free_blocks == 100


def test_t6_only_the_chunk_that_completes_the_prompt_reserves_a_placeholder():
    d = start(delay=1, max_num_batched_tokens=8)
    decode, prompt = make_request(4, max_tokens=20), make_request(20, max_tokens=1)
    d.add(decode)
    d.step()
    d.add(prompt)
    chunks, placeholders, arrived = [], [], []
    for _ in range(3):
        out = d.schedule()
        assert list(out.num_scheduled_tokens) == [decode.request_id, prompt.request_id]
        assert out.num_scheduled_tokens[decode.request_id] == 1 and out.total_num_scheduled_tokens <= 8
        chunks.append(out.num_scheduled_tokens[prompt.request_id])
        placeholders.append(prompt.num_output_placeholders)
        arrived.append([r.request_id for r, _ in d.update()])
    assert chunks == [7, 7, 6]
    assert placeholders == [0, 0, 1]
    assert all(prompt.request_id not in ids for ids in arrived)
    out = d.schedule()
    assert prompt.request_id not in out.num_scheduled_tokens, "its only token is in flight"
    assert [(r.request_id, len(t)) for r, t in d.update()] == [(decode.request_id, 1), (prompt.request_id, 1)]
    assert prompt.num_output_placeholders == 0 and prompt.num_output_tokens == 1 and prompt.is_finished
    d.run()
    assert decode.num_output_placeholders == 0 and decode.num_output_tokens == 20


@pytest.mark.parametrize(("num_tokens", "hit", "scheduled"), [(32, 16, 16), (33, 32, 1)])
@pytest.mark.parametrize("same_step", [False, True])
def test_t9_a_fully_cached_prompt_still_computes_a_token(num_tokens, hit, scheduled, same_step):
    d = start(block_size=16, max_num_batched_tokens=128)
    first = make_request(num_tokens)
    second = make_request(first.prompt_token_ids)
    d.add(first)
    if not same_step:
        d.run()
    d.add(second)
    out = d.step()
    assert out.num_scheduled_tokens[second.request_id] == scheduled
    assert out.scheduled_new_reqs[-1].num_computed_tokens == second.num_cached_tokens == hit
    d.run()
    assert first.num_cached_tokens == 0
    assert first.output_token_ids == second.output_token_ids == reference(first, 64)[0]


def test_decodes_come_before_prefills_and_prefills_before_admissions():
    d = start(max_num_batched_tokens=16, max_model_len=128)
    long, decode, waiting = make_request(60), make_request(3), make_request(5)
    d.add(long)
    d.step()
    assert d.scheduler.running == [long]
    d.add(decode, waiting)
    assert list(d.step().num_scheduled_tokens.values()) == [16], "the prompt in progress takes the whole budget"
    d.scheduler.finish_requests([long.request_id])
    out = d.step()
    assert list(out.num_scheduled_tokens.items()) == [(decode.request_id, 3), (waiting.request_id, 5)]
    d.add(another := make_request(60))
    out = d.step()
    assert list(out.num_scheduled_tokens.items()) == [
        (decode.request_id, 1), (waiting.request_id, 1), (another.request_id, 14),
    ]  # fmt: skip
    d.add(late := make_request(2))
    assert list(d.step().num_scheduled_tokens.values()) == [1, 1, 14]
    assert d.scheduler.waiting == [late]


def test_a_decode_comes_first_wherever_it_stands_in_the_running_list():
    d = start(max_num_batched_tokens=8)
    d.add(decode := make_request(3, 9, "decode"), make_request(30, 9, "prefill"))
    d.step()
    order = d.scheduler.table.order
    order[:] = order[::-1].copy()
    assert d.scheduler.running[1] is decode
    assert list(d.step().num_scheduled_tokens.items()) == [("decode", 1), ("prefill", 7)]


def test_max_num_seqs_bounds_the_running_set():
    d = start(max_num_seqs=2)
    d.add(*[make_request(3) for _ in range(5)])
    assert max(len(out.num_scheduled_tokens) for out in d.run()) == 2


def test_without_chunked_prefill_a_prompt_waits_for_its_whole_budget_and_nobody_overtakes():
    d = start(enable_chunked_prefill=False, max_num_batched_tokens=64)
    a, b, c = make_request(40), make_request(30), make_request(2)
    d.add(a, b, c)
    assert d.step().num_scheduled_tokens == {a.request_id: 40}
    assert d.step().num_scheduled_tokens == {a.request_id: 1, b.request_id: 30, c.request_id: 2}


def test_fcfs_admits_by_arrival_and_priority_by_key():
    for policy, right in (("fcfs", "abcd"), ("priority", "cbda")):
        d = start(scheduling_policy=policy, max_num_seqs=1)
        for rid, priority, arrival in (("a", 2, 1.0), ("b", 0, 5.0), ("c", 0, 4.0), ("d", 1, 0.0)):
            d.add(make_request(3, 2, rid, priority=priority, arrival_time=arrival))
        order = [new.req_id for out in d.run() for new in out.scheduled_new_reqs]
        assert "".join(order) == right


def test_priority_orders_the_running_by_key_then_decode_then_arrival():
    d = start(scheduling_policy="priority", max_num_batched_tokens=8)
    d.add(make_request(3, 9, "low", priority=1))
    d.step()
    d.add(make_request(20, 9, "high", priority=0))
    assert d.step().num_scheduled_tokens == {"low": 1, "high": 7}, "admission comes after the running"
    assert d.step().num_scheduled_tokens == {"high": 8}, "lower value first, be it a prefill"
    assert list(d.step().num_scheduled_tokens.items()) == [("high", 5), ("low", 1)]


def test_a_stop_token_ends_a_request_and_says_which():
    full = make_request([1, 2, 3], 30)
    tokens, _ = reference(full, 64)
    eos, mine = tokens[4], next(t for t in tokens[5:] if t not in tokens[:5])
    cases = [
        ({"stop_token_ids": frozenset([eos])}, {}, eos, None),
        ({"stop_token_ids": frozenset([mine])}, {"stop_token_ids": (mine,)}, mine, mine),
        ({"stop_token_ids": frozenset([eos, mine])}, {"stop_token_ids": (mine,)}, eos, None),
    ]
    for fields, params, last, stop_reason in cases:
        d = start()
        d.add(request := make_request([1, 2, 3], 30, params=params, **fields))
        d.run()
        assert request.output_token_ids == tokens[: tokens.index(last) + 1]
        assert (request.finish_reason, request.stop_reason) == ("stop", stop_reason)


def test_min_tokens_holds_a_stop_token_back():
    tokens, _ = reference(make_request([1, 2, 3], 30), 64)
    stop = frozenset(tokens[:3])
    right = next(i for i, t in enumerate(tokens) if t in stop and i >= 2) + 1
    d = start()
    d.add(request := make_request([1, 2, 3], 30, params={"min_tokens": 3}, stop_token_ids=stop))
    d.run()
    assert request.num_output_tokens == right == 3 and request.finish_reason == "stop"


@pytest.mark.parametrize("delay", [0, 1])
def test_max_model_len_ends_a_request_that_asks_for_more(delay):
    d = start(delay, max_model_len=16)
    d.add(request := make_request(10, max_tokens=50, params={"min_tokens": 40}))
    outs = d.run()
    assert request.num_tokens == 16 and request.finish_reason == "length"
    assert sum(out.total_num_scheduled_tokens for out in outs) == 15, "no step computes the last token"


def test_tokens_after_a_stop_are_dropped():
    d = start()
    d.add(request := make_request(4, 10, stop_token_ids=frozenset([7])))
    out = d.schedule()
    request.num_output_placeholders = 4
    result = runner_output([request.request_id], [[5, 6, 7, 8]])
    assert d.scheduler.update_from_output(out, result) == [(request, [5, 6, 7])]
    assert request.output_token_ids == [5, 6, 7] and request.finish_reason == "stop"


def test_a_request_may_stop_while_its_next_step_is_in_flight():
    tokens, _ = reference(make_request([5, 6], 20), 64)
    stop = next(i for i, t in enumerate(tokens) if i >= 3 and t not in tokens[:i])
    d = start(delay=1)
    d.add(request := make_request([5, 6], 20, stop_token_ids=frozenset([tokens[stop]])))
    while not request.is_finished:
        d.step()
    assert len(d.in_flight) == 1 and request.request_id in d.in_flight[0][0].num_scheduled_tokens
    assert d.scheduler.kv_cache.num_free_blocks == 100, "freed at once"
    assert d.update() == []
    assert request.output_token_ids == tokens[: stop + 1] and request.finish_reason == "stop"
    assert d.step().finished_req_ids == {request.request_id}


def test_outputs_come_in_the_runners_order():
    d = start()
    d.add(a := make_request(3), b := make_request(3))
    out = d.schedule()
    with pytest.raises(ValueError, match="'x'"):
        d.scheduler.update_from_output(out, runner_output(["x", "y"], [[1], [2]]))
    result = runner_output([b.request_id, a.request_id], [[1], [2]])
    assert d.scheduler.update_from_output(out, result) == [(b, [1]), (a, [2])]


def test_a_second_turn_finds_the_generated_tokens_of_the_first():
    d = start()
    d.add(first := make_request(6, max_tokens=7))
    d.run()
    # 13 tokens, of which the last was never computed: three full blocks.
    d.add(second := make_request([*first.all_token_ids, 1, 2, 3]))
    d.run()
    assert second.num_cached_tokens == 12


def test_a_block_that_the_stop_token_fills_is_found_when_the_step_in_flight_computes_it():
    prompt = [1, 2, 3, 4, 5, 6]
    tokens, _ = reference(make_request(prompt, 2), 64)
    d = start(delay=1)
    d.add(first := make_request(prompt, 9, params={"min_tokens": 2}, stop_token_ids=frozenset(tokens[1:])))
    d.run()
    assert first.output_token_ids == tokens and first.finish_reason == "stop"
    d.add(second := make_request([*prompt, *tokens, 0]))
    d.run()
    assert second.num_cached_tokens == 8 and second.output_token_ids == reference(second, 64)[0]


def test_events_tell_the_steps_of_a_request():
    d = start(delay=1)
    seen: list[Event] = []
    with d.scheduler._hooks.subscribe(Event, seen.append):
        d.add(request := make_request(6, max_tokens=2))
        d.run()
    rid = request.request_id
    assert [type(e) for e in seen] == [RequestAdded, RequestScheduled, RequestScheduled, RequestFinished]
    scheduled = [e for e in seen if isinstance(e, RequestScheduled)]
    assert [(e.step, e.num_tokens, e.num_computed_tokens, e.kind) for e in scheduled] == [
        (1, 6, 0, "new"),
        (2, 1, 6, "running"),
    ]
    assert {e.request_id for e in seen} == {rid} and {e.runner for e in seen} == {"v2"}  # type: ignore[attr-defined]
    assert isinstance(seen[-1], RequestFinished) and seen[-1].reason == "length"
