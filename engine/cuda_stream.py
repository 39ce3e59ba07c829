"""Streams of a CUDA device, with spans measured by events."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from .hooks import Hooks, Lane
from .streams import Event, Span


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
