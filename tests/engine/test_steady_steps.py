"""Steps that decode the same requests again: what is not made anew, and that nobody can tell by the outcome."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.device import Device
from engine.draft_rounds import ROUNDS_AT_ONCE
from engine.hooks import Hooks
from engine.runner_v2.async_output import HostBuffers
from engine.runner_v2.step_graphs import StepGraphs
from engine.running_table import RunningTable
from engine.sched_output import SchedulerOutput
from engine.scheduler import Scheduler
from engine.speculative_config import SpeculativeConfig
from tests.engine.counted_cuda import CountedCuda, counted_cuda
from tests.engine.engine_helpers import greedy, ids, make_llm, prompt_of
from tests.engine.scheduler_helpers import Driver, make_request, make_scheduler, manager
from tests.engine.test_scheduler_property import Trace, play, traces

# -- the scheduler -----------------------------------------------------------------------------------------------------


def drafting_driver(num_drafts: int, delay: int = 1, **config: Any) -> Driver:
    spec = SpeculativeConfig("ngram", num_drafts) if num_drafts else None
    config = {"max_model_len": 512, "num_usable_blocks": 400, "max_num_batched_tokens": 256} | config
    return Driver(make_scheduler(speculative_config=spec, lookahead=num_drafts, **config), delay)


@pytest.mark.parametrize("num_drafts", [0, 1, 5])
def test_the_parts_of_a_steady_step_are_those_of_the_step_before(
    num_drafts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests get blocks all the time; how many drafts were accepted is different for each and in each step."""
    d = drafting_driver(num_drafts)
    d.add(*(make_request(5 + i, max_tokens=300) for i in range(6)))
    for _ in range(5):
        d.step()
    made = []
    schedule_running = Scheduler._schedule_running
    monkeypatch.setattr(Scheduler, "_schedule_running", lambda *args: made.append(1) or schedule_running(*args))
    outs = [d.step() for _ in range(25)]
    first = outs[0]
    assert first.total_num_scheduled_tokens == 6 * (1 + num_drafts)
    for out in outs:
        assert out.num_scheduled_tokens is first.num_scheduled_tokens
        drafts, before = out.scheduled_spec_decode_tokens, first.scheduled_spec_decode_tokens
        assert drafts is before if num_drafts else not drafts
        assert out.scheduled_cached_reqs.req_ids is first.scheduled_cached_reqs.req_ids
    assert made == [], "every one is like the last"
    given = [len(out.scheduled_cached_reqs.new_block_ids) for out in outs]
    assert sum(given) > 25, "blocks are given without another look at the requests"
    computed = np.array([out.scheduled_cached_reqs.num_computed_tokens for out in outs])
    assert len(np.unique(np.diff(computed, axis=0))) == 1 + num_drafts, "each of these counts was accepted"


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_an_end_a_newcomer_and_a_lack_of_blocks_end_what_is_steady(num_drafts: int) -> None:
    d = drafting_driver(num_drafts, num_usable_blocks=60)
    d.add(make_request(6, max_tokens=200, request_id="a"), make_request(6, max_tokens=60, request_id="b"))
    while "b" in d.scheduler.requests:
        assert "a" in d.step().num_scheduled_tokens and d.num_steps < 100
    d.add(make_request(9, max_tokens=200, request_id="c"))
    d.step()
    assert set(d.step().num_scheduled_tokens) == {"a", "c"}
    outs = d.run()
    assert any(out.preempted_req_ids for out in outs), "200 tokens each don't fit 60 blocks"


@st.composite
def long_traces(draw: st.DrawFn) -> Trace:
    """Few requests that decode for long, with drafts nearly always."""
    trace = draw(traces())
    drafts = draw(st.integers(0, 3))
    config = trace.config | {"v2": True, "max_num_batched_tokens": 40, "enable_chunked_prefill": True}
    config |= {"speculative_config": SpeculativeConfig("ngram", drafts) if drafts else None, "lookahead": drafts}
    return Trace(config, trace.delay, False, trace.requests, trace.arrivals, trace.aborts, trace.failures)


def parts_of(trace: Trace, monkeypatch: pytest.MonkeyPatch) -> tuple[list[Any], list[Any]]:
    """What the runner is told in each step, and what becomes of the requests."""
    trace, told = copy.deepcopy(trace), []
    schedule = Driver.schedule

    def recorded(driver: Driver) -> SchedulerOutput:
        out = schedule(driver)
        cached = out.scheduled_cached_reqs
        told.append(
            (
                out.num_scheduled_tokens, out.scheduled_spec_decode_tokens, out.finished_req_ids, out.preempted_req_ids,
                [(new.req_id, new.block_ids, new.num_computed_tokens) for new in out.scheduled_new_reqs],
                cached.req_ids, cached.num_computed_tokens.tolist(), dict(cached.new_block_ids), cached.all_token_ids,
            )
        )  # fmt: skip
        return out

    with monkeypatch.context() as patch:
        patch.setattr(Driver, "schedule", recorded)
        play(trace)
    ends = [(r.output_token_ids, r.accepted_per_round, r.num_draft_tokens, r.num_preemptions) for r in trace.requests]
    return told, ends


