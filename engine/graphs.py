"""CUDA graphs: capture by a factory, one memory pool, replay by key."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch

from .cuda_stream import CudaStream
from .streams import Stream

Factory = Callable[[], Callable[[], Any]]
"""Builds a step's inputs outside the graph and returns the work to capture."""


class GraphPool:
    """Captured pieces of work under keys. Capture the largest first: the smaller ones then fit into its memory."""

    def __init__(self, stream: CudaStream) -> None:
        self._stream = stream
        self._pool: Any = None
        self._graphs: dict[Hashable, tuple[torch.cuda.CUDAGraph, Any]] = {}

    def __len__(self) -> int:
        return len(self._graphs)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._graphs

    def capture(self, key: Hashable, factory: Factory) -> None:
        """Runs the work once, so that every kernel is compiled and every handle made, then captures it.

        The work must be safe to run with the inputs that the factory builds. Waits for the device: call it at start-up.
        """
        self._stream.catch_up()
        stream = self._stream.stream
        graph = torch.cuda.CUDAGraph()
        with torch.inference_mode(), torch.cuda.stream(stream):
            factory()()
            stream.synchronize()
            work = factory()
            with torch.cuda.graph(graph, pool=self._pool, stream=stream):
                result = work()
        self._pool = self._pool or graph.pool()
        self._graphs[key] = (graph, result)

    def replay(self, key: Hashable) -> Any:
        """Runs the captured work on the current stream and returns its result: tensors that the next replay
        overwrites."""
        graph, result = self._graphs[key]
        graph.replay()
        return result


def make_graph_pool(stream: Stream) -> GraphPool | None:
    """None where there is nothing to capture: on a CPU."""
    return GraphPool(stream) if isinstance(stream, CudaStream) else None
