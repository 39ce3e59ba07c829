"""What one steady step costs on the host and on the device, from the hooks' own spans."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from engine.hooks import (
    BlockTableGathered,
    Event,
    HostWait,
    InputsPrepared,
    KernelLaunched,
    RequestAdded,
    RequestFinished,
    RequestPreempted,
    RequestResumed,
    RowFreed,
    RowMoved,
    RowWritten,
    SpanEnded,
)

from .host_parts import HostParts

SUMMARY_EVENTS: tuple[type[Event], ...] = (
    SpanEnded, HostWait, InputsPrepared, BlockTableGathered,
    RequestAdded, RequestPreempted, RequestResumed, RequestFinished, RowWritten, RowMoved, RowFreed,
)  # fmt: skip
"""Summary level: what happens once a step or once a request's life. What comes for each token stays out
(RequestScheduled, Sampled, OutputDelivered), for each launch (KernelLaunched: the device's spans have their names), and
what a later event says again (SpanBegun)."""
COST_EVENTS = (*SUMMARY_EVENTS, KernelLaunched)
"""What a `StepCostObserver` looks at."""

Interval = tuple[int, int]


def union(intervals: Iterable[Interval]) -> int:
    """Length of what `intervals` (begin, end) cover together; what overlaps counts once."""
    total, reached = 0, None
    for begin, end in sorted(intervals):
        begin = begin if reached is None else max(begin, reached)
        total += max(0, end - begin)
        reached = end if reached is None else max(reached, end)
    return total


@dataclass
class _Step:
    host: list[Interval] = field(default_factory=list)
    compute: list[Interval] = field(default_factory=list)
    waited: int = 0
    launches: int = 0
    decodes_only: bool = False


@dataclass(frozen=True)
class StepCosts:
    """Medians over the steps in which every request decoded one token.

    `host`: the host's whole step, while nobody observes; `observed_host_us`: its phases alone without waits, while
    somebody does. `device_us`: the compute stream's spans, so gaps between two launches inside one span count as busy.
    `launches`: KernelLaunched events, a graph's replay being one.
    """

    steps: int
    host: HostParts
    observed_host_us: float
    device_us: float
    launches: float


class StepCostObserver:
    """A subscriber that keeps a few numbers of each step. Device spans come steps later, under their own step."""

    def __init__(self) -> None:
        self._steps: dict[int, _Step] = defaultdict(_Step)

    def __call__(self, event: Event) -> None:
        step = self._steps[event.step]
        if isinstance(event, SpanEnded):
            if event.lane == "host":
                step.host.append((event.begin_ns, event.end_ns))
            elif event.lane == "compute":
                step.compute.append((event.begin_ns, event.end_ns))
        elif isinstance(event, HostWait):
            step.waited += event.end_ns - event.begin_ns
        elif isinstance(event, KernelLaunched):
            step.launches += 1
        elif isinstance(event, InputsPrepared):
            step.decodes_only = event.num_tokens == event.num_reqs

    def result(self, host: HostParts) -> StepCosts:
        """The medians, with `host` of another run. ValueError if no step was a pure decode: the outputs were one
        token long."""
        steady = [step for step in self._steps.values() if step.decodes_only]
        if not steady:
            raise ValueError("no step decoded only, so there is no steady step to look at; ask for longer outputs")
        return StepCosts(
            steps=len(steady),
            host=host,
            observed_host_us=statistics.median(union(step.host) - step.waited for step in steady) / 1e3,
            device_us=statistics.median(union(step.compute) for step in steady) / 1e3,
            launches=statistics.median(step.launches for step in steady),
        )
