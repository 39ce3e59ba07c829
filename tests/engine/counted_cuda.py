"""CUDA's streams and events without a device: calls are counted, and the device is done with all work at once or held.

What an engine does on such streams is its host's part alone: a captured step's replay computes nothing.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

import engine.device
from engine.cuda_stream import CudaStream
from engine.graphs import Factory
from engine.hooks import Hooks, Lane
from engine.runner_v2 import step_graphs


@dataclass
class CountedCuda:
    """`calls`: how often each was called. While `held`, no event that is recorded is ever done."""

    calls: Counter[str] = field(default_factory=Counter)
    held: bool = False

    def event(self, enable_timing: bool = False, blocking: bool = False) -> CountedEvent:
        self.calls["new event"] += 1
        return CountedEvent(self, enable_timing, blocking)


class CountedEvent:
    def __init__(self, cuda: CountedCuda, timing: bool, blocking: bool) -> None:
        self._cuda, self.timing, self.blocking = cuda, timing, blocking
        self.done, self.at = False, 0

    def record(self, stream: CountedStream) -> None:
        self._cuda.calls["record timing" if self.timing else "record"] += 1
        self.done, self.at = not self._cuda.held, time.perf_counter_ns()

    def synchronize(self) -> None:
        assert self.blocking, "the host would spin"
        self._cuda.calls["synchronize"] += 1

    def query(self) -> bool:
        self._cuda.calls["query"] += 1
        return self.done

    def elapsed_time(self, end: CountedEvent) -> float:
        assert self.timing and end.timing and end.done, "CUDA would refuse"
        self._cuda.calls["elapsed_time"] += 1
        return (end.at - self.at) / 1e6


class CountedStream:
    def __init__(self, cuda: CountedCuda) -> None:
        self.device, self._cuda = torch.device("cpu", 0), cuda

    def wait_event(self, event: CountedEvent) -> None:
        self._cuda.calls["wait_event"] += 1

    def wait_stream(self, stream: None) -> None:
        self._cuda.calls["wait_stream"] += 1


class EmptyReplays:
    """A `GraphPool` whose replays compute nothing: what the work gave when it was captured stays its result."""

    def __init__(self, cuda: CountedCuda) -> None:
        self._cuda, self._results = cuda, {}

    def capture(self, key: Hashable, factory: Factory) -> None:
        with torch.inference_mode():
            self._results[key] = factory()()

    def replay(self, key: Hashable) -> Any:
        self._cuda.calls["replay"] += 1
        return self._results[key]


@contextlib.contextmanager
def counted_cuda() -> Iterator[CountedCuda]:
    """Engines and devices for the CPU that are made inside have CUDA's streams, on a counted CUDA."""
    cuda = CountedCuda()
    no_context: Callable[..., Any] = lambda *args: contextlib.nullcontext()  # noqa: E731
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "Event", cuda.event)
        patch.setattr(torch.cuda, "Stream", lambda device: CountedStream(cuda))
        patch.setattr(torch.cuda, "current_stream", lambda index: None)
        patch.setattr(torch.cuda, "set_stream", lambda stream: None)
        patch.setattr(torch.cuda, "stream", no_context)
        patch.setattr(engine.device, "CpuStream", counted_stream)
        patch.setattr(step_graphs, "make_graph_pool", lambda stream: EmptyReplays(cuda))
        yield cuda


def counted_stream(lane: Lane, hooks: Hooks) -> CudaStream:
    return CudaStream(lane, hooks, torch.device("cpu", 0))
