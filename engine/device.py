"""The device of one engine: its compute stream, its copy stream, and every way to move data to them or wait for them.

The runners are written once, against `Stream`: CUDA's (cuda_stream.py) or a CPU's (cpu_stream.py). What a submitted
function computes exists on the host only after an event that was recorded behind it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from operator import attrgetter

import numpy as np
import torch

from .cpu_stream import CpuStream
from .cuda_stream import CudaStream
from .hooks import Hooks, HostWait, Lane, SpanBegun, SpanEnded, WaitCounter
from .streams import Event

SPANS_AT_ONCE = 8
"""Spans of the compute stream that are read together; more would make one step late for the sake of the others."""
_begin_ns = attrgetter("begin_ns")


class Fetch:
    """Copies of device tensors on their way to the host."""

    def __init__(self, event: Event, host: dict[str, torch.Tensor]) -> None:
        self._event = event
        self._host = host

    def result(self) -> dict[str, np.ndarray]:
        self._event.synchronize()
        return {name: tensor.numpy() for name, tensor in self._host.items()}


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source, non_blocking=True)


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
        if isinstance(self.compute, CudaStream) and isinstance(self.copy, CudaStream):
            self.copy.come_within(self.compute)
        self._emitting = threading.Lock()
        hooks.emit_spans = self._emit_last_spans

    def scope(self) -> contextlib.AbstractContextManager[None]:
        """What makes `submit` to the compute stream cheap: open it around a phase or a step of this engine's host."""
        return self.compute.scope() if isinstance(self.compute, CudaStream) else contextlib.nullcontext()

    def write(self, name: str, target: torch.Tensor, array: np.ndarray) -> None:
        """Queues `target.copy_(array)`, of a fresh copy of `array`, as the work called `name`."""
        self.compute.submit(name, _copy, target, self._fresh(array))

    def to_device(self, array: np.ndarray) -> torch.Tensor:
        """A fresh copy of `array` on the device, shared with nobody: no step needs a barrier before `array` changes."""
        return self.upload(self._fresh(array))

    def _fresh(self, array: np.ndarray) -> torch.Tensor:
        host = torch.from_numpy(array)
        return host.pin_memory() if self.is_cuda else host.clone()

    def upload(self, host: torch.Tensor) -> torch.Tensor:
        """`host` as the device sees it, in stream order: a copy on CUDA (pin it), the tensor itself on a CPU."""
        if not isinstance(self.compute, CudaStream):
            return host
        return self.compute.upload(host)

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
            end = time.perf_counter_ns()
            self.waits.add(reason, inside_step, end - begin)
            if HostWait in self.hooks.wanted:
                self.hooks.tell(HostWait, self.hooks.step, self.hooks.runner, end, reason, begin, end, inside_step)

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

    def emit_spans(self, *, in_a_pause: bool = True) -> None:
        """Emits the device spans that have ended since the last call; called between steps. Without a pause a GPU's
        wait until SPANS_AT_ONCE are there: to read a few steps' costs the host little more than one's."""
        hooks = self.hooks
        if not hooks.spans:
            return
        if not in_a_pause and isinstance(self.compute, CudaStream) and self.compute.num_timed < SPANS_AT_ONCE:
            return
        with self._emitting:
            spans = self.compute.take_spans() + self.copy.take_spans()
        runner, begun = hooks.runner, SpanBegun in hooks.wanted
        for s in sorted(spans, key=_begin_ns):
            if s.name != "snapshot":
                if begun:
                    hooks.tell(SpanBegun, s.step, runner, s.begin_ns, s.name, s.lane)
                hooks.tell(SpanEnded, s.step, runner, s.end_ns, s.name, s.lane, s.begin_ns, s.end_ns)

    def _emit_last_spans(self) -> None:
        """For who stops observing. A device that has failed has no spans, and its error is the step's to raise."""
        with contextlib.suppress(Exception):
            self.emit_spans()

    def catch_up(self) -> None:
        """What is made on the caller's stream, as tables and their zeros are, is made before either stream reads it."""
        for stream in (self.compute, self.copy):
            if isinstance(stream, CudaStream):
                stream.catch_up()

    def drain(self) -> None:
        """Waits until both streams are idle: a pause, never part of a step."""
        for stream in (self.compute, self.copy):
            stream.record_event().synchronize()
            if isinstance(stream, CudaStream):
                stream.tie_clocks()

    def reset(self) -> None:
        """Waits until both streams are idle and clears a failure."""
        for stream in (self.compute, self.copy):
            with contextlib.suppress(Exception):  # it has been raised to the caller of the step already
                stream.record_event().synchronize()
            stream.reset()

    def close(self) -> None:
        self.compute.close()
        self.copy.close()
