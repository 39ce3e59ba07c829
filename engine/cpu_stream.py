"""Streams of a CPU: worker threads that run submitted work in order.

`submit` returns at once and the host runs ahead while torch computes; an event blocks whoever waits for it. A failure
inside submitted work is kept like a CUDA error: later work of that stream is skipped, and who waits for an event
recorded behind it gets the exception.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from .hooks import Hooks, Lane
from .streams import Event, Span


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
    """A thread, not started, that runs tasks in order. It ends, finished with what is queued, when its last user is
    gone."""

    def __init__(self, name: str) -> None:
        self.tasks: queue.SimpleQueue = queue.SimpleQueue()
        self.num_users = 0
        self.thread = threading.Thread(target=_work, args=(self.tasks,), name=name, daemon=True)


_workers_lock = threading.RLock()  # re-entrant: a collection inside may end another stream
_compute_worker: _Worker | None = None


def _acquire(lane: Lane) -> _Worker:
    """A worker for one more stream. There is one compute worker in the process, as there is one CPU.

    A worker of its own for each engine would give each a pool of OpenMP threads, and with more pool threads than cores
    OpenMP stops spinning between two operations: a tenth to a third of a small model's step.
    """
    global _compute_worker
    with _workers_lock:
        known = _compute_worker if lane == "compute" else None
        worker = known or _Worker(f"runnerscope-{lane}")
        if lane == "compute":
            _compute_worker = worker
        worker.num_users += 1
    if known is None:
        # NOTE: without the lock. A thread may begin with a collection that ends another stream, and is awaited here.
        worker.thread.start()
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
        self._put("run", self._hooks.step, name, self._hooks.spans, fn, args)

    def record_event(self, *, for_host: bool = True) -> CpuEvent:
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
