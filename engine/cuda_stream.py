"""Streams of a CUDA device, with spans measured by events."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

import torch

from .hooks import Hooks, Lane
from .streams import Event, Span

_FAR_MS = 10_000.0
"""Elapsed times are float32: behind this a span would be told to the microsecond no longer."""


class CudaEvent:
    """A recorded event of a stream. It goes back to `pool` when nobody holds it: one costs more to make than to use."""

    def __init__(self, stream: torch.cuda.Stream, pool: list[torch.cuda.Event]) -> None:
        # A blocking event lets the host thread sleep instead of spinning on a core that the launches need.
        self.event = pool.pop() if pool else torch.cuda.Event(blocking=True)
        self.event.record(stream)
        self._pool = pool

    def __del__(self) -> None:
        self._pool.append(self.event)

    def synchronize(self) -> None:
        self.event.synchronize()

    def query(self) -> bool:
        return self.event.query()


class _Scope(AbstractContextManager[None]):
    """Inference mode, with `stream` the current one; entered again inside itself it costs an addition.

    `torch.cuda.stream` would do, but it looks devices up on its way in and out, which costs a small step more than its
    launches.
    """

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._device = stream.device.index
        self._depth = 0
        self._inference: torch.inference_mode | None = None
        self._outer = stream

    def __enter__(self) -> None:
        self._depth += 1
        if self._depth > 1:
            return
        if not torch.is_inference_mode_enabled():
            self._inference = torch.inference_mode()
            self._inference.__enter__()
        self._outer = torch.cuda.current_stream(self._device)
        torch.cuda.set_stream(self._stream)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._depth -= 1
        if self._depth:
            return
        torch.cuda.set_stream(self._outer)
        if self._inference is not None:
            self._inference.__exit__(kind, error, at)
            self._inference = None


class CudaStream:
    def __init__(self, lane: Lane, hooks: Hooks, device: torch.device) -> None:
        self.lane = lane
        self._hooks = hooks
        self.stream = torch.cuda.Stream(device)
        self._scope = _Scope(self.stream)
        self._timed: deque[tuple[int, str, torch.cuda.Event, torch.cuda.Event]] = deque()
        self._event_pool: list[torch.cuda.Event] = []
        self._timing_pool: list[torch.cuda.Event] = []
        self.tie_clocks()

    def scope(self) -> AbstractContextManager[None]:
        """While it is open this is the thread's current stream, and `submit` need not make it so. May be nested."""
        return self._scope

    def submit(self, name: str, fn: Callable[..., Any], *args: Any) -> None:
        with self._scope:
            if not self._hooks.spans:
                fn(*args)
                return
            begin, end = self._timing_event(), self._timing_event()
            begin.record(self.stream)
            fn(*args)
            end.record(self.stream)
            self._timed.append((self._hooks.step, name, begin, end))

    def _timing_event(self) -> torch.cuda.Event:
        return self._timing_pool.pop() if self._timing_pool else torch.cuda.Event(enable_timing=True)

    def tie_clocks(self) -> None:
        """Notes what the host's clock says at a point of the device's, and waits for the device to do so: when the
        stream is made, and again in each pause, since the two clocks drift apart."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(self.stream)
        event.synchronize()
        self._origin = time.perf_counter_ns(), event

    def record_event(self) -> CudaEvent:
        return CudaEvent(self.stream, self._event_pool)

    def wait_event(self, event: Event) -> None:
        assert isinstance(event, CudaEvent)
        self.stream.wait_event(event.event)

    def take_spans(self) -> list[Span]:
        spans = []
        while self._timed and self._timed[0][3].query():
            step, name, begin, end = self._timed.popleft()
            origin_ns, origin = self._origin
            since_origin = origin.elapsed_time(begin)
            begin_ns = origin_ns + int(since_origin * 1e6)
            spans.append(Span(step, name, self.lane, begin_ns, begin_ns + int(begin.elapsed_time(end) * 1e6)))
            self._timing_pool.append(end)
            if since_origin > _FAR_MS:
                self._origin = begin_ns, begin
            else:
                self._timing_pool.append(begin)
        return spans

    def reset(self) -> None:
        self._timed.clear()

    def close(self) -> None:
        return
