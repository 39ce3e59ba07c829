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

    __slots__ = ("_pool", "event")

    def __init__(
        self, stream: torch.cuda.Stream, pool: list[torch.cuda.Event], timing: bool = False, blocking: bool = True
    ) -> None:
        # A blocking event lets the host thread sleep instead of spinning on a core that the launches need.
        self.event = pool.pop() if pool else torch.cuda.Event(enable_timing=timing, blocking=blocking)
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
        self.around: _Scope | None = None
        """What is usually open around this one: then nobody need be asked what the current stream is."""

    def __enter__(self) -> None:
        self._depth += 1
        if self._depth > 1:
            return
        if self.around is not None and self.around._depth:
            self._outer = self.around._stream
        else:
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
        self._timed: deque[tuple[int, str, CudaEvent, CudaEvent]] = deque()
        self._last: CudaEvent | None = None
        """The end of the span that was submitted last, while nothing has come behind it."""
        self._event_pool: list[torch.cuda.Event] = []
        self._stream_event_pool: list[torch.cuda.Event] = []
        self._timing_pool: list[torch.cuda.Event] = []
        self.tie_clocks()

    def scope(self) -> AbstractContextManager[None]:
        """While it is open this is the thread's current stream, and `submit` need not make it so. May be nested."""
        return self._scope

    def come_within(self, other: CudaStream) -> None:
        """Work is submitted to this stream while the scope of `other` is open."""
        self._scope.around = other._scope

    def submit(self, name: str, fn: Callable[..., Any], *args: Any) -> None:
        with self._scope:
            self._last = None
            if not self._hooks.spans:
                if self._timed:  # their observer has gone
                    self._timed.clear()
                fn(*args)
                return
            begin = CudaEvent(self.stream, self._timing_pool, timing=True)
            fn(*args)
            self._last = end = CudaEvent(self.stream, self._timing_pool, timing=True)
            self._timed.append((self._hooks.step, name, begin, end))

    def catch_up(self) -> None:
        """What the caller's stream has been given, as the zeros of a new table, is done before what comes here next."""
        self._last = None
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))

    def upload(self, host: torch.Tensor) -> torch.Tensor:
        """`host`, which is pinned, on the device; the copy is only queued."""
        self._last = None
        with self._scope:
            return host.to(self.stream.device, non_blocking=True)

    @property
    def num_timed(self) -> int:
        """Submitted pieces of work whose spans nobody has taken."""
        return len(self._timed)

    def tie_clocks(self) -> None:
        """Notes what the host's clock says at a point of the device's, and waits for the device to do so: when the
        stream is made, and again in each pause, since the two clocks drift apart."""
        event = CudaEvent(self.stream, self._timing_pool, timing=True)
        event.synchronize()
        self._origin = time.perf_counter_ns(), event

    def record_event(self, *, for_host: bool = True) -> CudaEvent:
        # Behind a span its end says the same, and each mark costs the device some microseconds between two steps.
        if self._last is not None:
            return self._last
        # Of an event that lets the host sleep the device also has to tell the host, by an interrupt.
        pool = self._event_pool if for_host else self._stream_event_pool
        return CudaEvent(self.stream, pool, blocking=for_host)

    def wait_event(self, event: Event) -> None:
        assert isinstance(event, CudaEvent)
        self._last = None
        self.stream.wait_event(event.event)

    def take_spans(self) -> list[Span]:
        timed = self._timed
        num_done = len(timed)
        while num_done and not timed[num_done - 1][3].query():  # in order, so all before one that is done are done
            num_done -= 1
        return [self._span(*timed.popleft()) for _ in range(num_done)]

    def _span(self, step: int, name: str, begin: CudaEvent, end: CudaEvent) -> Span:
        origin_ns, origin = self._origin
        since_origin = origin.event.elapsed_time(begin.event)
        begin_ns = origin_ns + int(since_origin * 1e6)
        if since_origin > _FAR_MS:
            self._origin = begin_ns, begin
        return Span(step, name, self.lane, begin_ns, begin_ns + int(begin.event.elapsed_time(end.event) * 1e6))

    def reset(self) -> None:
        self._timed.clear()

    def close(self) -> None:
        return
