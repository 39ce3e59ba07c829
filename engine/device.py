"""Streams and events: CUDA's on a GPU, and real ones on a CPU.

On a CPU a stream is work that a worker thread runs in order, so `submit` returns at once and the host runs
ahead while torch computes; an event blocks whoever waits for it. The runners are written once, against `Stream`. What
a submitted function computes exists on the host only after an event that was recorded behind it.

A failure inside submitted work is kept like a CUDA error: later work of that stream is skipped, and who waits for an
event recorded behind it gets the exception. `Device.reset` clears it.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from .hooks import Hooks, HostWait, Lane, SpanBegun, SpanEnded, WaitCounter


class Event(Protocol):
    """A mark in a stream. `synchronize` blocks the host until the work before it is done."""

    def synchronize(self) -> None: ...
    def query(self) -> bool: ...


class Stream(Protocol):
    """An ordered queue of device work."""

    lane: Lane

    def submit(self, name: str, fn: Callable[..., Any], *args: Any) -> None:
        """Queues `fn(*args)`; its result is dropped, so it writes to tensors or to a holder that later work reads."""

    def record_event(self) -> Event: ...
    def wait_event(self, event: Event) -> None:
        """Work submitted from now on starts after `event`. The host does not wait."""


@dataclass(frozen=True, slots=True)
class Span:
    """A measured piece of device work; times on the clock of `time.perf_counter_ns`."""

    step: int
    name: str
    lane: Lane
    begin_ns: int
    end_ns: int


@dataclass(eq=False)
class _StreamState:
    """What a worker shares with a stream (not the stream itself, which must stay collectable)."""

    lane: Lane
    spans: queue.SimpleQueue = field(default_factory=queue.SimpleQueue)
    error: BaseException | None = None


class CpuEvent:
    def __init__(self) -> None:
        self._done = threading.Event()
        self.error: BaseException | None = None

    def synchronize(self) -> None:
        self._done.wait()
        if self.error is not None:
            raise self.error

    def query(self) -> bool:
        return self._done.is_set()

    def set(self, error: BaseException | None = None) -> None:
        self.error = error
        self._done.set()


class _Worker:
    """A thread that runs tasks in order. It ends, finished with what is queued, when its last user is gone."""

    def __init__(self, name: str) -> None:
        self.tasks: queue.SimpleQueue = queue.SimpleQueue()
        self.num_users = 0
        self.thread = threading.Thread(target=_work, args=(self.tasks,), name=name, daemon=True)
        self.thread.start()


_workers_lock = threading.RLock()  # re-entrant: a collection inside may end another stream
_compute_worker: _Worker | None = None


def _acquire(lane: Lane) -> _Worker:
    """A worker for one more stream. There is one compute worker in the process, as there is one CPU.

    A worker of its own for each engine would give each a pool of OpenMP threads, and with more pool threads than cores
    OpenMP stops spinning between two operations: a tenth to a third of a small model's step.
    """
    global _compute_worker
    with _workers_lock:
        if lane != "compute":
            worker = _Worker(f"runnerscope-{lane}")
        else:
            worker = _compute_worker = _compute_worker or _Worker("runnerscope-compute")
        worker.num_users += 1
        return worker


def _release(worker: _Worker) -> None:
    """Joins a worker that nobody uses any more, since a thread inside torch must not outlive the interpreter."""
    global _compute_worker
    with _workers_lock:
        worker.num_users -= 1
        if worker.num_users:
            return
        if worker is _compute_worker:
            _compute_worker = None
    worker.tasks.put(None)
    if worker.thread is not threading.current_thread():
        worker.thread.join()


def run_on_compute_worker(fn: Callable[[], Any]) -> Any:
    """Runs `fn` where the CPU's compute streams run, and returns what it returns or raises what it raises.

    For heavy torch work outside a step, loading above all: on the calling thread it would leave a second pool of OpenMP
    threads behind.
    """
    worker, done = _acquire("compute"), threading.Event()
    outcome: list[tuple[Any, BaseException | None]] = []

    def run() -> None:
        try:
            with torch.inference_mode(False):
                outcome.append((fn(), None))
        except BaseException as error:  # noqa: BLE001 - raised to the caller
            outcome.append((None, error))
        done.set()

    try:
        worker.tasks.put((_StreamState("compute"), "run", 0, "", False, run, ()))
        done.wait()
    finally:
        _release(worker)
    result, error = outcome[0]
    if error is not None:
        raise error
    return result


def _work(tasks: queue.SimpleQueue) -> None:
    with torch.inference_mode():
        while (task := tasks.get()) is not None:
            state, kind, *rest = task
            if kind == "event":
                rest[0].set(state.error)
            elif kind == "wait":
                rest[0]._done.wait()
                if state.error is None:
                    state.error = rest[0].error
            elif state.error is None:
                step, name, timed, fn, args = rest
                begin = time.perf_counter_ns()
                try:
                    fn(*args)
                except BaseException as error:  # noqa: BLE001 - it belongs to whoever waits for this stream
                    state.error = error
                if timed:
                    state.spans.put(Span(step, name, state.lane, begin, time.perf_counter_ns()))
            del task, rest, state  # or the thread would keep the last step's tensors alive while it sleeps
            kind = fn = args = None


class CpuStream:
    """An order of work on a worker thread. Its share of the worker ends when it is collected or closed."""

    def __init__(self, lane: Lane, hooks: Hooks) -> None:
        self.lane = lane
        self._hooks = hooks
        self._state = _StreamState(lane)
        worker = _acquire(lane)
        self._tasks = worker.tasks
        self._close = weakref.finalize(self, _release, worker)

    def submit(self, name: str, fn: Callable[..., Any], *args: Any) -> None:
        self._put("run", self._hooks.step, name, self._hooks.active, fn, args)

    def record_event(self) -> CpuEvent:
        event = CpuEvent()
        self._put("event", event)
        return event

    def wait_event(self, event: Event) -> None:
        self._put("wait", event)

    def _put(self, *task: Any) -> None:
        if not self._close.alive:
            # Nobody would ever run it, and whoever waits for it would wait forever.
            raise RuntimeError("this engine was closed and can't run any more; make a new LLM")
        self._tasks.put((self._state, *task))

    def take_spans(self) -> list[Span]:
        """Spans of finished work since the last call."""
        spans = []
        while not self._state.spans.empty():
            spans.append(self._state.spans.get())
        return spans

    def reset(self) -> None:
        self._state.error = None

    def close(self) -> None:
        """Waits for what was submitted, and takes nothing more."""
        if self._close.alive:
            self.record_event()._done.wait()
        self._close()


class CudaEvent:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        # A blocking event lets the host thread sleep instead of spinning on a core that the launches need.
        self.event = torch.cuda.Event(blocking=True)
        self.event.record(stream)

    def synchronize(self) -> None:
        self.event.synchronize()

    def query(self) -> bool:
        return self.event.query()


class CudaStream:
    def __init__(self, lane: Lane, hooks: Hooks, device: torch.device) -> None:
        self.lane = lane
        self._hooks = hooks
        self.stream = torch.cuda.Stream(device)
        self._timed: list[tuple[int, str, torch.cuda.Event, torch.cuda.Event]] = []
        self._origin: tuple[int, torch.cuda.Event] | None = None

    def submit(self, name: str, fn: Callable[..., Any], *args: Any) -> None:
        with torch.inference_mode(), torch.cuda.stream(self.stream):
            if not self._hooks.active:
                fn(*args)
                return
            if self._origin is None:
                self._origin = self._clock_origin()
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record(self.stream)
            fn(*args)
            end.record(self.stream)
            self._timed.append((self._hooks.step, name, begin, end))

    def _clock_origin(self) -> tuple[int, torch.cuda.Event]:
        """Ties the device's clock to the host's, once, before the first observed work (so it is outside every span)."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(self.stream)
        event.synchronize()
        return time.perf_counter_ns(), event

    def record_event(self) -> CudaEvent:
        return CudaEvent(self.stream)

    def wait_event(self, event: Event) -> None:
        assert isinstance(event, CudaEvent)
        self.stream.wait_event(event.event)

    def take_spans(self) -> list[Span]:
        spans = []
        while self._timed and self._timed[0][3].query() and self._origin is not None:
            step, name, begin, end = self._timed.pop(0)
            origin_ns, origin = self._origin
            begin_ns = origin_ns + int(origin.elapsed_time(begin) * 1e6)
            spans.append(Span(step, name, self.lane, begin_ns, begin_ns + int(begin.elapsed_time(end) * 1e6)))
        return spans

    def reset(self) -> None:
        self._timed.clear()

    def close(self) -> None:
        return


