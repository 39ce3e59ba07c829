"""Events: each type is emitted, in a sane order, frozen, and nothing is emitted for nobody."""

from __future__ import annotations

import dataclasses
import inspect
from collections import defaultdict
from collections.abc import Iterator

import pytest

from engine import hooks as hooks_module
from engine.hooks import (
    ON_REQUEST,
    BlockTableGathered,
    Event,
    GrammarAdvanced,
    GrammarBitmaskFilled,
    Hooks,
    InputsPrepared,
    KernelLaunched,
    OutputDelivered,
    RequestAdded,
    RequestFinished,
    RequestPreempted,
    RequestResumed,
    RequestScheduled,
    RowFreed,
    RowMoved,
    RowWritten,
    Sampled,
    SpanBegun,
    SpanEnded,
    VerificationBudgeted,
    subscribe,
)
from tests.engine.engine_helpers import (
    TraceRequest,
    TraceResult,
    both_loops,
    both_runners,
    greedy,
    ids,
    make_llm,
    prompt_of,
    reference,
    run_trace,
    tiny_llm,
)

# Grammars need a tokenizer: test_sampling_hooks.py. A budget needs drafts: dspark/test_verification.py.
ALL_TYPES = {
    t for _, t in inspect.getmembers(hooks_module, inspect.isclass) if issubclass(t, Event) and t is not Event
} - {*ON_REQUEST, GrammarAdvanced, GrammarBitmaskFilled, VerificationBudgeted}
ONLY = {"v1": {RowMoved}, "v2": {BlockTableGathered}}
"""Events that one runner alone has. V1 has no block tables to gather, V2's rows never move."""

TRACE = [
    TraceRequest(f"r{i}", tuple([*prompt_of(4), *prompt_of(3 + 5 * (i % 3), i)]), greedy(5 + 3 * i), arrival=i)
    for i in range(5)
]
TRACE.append(TraceRequest("logprobs", tuple(prompt_of(9, 8)), greedy(3, prompt_logprobs=1), arrival=3))
TRACE.append(TraceRequest("gone", tuple(prompt_of(5, 7)), greedy(30), arrival=2, abort_at=7))


def _run(runner: str, loop: str) -> tuple[list[Event], TraceResult]:
    events: list[Event] = []
    with (
        tiny_llm(runner, loop, max_num_batched_tokens=11, num_gpu_blocks_override=13) as llm,
        llm.hooks.subscribe(Event, events.append),
    ):
        return events, run_trace(llm, TRACE)


@pytest.fixture(
    scope="module", params=[(r, loop) for r in ("v1", "v2") for loop in ("plain", "overlapped")], ids="-".join
)
def recorded(request: pytest.FixtureRequest) -> Iterator[tuple[str, list[Event], TraceResult]]:
    runner, loop = request.param
    yield (runner, *_run(runner, loop))


def test_every_event_type_is_emitted(recorded: tuple[str, list[Event], TraceResult]) -> None:
    runner, events, _ = recorded
    expected = ALL_TYPES - ONLY["v1" if runner == "v2" else "v2"]
    assert {type(event) for event in events} == expected


def test_events_are_frozen_and_stamped(recorded: tuple[str, list[Event], TraceResult]) -> None:
    runner, events, result = recorded
    for event in events:
        assert event.runner == runner and 0 <= event.step <= result.num_steps + 2 and event.time_ns > 0
    with pytest.raises(dataclasses.FrozenInstanceError):
        events[0].step = 3  # type: ignore[misc]
    on_host = [e for e in events if not (isinstance(e, SpanBegun | SpanEnded) and e.lane != "host")]
    assert all(a.time_ns <= b.time_ns for a, b in zip(on_host, on_host[1:], strict=False))
    assert all(a.step <= b.step for a, b in zip(on_host, on_host[1:], strict=False))


