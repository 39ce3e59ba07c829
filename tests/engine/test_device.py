"""Streams and events of the CPU: order, blocking, failures that stick, threads that end."""

from __future__ import annotations

import gc
import threading
import time
import weakref

import numpy as np
import pytest
import torch

from engine.cpu_stream import CpuStream
from engine.device import Device
from engine.hooks import Event, Hooks, HostWait, SpanBegun, SpanEnded
from tests.engine.engine_helpers import greedy, ids, make_llm, prompt_of


@pytest.fixture
def device() -> Device:
    device = Device(torch.device("cpu"), Hooks("v2"))
    yield device
    device.close()


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("runnerscope")]


def test_submit_returns_at_once_and_work_runs_in_order(device: Device) -> None:
    gate, seen = threading.Event(), []
    device.compute.submit("wait", gate.wait)
    for i in range(20):
        device.compute.submit("append", seen.append, i)
    done = device.compute.record_event()
    assert seen == [] and not done.query()
    gate.set()
    done.synchronize()
    assert seen == list(range(20)) and done.query()


def test_work_runs_on_another_thread_without_gradients(device: Device) -> None:
    seen: list[object] = []
    device.compute.submit(
        "look", lambda: seen.extend([threading.current_thread().name, torch.is_inference_mode_enabled()])
    )
    device.compute.record_event().synchronize()
    assert seen == ["runnerscope-compute", True]
    assert not torch.is_inference_mode_enabled()


def test_an_event_really_blocks_its_waiter(device: Device) -> None:
    gate, passed = threading.Event(), threading.Event()
    device.compute.submit("wait", gate.wait)
    event = device.compute.record_event()

    def wait() -> None:
        event.synchronize()
        passed.set()

    waiter = threading.Thread(target=wait)
    waiter.start()
    assert not passed.wait(0.05)
    gate.set()
    assert passed.wait(10)
    waiter.join()


def test_an_event_covers_only_the_work_before_it(device: Device) -> None:
    gate, seen = threading.Event(), []
    device.compute.submit("first", seen.append, 1)
    event = device.compute.record_event()
    device.compute.submit("wait", gate.wait)
    event.synchronize()
    assert seen == [1]
    gate.set()


def test_one_stream_waits_for_another_and_the_host_does_not(device: Device) -> None:
    gate, seen = threading.Event(), []
    device.compute.submit("wait", gate.wait)
    device.compute.submit("compute", seen.append, "compute")
    device.copy.wait_event(device.compute.record_event())
    device.copy.submit("copy", seen.append, "copy")
    done = device.copy.record_event()
    time.sleep(0.02)
    assert seen == [] and not done.query()
    gate.set()
    done.synchronize()
    assert seen == ["compute", "copy"]


def test_streams_are_independent_without_an_event(device: Device) -> None:
    gate, seen = threading.Event(), []
    device.compute.submit("wait", gate.wait)
    device.copy.submit("copy", seen.append, "copy")
    device.copy.record_event().synchronize()
    assert seen == ["copy"]
    gate.set()


def test_a_failure_sticks_until_reset(device: Device) -> None:
    seen = []
    before = device.compute.record_event()
    device.compute.submit("fail", lambda: 1 / 0)
    device.compute.submit("skipped", seen.append, "compute")
    device.copy.wait_event(device.compute.record_event())
    device.copy.submit("skipped too", seen.append, "copy")
    before.synchronize()
    for stream in (device.compute, device.copy):
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                stream.record_event().synchronize()
    assert seen == []
    device.reset()
    for stream in (device.compute, device.copy):
        stream.submit("works", seen.append, stream.lane)
        stream.record_event().synchronize()
    assert seen == ["compute", "copy"]


def test_a_fetch_takes_the_values_of_its_moment(device: Device) -> None:
    x = torch.zeros(3)
    device.compute.submit("one", x.fill_, 1)
    fetch = device.fetch(lambda: {"x": x})
    device.compute.submit("two", x.fill_, 2)
    device.drain()
    assert fetch.result()["x"].tolist() == [1, 1, 1] and x.tolist() == [2, 2, 2]


def test_to_device_shares_nothing(device: Device) -> None:
    array = np.arange(4, dtype=np.int32)
    tensor = device.to_device(array)
    array[:] = 9
    assert tensor.tolist() == [0, 1, 2, 3] and tensor.dtype == torch.int32


