"""What stands for captured steps where nothing can be captured: the same work, built once and run again and again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from typing import Any

import pytest
import torch

from engine.graphs import Factory
from engine.runner_v2 import step_graphs
from engine.runner_v2.verification import with_lengths_read
from engine.streams import Stream


class RepeatedWork:
    """A `GraphPool` without graphs. As there, work is made once, its buffers serve every step, and padding that a
    captured step would compute is computed."""

    def __init__(self) -> None:
        self._work: dict[Hashable, Any] = {}
        self.replayed: Counter[Hashable] = Counter()

    @property
    def num_replays(self) -> int:
        return self.replayed.total()

    def capture(self, key: Hashable, factory: Factory) -> None:
        work = factory()
        keywords = getattr(work, "keywords", {})

        def run() -> Any:
            # The attention of a CPU groups by the host's lengths, which a captured step doesn't have.
            with torch.inference_mode():
                if "metadata" in keywords:  # V1's forward, and its drafter's
                    return work(metadata=with_lengths_read(keywords["metadata"]))  # type: ignore[call-arg]
                step = work.func.__self__  # type: ignore[attr-defined]
                step.metadata = with_lengths_read(step.metadata)
                return work()

        self._work[key] = run

    def __contains__(self, key: Hashable) -> bool:
        return key in self._work

    def replay(self, key: Hashable) -> Any:
        self.replayed[key] += 1
        return self._work[key]()


def repeat_instead_of_capture(monkeypatch: pytest.MonkeyPatch) -> list[RepeatedWork]:
    """Every engine made from now on has such a pool; they are in the list."""
    pools: list[RepeatedWork] = []

    def make(stream: Stream) -> RepeatedWork:
        pools.append(RepeatedWork())
        return pools[-1]

    monkeypatch.setattr(step_graphs, "make_graph_pool", make)
    return pools