def test_the_life_of_a_request_is_in_order(recorded: tuple[str, list[Event], TraceResult]) -> None:
    _, events, result = recorded
    life: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        if getattr(event, "request_id", None) is not None:
            life[event.request_id].append(event)
    assert life.keys() == {request.request_id for request in TRACE}
    for request in TRACE:
        own = life[request.request_id]
        assert isinstance(own[0], RequestAdded) and own[0].prompt_token_ids == request.prompt
        scheduled = [e for e in own if isinstance(e, RequestScheduled)]
        assert scheduled[0].kind == "new" and {e.kind for e in scheduled[1:]} <= {"running", "resumed"}
        sampled = [e for e in own if isinstance(e, Sampled)]
        positions = [e.position for e in sampled]
        assert positions == list(range(len(request.prompt), len(request.prompt) + len(sampled)))
        assert all(e.sampled_in_step <= e.step for e in sampled)
        tokens = tuple(e.token_id for e in sampled)
        if request.abort_at is None:
            assert tokens == reference(request.prompt, request.params) == result.tokens(request.request_id)
        delivered = [e for e in own if isinstance(e, OutputDelivered)]
        assert tuple(t for e in delivered for t in e.new_token_ids) == tokens
        finished = [e for e in own if isinstance(e, RequestFinished)]
        assert [e.reason for e in finished] == ["length" if request.abort_at is None else "abort"]
        resumed = sum(isinstance(e, RequestResumed) for e in own)
        assert (
            resumed == sum(isinstance(e, RequestPreempted) for e in own) == sum(e.kind == "resumed" for e in scheduled)
        )


def test_rows_are_written_once_and_freed_once(recorded: tuple[str, list[Event], TraceResult]) -> None:
    """Replaying the row events gives a table that holds each request at most once, and ends empty."""
    runner, events, _ = recorded
    rows: dict[int, str] = {}
    swapping: dict[int, str] = {}
    for event in events:
        if isinstance(event, RowWritten):
            assert event.row not in rows and event.request_id not in rows.values()
            rows[event.row] = event.request_id
        elif isinstance(event, RowFreed):
            assert rows.pop(event.row) == event.request_id
        elif isinstance(event, RowMoved) and event.how == "condense":
            assert runner == "v1" and event.dst < event.src and event.dst not in rows
            rows[event.dst] = rows.pop(event.src)
            assert rows[event.dst] == event.request_id
        elif isinstance(event, RowMoved):
            # A swap is two events, one a row.
            assert rows[event.src] == event.request_id
            swapping[event.dst] = event.request_id
            if len(swapping) == 2:
                rows |= swapping
                swapping = {}
    assert rows == {} and swapping == {}


def test_inputs_name_their_makers_and_batches_their_rows(recorded: tuple[str, list[Event], TraceResult]) -> None:
    runner, events, _ = recorded
    prepared = [e for e in events if isinstance(e, InputsPrepared)]
    names = {"input_ids", "positions", "query_start_loc", "seq_lens", "slot_mapping", "logits_indices"}
    scheduled: dict[int, int] = defaultdict(int)
    for event in events:
        if isinstance(event, RequestScheduled):
            scheduled[event.step] += event.num_tokens
    assert {e.step: e.num_tokens for e in prepared} == scheduled
    assert all(set(e.made_by) == names for e in prepared)
    kernels = {e.name for e in events if isinstance(e, KernelLaunched)}
    if runner == "v2":
        assert {e.step: len(e.idx_mapping) for e in events if isinstance(e, BlockTableGathered)} == {
            e.step: e.num_reqs for e in prepared
        }
        assert {
            "write request states", "write block_table", "prepare_prefill_inputs", "prepare_pos_seq_lens",
            "combine_sampled_and_draft_tokens", "gather_block_tables", "compute_slot_mappings", "forward", "sample",
            "get_num_sampled_and_rejected", "post_update",
        } <= kernels  # fmt: skip
    else:
        assert kernels == {"forward", "sample"}


def test_spans_are_measured_and_nest(recorded: tuple[str, list[Event], TraceResult]) -> None:
    _, events, result = recorded
    ended = [e for e in events if isinstance(e, SpanEnded)]
    assert all(e.begin_ns <= e.end_ns for e in ended)
    for lane in ("compute", "copy"):
        spans = sorted((e for e in ended if e.lane == lane), key=lambda e: e.begin_ns)
        assert all(a.end_ns <= b.begin_ns for a, b in zip(spans, spans[1:], strict=False)), (
            f"{lane} does two things at once"
        )
    host = {e.name for e in ended if e.lane == "host"}
    assert host == {"schedule", "update states", "prepare inputs", "forward", "sample", "output"}
    assert {e.step for e in ended if e.name == "schedule"} >= set(range(1, result.num_steps + 1))
    begun = [e for e in events if isinstance(e, SpanBegun)]
    assert len(begun) == len(ended)