def test_a_wait_is_counted_and_told(device: Device) -> None:
    events: list[HostWait] = []
    with device.hooks.subscribe(HostWait, events.append):
        device.compute.submit("sleep", time.sleep, 0.02)
        device.wait(device.compute.record_event(), "because", inside_step=True)
        device.wait(device.compute.record_event(), "because", inside_step=False)
    device.wait(device.compute.record_event(), "because", inside_step=True)
    assert device.waits.inside_step == {"because": 2} and device.waits.outside_step == {"because": 1}
    assert [event.inside_step for event in events] == [True, False]
    assert events[0].end_ns - events[0].begin_ns > 5_000_000


def test_a_wait_that_fails_is_counted_too(device: Device) -> None:
    device.compute.submit("fail", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        device.wait(device.compute.record_event(), "because", inside_step=True)
    assert device.waits.inside_step == {"because": 1}


def test_device_spans_are_measured_and_emitted_between_steps(device: Device) -> None:
    events: list[Event] = []
    with device.hooks.subscribe((SpanBegun, SpanEnded), events.append):
        device.hooks.step = 7
        device.compute.submit("work", time.sleep, 0.01)
        device.compute.record_event().synchronize()
        assert events == []
        device.emit_spans()
    begun, ended = events
    assert isinstance(begun, SpanBegun) and isinstance(ended, SpanEnded)
    assert (ended.step, ended.name, ended.lane) == (7, "work", "compute")
    assert ended.end_ns - ended.begin_ns > 5_000_000 and begun.time_ns == ended.begin_ns


def test_close_finishes_the_work_and_ends_the_threads() -> None:
    count = len(threads())
    device, seen = Device(torch.device("cpu"), Hooks("v2")), []
    # The compute worker is the process's, so it may have been there.
    assert len(threads()) - count in (1, 2)
    device.compute.submit("slow", time.sleep, 0.02)
    device.compute.submit("last", seen.append, 1)
    device.close()
    assert seen == [1] and len(threads()) == count
    device.close()
    for use in (lambda: device.compute.submit("late", print), device.copy.record_event, device.drain):
        with pytest.raises(RuntimeError, match="closed"):
            use()


def test_a_stream_that_nobody_has_ends_its_thread() -> None:
    count = len(threads())
    stream = CpuStream("compute", Hooks("v1"))
    stream.submit("work", lambda: None)
    del stream
    gc.collect()
    assert len(threads()) == count


@pytest.mark.parametrize("runner", ["v1", "v2"])
@pytest.mark.parametrize("busy", [False, True])
def test_an_engine_that_nobody_has_ends_its_threads(runner: str, busy: bool) -> None:
    """With a step in flight too."""
    gc.collect()
    count = len(threads())
    llm = make_llm(runner)
    llm.generate(ids(*prompt_of(5)), greedy(3), use_tqdm=False)
    if busy:
        llm.add(ids(*prompt_of(5)), greedy(20))
        llm.step()
    alive = weakref.ref(llm.core.runner)
    del llm
    deadline = time.monotonic() + 10
    while (alive() is not None or len(threads()) > count) and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    assert alive() is None and len(threads()) == count


def test_a_worker_that_starts_may_end_another_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread's first breath may be a collection; who starts it waits for that breath."""
    start, ended = threading.Thread.start, []

    def start_behind_a_collection(thread: threading.Thread) -> None:
        if thread.name == "runnerscope-copy":
            other = CpuStream("compute", Hooks("v2"))
            collection = threading.Thread(target=other.close, daemon=True)
            start(collection)
            collection.join(timeout=10)
            ended.append(not collection.is_alive())
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_behind_a_collection)
    CpuStream("copy", Hooks("v2")).close()
    assert ended == [True]


def test_a_sleeping_stream_keeps_no_step_alive() -> None:
    stream = CpuStream("compute", Hooks("v2"))
    tensor = torch.zeros(4)
    alive = weakref.ref(tensor)
    stream.submit("use", tensor.add_, 1)
    stream.record_event().synchronize()
    del tensor
    deadline = time.monotonic() + 10
    while alive() is not None and time.monotonic() < deadline:
        time.sleep(0.001)
    assert alive() is None
    stream.close()