class Fetch:
    """Copies of device tensors on their way to the host."""

    def __init__(self, event: Event, host: dict[str, torch.Tensor]) -> None:
        self._event = event
        self._host = host

    def result(self) -> dict[str, np.ndarray]:
        self._event.synchronize()
        return {name: tensor.numpy() for name, tensor in self._host.items()}


class Device:
    """The streams of one engine, and the only ways in which its host moves data to them or waits for them."""

    def __init__(self, device: torch.device, hooks: Hooks) -> None:
        self.torch_device = device
        self.is_cuda = device.type == "cuda"
        self.hooks = hooks
        self.waits = WaitCounter()
        lanes: tuple[Lane, Lane] = ("compute", "copy")
        make = (lambda lane: CudaStream(lane, hooks, device)) if self.is_cuda else (lambda lane: CpuStream(lane, hooks))
        self.compute, self.copy = (make(lane) for lane in lanes)

    def to_device(self, array: np.ndarray) -> torch.Tensor:
        """A fresh copy of `array` on the device, shared with nobody: no step needs a barrier before `array` changes."""
        copy = torch.from_numpy(array.copy())
        return self.upload(copy.pin_memory() if self.is_cuda else copy)

    def upload(self, host: torch.Tensor) -> torch.Tensor:
        """`host` as the device sees it, in stream order: a copy on CUDA (pin it), the tensor itself on a CPU."""
        if not isinstance(self.compute, CudaStream):
            return host
        with torch.cuda.stream(self.compute.stream):
            return host.to(self.torch_device, non_blocking=True)

    def empty_host(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A zeroed host tensor, pinned where there is a GPU to copy to."""
        return torch.zeros(shape, dtype=dtype, pin_memory=self.is_cuda)

    def zeros(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.torch_device)

    def wait(self, event: Event, reason: str, *, inside_step: bool) -> None:
        """Blocks the host on `event`, counts it and tells the observers. Every wait of an engine goes through here."""
        begin = time.perf_counter_ns()
        try:
            event.synchronize()
        finally:
            self.waits.add(reason, inside_step)
            if self.hooks.active:
                end = time.perf_counter_ns()
                self.hooks.emit(HostWait(self.hooks.step, self.hooks.runner, end, reason, begin, end, inside_step))

    def fetch(self, tensors: Callable[[], Mapping[str, torch.Tensor]]) -> Fetch:
        """Enqueues copies of what `tensors()` returns (called on the stream) to the host; waits for nothing."""
        host: dict[str, torch.Tensor] = {}

        def copy() -> None:
            for name, tensor in tensors().items():
                if self.is_cuda:
                    host[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
                    host[name].copy_(tensor, non_blocking=True)
                else:
                    host[name] = tensor.clone()

        self.compute.submit("snapshot", copy)
        return Fetch(self.compute.record_event(), host)

    def emit_spans(self) -> None:
        """Emits the device spans that have ended since the last call; called between steps."""
        if not self.hooks.active:
            return
        spans = sorted(self.compute.take_spans() + self.copy.take_spans(), key=lambda span: span.begin_ns)
        for s in spans:
            if s.name != "snapshot":
                self.hooks.emit(SpanBegun(s.step, self.hooks.runner, s.begin_ns, s.name, s.lane))
                self.hooks.emit(SpanEnded(s.step, self.hooks.runner, s.end_ns, s.name, s.lane, s.begin_ns, s.end_ns))

    def drain(self) -> None:
        """Waits until both streams are idle: a pause, never part of a step."""
        for stream in (self.compute, self.copy):
            stream.record_event().synchronize()

    def reset(self) -> None:
        """Waits until both streams are idle and clears a failure."""
        for stream in (self.compute, self.copy):
            with contextlib.suppress(Exception):  # it has been raised to the caller of the step already
                stream.record_event().synchronize()
            stream.reset()

    def close(self) -> None:
        self.compute.close()
        self.copy.close()
