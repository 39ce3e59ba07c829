"""What a steady step costs: the arithmetic of intervals, and which steps count."""

from __future__ import annotations

import pytest

from engine.bench.host_parts import HostParts
from engine.bench.step_costs import StepCostObserver, union
from engine.hooks import Event, HostWait, InputsPrepared, KernelLaunched, SpanEnded


def test_union_counts_overlap_once() -> None:
    assert union([]) == 0
    assert union([(5, 9), (0, 3)]) == 7
    assert union([(0, 10), (2, 4), (8, 12), (20, 21)]) == 13


def span(step: int, lane: str, begin: int, end: int) -> SpanEnded:
    return SpanEnded(step, "v2", end, "work", lane, begin * 1000, end * 1000)  # type: ignore[arg-type]


def test_costs_are_medians_of_pure_decode_steps_without_waits() -> None:
    observer = StepCostObserver()
    events: list[Event] = [
        InputsPrepared(1, "v2", 0, 2, 40, 40, {}),
        span(1, "host", 0, 900),
        span(1, "compute", 0, 999),
    ]
    for step, host, device in ((2, 10, 50), (3, 20, 70), (4, 90, 60)):
        events += [
            InputsPrepared(step, "v2", 0, 2, 2, 4, {}), span(step, "host", 100, 100 + host),
            span(step, "host", 200, 205), HostWait(step, "v2", 0, "output", 201_000, 204_000, False),
            KernelLaunched(step, "v2", 0, "graph", "triton"),
            span(step, "compute", 300, 300 + device), span(step, "copy", 300, 5000),
        ]  # fmt: skip
    for event in events:
        observer(event)
    host = HostParts(3, {"forward": 7.0}, 1.0, {}, 8.0)
    costs = observer.result(host)
    assert (costs.steps, costs.host, costs.observed_host_us) == (3, host, 20 + 5 - 3)
    assert (costs.device_us, costs.launches) == (60, 1)


def test_no_steady_step_is_an_error() -> None:
    observer = StepCostObserver()
    observer(InputsPrepared(1, "v2", 0, 1, 16, 16, {}))
    with pytest.raises(ValueError, match="longer outputs"):
        observer.result(HostParts(0, {}, 0.0, {}, 0.0))