@pytest.mark.parametrize("without", ["steadiness", "blocks for all at once", "columns"])
@given(st.one_of(traces(), long_traces()))
@settings(max_examples=30)
def test_the_short_ways_lead_where_the_long_ones_do(without: str, trace: Trace) -> None:
    with pytest.MonkeyPatch.context() as patch:
        short = parts_of(trace, patch)
        name = {"steadiness": "_steady_batch", "blocks for all at once": "_add_blocks", "columns": "_append_to_all"}
        patch.setattr(Scheduler, name[without], lambda *args: None)
        assert parts_of(trace, patch) == short


def test_blocks_are_short_for_all_or_for_nobody() -> None:
    kv = manager(num_usable=6)
    requests = [make_request(4), make_request(4)]
    for request in requests:
        kv.allocate_slots(request, 4)
    rids = [request.request_id for request in requests]
    before = [kv.block_ids(rid) for rid in rids]
    assert kv.add_blocks(rids, [2, 3]) is None and [kv.block_ids(rid) for rid in rids] == before
    assert kv.add_blocks(rids, [2, 0]) == [kv.block_ids(rids[0])[1:], []] and kv.num_free_blocks == 2
    kv.check_integrity()


# -- rounds ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@given(st.data())
@settings(max_examples=50)
def test_rounds_are_booked_as_if_at_once(data: st.DataObject) -> None:
    """Whoever asks, leaves or takes a row in between."""
    table, expected = RunningTable(4), {}
    rounds, waiting = table.rounds, [make_request(3) for _ in range(6)]
    steps = data.draw(st.integers(0, 8)) + data.draw(st.sampled_from([0, ROUNDS_AT_ONCE]))
    for step in range(steps):
        running = table.running()
        if running and data.draw(st.integers(0, 5)) == 0:
            waiting.insert(0, data.draw(st.sampled_from(running)))
            table.remove(waiting[0])
        if waiting and len(table) < 4:
            table.add(waiting.pop(), limit=99, seed_index=step)
        rows = np.array(data.draw(st.permutations(table.order.tolist())))[: data.draw(st.integers(1, 4))]
        drafts = np.array([data.draw(st.integers(0, 3)) for _ in rows])
        counts = np.array([data.draw(st.integers(0, 1 + d)) for d in drafts.tolist()], dtype=np.int32)
        rounds.add(rows, drafts, counts)
        for row, d, count in zip(rows.tolist(), drafts.tolist(), counts.tolist(), strict=True):
            if d and count:
                request = table.requests[row]
                accepted, drafted = expected.setdefault(request, ([], []))
                accepted.append(count - 1)
                drafted.append(d)
        counts[:] = 77  # a buffer that the next step's counts come to
        if data.draw(st.integers(0, 9)) == 0:
            rounds.settle()
    for request in [*waiting, *table.running()]:
        accepted, drafted = expected.get(request, ([], []))
        assert (request.accepted_per_round, request.num_draft_tokens) == (accepted, sum(drafted))


def test_who_asks_in_between_sees_every_round_so_far() -> None:
    d = drafting_driver(2)
    request = make_request(6, max_tokens=60)
    d.add(request)
    for _ in range(20):
        d.step()
        assert sum(request.accepted_per_round) + len(request.accepted_per_round) + 1 >= request.num_output_tokens
    assert len(request.accepted_per_round) == request.num_draft_tokens / 2 > 10


# -- the runner --------------------------------------------------------------------------------------------------------


@pytest.fixture
def cuda() -> Iterator[CountedCuda]:
    with counted_cuda() as cuda:
        yield cuda


@pytest.mark.parametrize("num_drafts", [0, 2])
def test_a_steady_step_makes_no_batch_and_uploads_no_index(
    cuda: CountedCuda, num_drafts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StepGraphs, "_mixed_sizes", lambda graphs: set())  # an empty replay samples no first token
    spec = {"method": "dspark", "draft": "lookup", "num_speculative_tokens": num_drafts} if num_drafts else None
    llm = make_llm(max_num_seqs=2, cudagraph_capture_sizes=(2,), speculative_config=spec)
    written = []
    write = Device.write
    monkeypatch.setattr(Device, "write", lambda device, name, *args: written.append(name) or write(device, name, *args))
    try:
        for start in (0, 1):
            llm.add(ids(*prompt_of(5, start)), greedy(50), final_only=True)
        while len(llm.core.scheduler.running) < 2 or llm.core.scheduler.table.num_tokens.min() < 8:
            llm.step()
        batch = llm.core.runner.last_batch
        assert batch is not None and batch.num_tokens == 2 * (1 + num_drafts)
        written.clear()
        for _ in range(8):
            llm.step()
            assert llm.core.runner.last_batch is batch
        assert written == [], "blocks and their number alone are sent, by other ways"
    finally:
        llm.close()


def test_the_hosts_buffers_of_an_output_are_made_once() -> None:
    device = Device(torch.device("cpu"), Hooks("v2"))
    buffers = HostBuffers(device, 8)
    wide = buffers.like("confidences", torch.ones(4, 3))
    assert wide.shape == (4, 3) and wide.dtype == torch.float32
    narrow = buffers.like("confidences", torch.ones(2, 3))
    assert narrow.shape == (2, 3) and narrow.data_ptr() == wide.data_ptr()
    assert buffers.like("ranks", torch.ones(4, 3)).data_ptr() != wide.data_ptr()
    assert buffers.like("confidences", torch.ones(12, dtype=torch.int64)).dtype == torch.int64
    assert buffers.like("confidences", torch.ones(5, 3, dtype=torch.int64)).shape == (5, 3)
    device.close()