# -- subscriptions ---------------------------------------------------------------------------------------------------


@both_runners
@both_loops
def test_nothing_is_emitted_for_nobody(runner: str, loop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise AssertionError("an event without a subscriber was made")

    monkeypatch.setattr(Hooks, "emit", refuse)
    monkeypatch.setattr(Hooks, "stamp", refuse)
    with tiny_llm(runner, loop, max_num_batched_tokens=11, num_gpu_blocks_override=13) as llm:
        result = run_trace(llm, TRACE)
        assert not llm.hooks.wanted and result.num_preemptions > 0


def test_a_subscription_ends_with_its_context_and_takes_only_its_types() -> None:
    seen: list[Event] = []
    with tiny_llm("v2") as llm:
        with llm.hooks.subscribe((RequestAdded, RequestFinished), seen.append):
            llm.generate(ids(*prompt_of(5)), greedy(3), use_tqdm=False)
        llm.generate(ids(*prompt_of(5)), greedy(3), use_tqdm=False)
    assert [type(event) for event in seen] == [RequestAdded, RequestFinished]


def test_a_subscription_ends_when_its_context_raises() -> None:
    hooks = Hooks("v1")
    with pytest.raises(KeyError), hooks.subscribe(Event, lambda event: None):
        raise KeyError("x")
    assert not hooks.wanted


def test_two_subscribers_see_the_same_and_one_may_leave_from_within() -> None:
    a: list[Event] = []
    b: list[Event] = []
    with tiny_llm("v1") as llm, llm.hooks.subscribe(Event, a.append):
        with llm.hooks.subscribe(Event, b.append):
            llm.generate(ids(*prompt_of(5)), greedy(3), use_tqdm=False)
            assert a == b and a
        llm.generate(ids(*prompt_of(5)), greedy(3), use_tqdm=False)
        assert len(a) > len(b)


def test_subscribing_everywhere_sees_engines_made_later() -> None:
    seen: list[Event] = []
    with tiny_llm("v1") as first:
        with subscribe(RequestAdded, seen.append):
            first.add(ids(*prompt_of(5)), greedy(2))
            second = make_llm("v2")
            second.add(ids(*prompt_of(5)), greedy(2))
        third = make_llm("v2")
        third.add(ids(*prompt_of(5)), greedy(2))
        assert [event.runner for event in seen] == ["v1", "v2"]
        assert not first.hooks.wanted and not second.hooks.wanted and not third.hooks.wanted
        second.close()
        third.close()


@both_runners
def test_a_log_holds_what_a_subscriber_was_told_in_that_order(runner: str) -> None:
    told: list[Event] = []
    with (
        tiny_llm(runner, max_num_batched_tokens=11, num_gpu_blocks_override=13) as llm,
        llm.hooks.record(Event) as log,
        llm.hooks.subscribe(Event, told.append),
    ):
        run_trace(llm, TRACE)
        llm.core.drain()
        kept = log.take()
        assert kept == told and {SpanBegun, SpanEnded, InputsPrepared} <= {type(event) for event in kept}
        assert log.take() == [] and len(log) == 0
        llm.generate(ids(*prompt_of(5)), greedy(3), use_tqdm=False)
        assert len(log) > 0
    assert not llm.hooks.wanted and log.take()[-1] == told[-1]


def test_a_log_makes_no_event_before_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    hooks = Hooks("v2")
    with hooks.record((SpanEnded, RequestResumed)) as log:
        with hooks.span("schedule"):
            pass
        hooks.emit(RequestResumed(*hooks.stamp(), "r0"))
        monkeypatch.setattr(hooks, "runner", "another")
    span, resumed = log.take()
    assert isinstance(span, SpanEnded) and (span.name, span.runner) == ("schedule", "v2")
    assert span.begin_ns <= span.end_ns == span.time_ns
    assert isinstance(resumed, RequestResumed) and resumed.request_id == "r0"


@pytest.mark.parametrize("bad", [int, "Sampled", [RequestAdded, int], 3, (None,)])
def test_subscribing_to_what_is_no_event_says_what_is(bad: object) -> None:
    with pytest.raises(TypeError, match="is no event type") as caught, Hooks("v1").subscribe(bad, print):  # type: ignore[arg-type]
        pass
    names = str(caught.value).partition("Event (all) and ")[2].split(", ")
    assert "RequestAdded" in names and len(set(names)) == len(names)
