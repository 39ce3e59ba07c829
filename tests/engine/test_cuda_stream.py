"""A GPU's streams on a counted CUDA: what observing asks of it, and that spans are neither lost nor somebody else's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from engine.bench.step_costs import SUMMARY_EVENTS
from engine.device import SPANS_AT_ONCE, Device
from engine.hooks import Event, Hooks, SpanBegun, SpanEnded
from engine.runner_v2.async_output import AsyncOutput, HostBuffers, empty_tokens
from engine.runner_v2.sample.logprobs import NO_LOGPROBS_PLAN
from tests.engine.counted_cuda import CountedCuda, counted_cuda
from tests.engine.engine_helpers import greedy, ids, make_llm, prompt_of


@pytest.fixture
def cuda() -> Iterator[CountedCuda]:
    with counted_cuda() as cuda:
        yield cuda


@pytest.fixture
def device(cuda: CountedCuda) -> Device:
    return Device(torch.device("cpu"), Hooks("v2"))


def nothing() -> None:
    return


def steps_of(device: Device, count: int, first: int = 1) -> None:
    for step in range(first, first + count):
        device.hooks.step = step
        device.compute.submit("work", nothing)
        device.emit_spans(in_a_pause=False)


# -- what it costs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("observed", [False, True])
def test_what_a_steady_step_asks_of_cuda(cuda: CountedCuda, observed: bool) -> None:
    """Beside what an unobserved step does: a mark before each piece of work, its end being the mark that was there; two
    times read of each; a question for a few steps together."""
    llm = make_llm("v2", "overlapped", max_num_seqs=2, cudagraph_capture_sizes=(2,), block_size=128)
    try:
        for start in (0, 1):
            llm.add(ids(*prompt_of(5, start)), greedy(60), final_only=True)
        with llm.hooks.record(SUMMARY_EVENTS if observed else ()) as log:
            for _ in range(20):
                llm.step()
            before, events = Counter(cuda.calls), len(log)
            for _ in range(4 * SPANS_AT_ONCE):
                llm.step()
            calls = {name: count / (4 * SPANS_AT_ONCE) for name, count in (cuda.calls - before).items()}
            a_step = (len(log) - events) / (4 * SPANS_AT_ONCE)
    finally:
        llm.close()
    expected = {"replay": 1, "wait_event": 1, "synchronize": 1}
    expected |= {"record timing": 4, "elapsed_time": 4} if observed else {"record": 2}
    asked = calls.pop("query", 0.0)
    assert calls == expected, "no new event in the steady state either"
    assert asked <= 4 / SPANS_AT_ONCE if observed else asked == 0
    # Six phases, a wait, two pieces of device work, the inputs and the rows.
    assert a_step == (11 if observed else 0)


def test_marks_are_used_again_once_nobody_holds_them(device: Device, cuda: CountedCuda) -> None:
    with device.hooks.record(SpanEnded):
        steps_of(device, 3 * SPANS_AT_ONCE)
        device.emit_spans()
        before = cuda.calls["new event"]
        steps_of(device, 10 * SPANS_AT_ONCE)
        assert cuda.calls["new event"] == before
        held = device.compute.record_event()
        steps_of(device, 3 * SPANS_AT_ONCE)
        raw = held.event  # type: ignore[union-attr]
        at = raw.at
        steps_of(device, 3 * SPANS_AT_ONCE)
        assert raw.at == at, "recorded again while somebody could wait for it"


def test_a_mark_for_streams_alone_need_not_wake_the_host(device: Device) -> None:
    for _ in range(3):  # marks are used again, each kind by itself
        assert device.compute.record_event().event.blocking  # type: ignore[union-attr]
        assert not device.compute.record_event(for_host=False).event.blocking  # type: ignore[union-attr]


def test_what_the_host_has_needs_no_wait_before_it_is_overwritten(device: Device, cuda: CountedCuda) -> None:
    tokens, _, _ = empty_tokens(2, 1, torch.device("cpu"))
    output = AsyncOutput(
        device, ("a", "b"), None, NO_LOGPROBS_PLAN, None, HostBuffers(device, 3), 1, np.arange(3),
        lambda: {"tokens": tokens},
    )  # fmt: skip
    before = cuda.calls["wait_event"]
    output.let_overwrite()
    assert cuda.calls["wait_event"] == before + 1
    output.get_output()
    output.let_overwrite()
    assert cuda.calls["wait_event"] == before + 1


def test_the_copy_stream_knows_what_it_interrupts(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    made_current: list[object] = []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: "another")
    monkeypatch.setattr(torch.cuda, "set_stream", made_current.append)
    device.copy.submit("alone", nothing)
    with device.scope():
        device.copy.submit("inside", nothing)
    compute, copy = device.compute.stream, device.copy.stream  # type: ignore[union-attr]
    assert made_current == [copy, "another", compute, copy, compute, "another"]


# -- the mark behind a span --------------------------------------------------------------------------------------------


def test_an_event_behind_a_span_is_its_end_and_behind_anything_else_is_not(device: Device, cuda: CountedCuda) -> None:
    compute = device.compute
    with device.hooks.record(SpanEnded):
        compute.submit("work", nothing)
        assert compute.record_event() is compute.record_event()
        end = compute.record_event()
        device.upload(torch.zeros(2))
        assert compute.record_event() is not end, "it would not cover the copy"
        compute.submit("work", nothing)
        end = compute.record_event()
        compute.wait_event(device.copy.record_event())
        assert compute.record_event() is not end, "it would not cover what was waited for"
    compute.submit("unobserved", nothing)
    assert compute.record_event() is not compute.record_event()


# -- delivery ----------------------------------------------------------------------------------------------------------


def test_spans_come_some_steps_later_in_order_and_all_of_them_in_a_pause(device: Device) -> None:
    events: list[Event] = []
    with device.hooks.subscribe((SpanBegun, SpanEnded), events.append):
        steps_of(device, SPANS_AT_ONCE - 1)
        assert events == []
        steps_of(device, 1, first=SPANS_AT_ONCE)
        assert len(events) == 2 * SPANS_AT_ONCE
        steps_of(device, 2, first=SPANS_AT_ONCE + 1)
        device.drain()
        device.emit_spans()
    ended = [event for event in events if isinstance(event, SpanEnded)]
    assert [event.step for event in ended] == list(range(1, SPANS_AT_ONCE + 3))
    assert all(a.begin_ns <= a.end_ns <= b.begin_ns for a, b in zip(ended, ended[1:], strict=False))


def test_who_stops_observing_gets_what_has_ended_and_the_next_one_nothing_old(
    device: Device, cuda: CountedCuda
) -> None:
    first: list[Event] = []
    with device.hooks.subscribe(SpanEnded, first.append):
        steps_of(device, 3)
        cuda.held = True
        steps_of(device, 2, first=4)
    assert [event.step for event in first] == [1, 2, 3]
    cuda.held = False
    steps_of(device, 1, first=6)
    with device.hooks.record(SpanEnded) as log:
        steps_of(device, 2, first=7)
    assert [event.step for event in log.take()] == [7, 8]
    assert [event.step for event in first] == [1, 2, 3]


def test_a_span_that_has_not_ended_keeps_those_behind_it_back(device: Device, cuda: CountedCuda) -> None:
    with device.hooks.record(SpanEnded) as log:
        steps_of(device, 2)
        cuda.held = True
        steps_of(device, 2 * SPANS_AT_ONCE, first=3)
        device.emit_spans()
        assert [event.step for event in log.take()] == [1, 2]
        for _, _, begin, end in device.compute._timed:  # type: ignore[union-attr]
            begin.event.done = end.event.done = True
        device.emit_spans()
        assert [event.step for event in log.take()] == list(range(3, 2 * SPANS_AT_ONCE + 3))


def test_a_failed_device_does_not_hide_the_error_of_the_step(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    def failed() -> bool:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(KeyError, match="the step's own"), device.hooks.record(SpanEnded):
        device.compute.submit("work", nothing)
        monkeypatch.setattr(device.compute._timed[-1][3].event, "query", failed)  # type: ignore[union-attr]
        raise KeyError("the step's own")
