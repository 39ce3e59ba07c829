"""Timeline: where the time of each runner went, on the host, the compute stream and the copy stream.

Every bar was measured. The runners ran one after the other, so their clocks are laid over each other at the begin of
the first shown step, and the session's pauses are taken out and marked; nothing else is moved.
timeline_figure.py draws the static twin, static/timeline.js the live view.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import plotly.graph_objects as go

from engine.hooks import SpanEnded

from ..recording import RunnerStep, StepRecord
from ..widget import LiveView
from .timeline_figure import draw

KEPT = 24
"""Steps before the cursor that the live view can move back to."""
SHOWN = 6
"""Steps shown at first, the cursor's the last."""
LANES = ("host", "compute", "copy")
LEAST_BUBBLE = 0.02
"""Milliseconds. Between two kernels of one launch lies a gap that says nothing about the host."""


def view_model(record: StepRecord, kept: int = KEPT, shown: int = SHOWN) -> dict[str, Any]:
    """All that both renderings draw, in plain JSON values; times are milliseconds.

    A bar is `[lane, name, begin, length, step, kind, depth]`: lane is an index into `lanes`; kind is span, wait (the
    host stood still inside the step), fetch (it fetched the output of a step, outside one) or around (a host span that
    was mostly such a wait, which lies over it); depth counts the host spans around a host span. `view` is the stretch
    to show first, `extent` all there is.
    """
    first = max(1, record.step - shown + 1)
    steps = [past for past in record.history.steps if record.step - kept < past.step <= record.step]
    runners = [
        _runner(name, [past.runners[name] for past in steps if name in past.runners], first)
        for name in ("v1", "v2")
        if name in record.runners
    ]
    drawn = [runner for runner in runners if runner["window"]]
    view = [min([0.0, *(r["window"][0] for r in drawn)]), max([1.0, *(r["window"][1] for r in drawn)])]
    extent = [min([view[0], *(r["extent"][0] for r in drawn)]), max([view[1], *(r["extent"][1] for r in drawn)])]
    return {
        "step": record.step, "first": first, "lanes": list(LANES), "runners": runners, "view": view, "extent": extent,
        "note": _note(first, record.step, drawn),
    }  # fmt: skip


def figure(record: StepRecord) -> go.Figure:
    """The static twin: a plotly figure of the last steps."""
    return draw(view_model(record, kept=SHOWN + 2))


class TimelineView(LiveView, static="timeline"):
    """The live view, with zoom and pan."""

    view_model = staticmethod(view_model)


@dataclass(frozen=True, slots=True)
class _Bar:
    """Times in ns of the process's clock."""

    lane: int
    name: str
    begin: int
    end: int
    step: int
    kind: str


class _Clock:
    """ns of the process -> ms from `zero` on, without the pauses."""

    def __init__(self, pauses: Iterable[tuple[int, int]], zero: int) -> None:
        self.pauses = sorted(set(pauses))
        self._begins = [begin for begin, _ in self.pauses]
        self._paused = [0, *accumulate(end - begin for begin, end in self.pauses)]
        self._zero = self._running(zero)

    def _running(self, time_ns: int) -> int:
        begun = bisect_right(self._begins, time_ns)
        still = max(0, self.pauses[begun - 1][1] - time_ns) if begun else 0
        return time_ns - self._paused[begun] + still

    def ms(self, time_ns: int) -> float:
        return round((self._running(time_ns) - self._zero) / 1e6, 3)


def _runner(name: str, steps: Sequence[RunnerStep], first: int) -> dict[str, Any]:
    steps = [done for done in steps if done.events]
    shown = [done for done in steps if done.step >= first]
    result: dict[str, Any] = {"runner": name, "title": name.upper(), "loop": steps[-1].snapshot.loop if steps else ""}
    empty: dict[str, Any] = {
        "bars": [],
        "bubbles": [],
        "steps": [],
        "pauses": [],
        "numbers": {},
        "window": [],
        "extent": [],
    }
    if not shown:
        return result | empty | {"summary": "nothing to do in these steps"}
    bars = _bars(steps)
    clock = _Clock((pause for done in steps for pause in done.pauses), shown[0].begin_ns)
    placed = _placed(bars, clock)
    cuts = [clock.ms(begin) for begin, _ in clock.pauses]
    bubbles = _bubbles(placed, cuts)
    ends = [done.end_ns for done in steps] + [bar.end for bar in bars]
    window = [0.0, clock.ms(max(ends))]
    numbers = _numbers(placed, bubbles, window, len(shown), first)
    return result | {
        "bars": placed, "bubbles": bubbles,
        "steps": [[done.step, clock.ms(done.begin_ns), clock.ms(done.end_ns)] for done in steps],
        "pauses": [[cut, round((end - begin) / 1e6, 1)] for cut, (begin, end) in zip(cuts, clock.pauses, strict=True)],
        "numbers": numbers, "summary": _summary(numbers), "window": window,
        "extent": [min([clock.ms(steps[0].begin_ns), *(bar[2] for bar in placed)]), window[1]],
    }  # fmt: skip


def _bars(steps: Sequence[RunnerStep]) -> list[_Bar]:
    """The measured stretches. An engine counts its own steps; one that idled until a request arrived counts fewer."""
    counted = {done.engine_step: done.step for done in steps}
    bars: list[_Bar] = []
    for done in steps:
        for event in done.measured:
            step = counted.get(event.step, event.step)
            if isinstance(event, SpanEnded):
                bars.append(_Bar(LANES.index(event.lane), event.name, event.begin_ns, event.end_ns, step, "span"))
            else:
                kind = "wait" if event.inside_step else "fetch"
                bars.append(_Bar(0, event.reason, event.begin_ns, event.end_ns, step, kind))
    return bars


def _placed(bars: list[_Bar], clock: _Clock) -> list[list[Any]]:
    """Bars on the clock, in the order in which they are drawn: waits over spans, inner spans over outer ones."""
    placed: list[list[Any]] = []
    open_ends: list[int] = []
    waits = sorted((bar.begin, bar.end) for bar in bars if bar.kind != "span")
    for bar in sorted(bars, key=lambda bar: (bar.kind != "span", bar.lane, bar.begin, -bar.end)):
        depth, kind = 0, bar.kind
        if bar.kind == "span" and bar.lane == 0:
            within = waits[bisect_left(waits, (bar.begin,)) : bisect_right(waits, (bar.end,))]
            kind = "around" if sum(end - begin for begin, end in within) * 2 > bar.end - bar.begin else "span"
            while open_ends and open_ends[-1] <= bar.begin:
                open_ends.pop()
            depth = len(open_ends)
            open_ends.append(bar.end)
        begin = clock.ms(bar.begin)
        length = round(clock.ms(bar.end) - begin, 3)
        placed.append([bar.lane, bar.name, begin, length, bar.step, kind, depth])
    return placed


def _bubbles(bars: list[list[Any]], cuts: list[float]) -> list[list[float]]:
    """`[begin, length]` of each gap between two spans of the compute stream, with no pause of the session in it."""
    spans = sorted((begin, begin + length) for lane, _, begin, length, *_ in bars if lane == 1)
    gaps: list[list[float]] = []
    reached = spans[0][1] if spans else 0.0
    for begin, end in spans[1:]:
        if begin - reached > LEAST_BUBBLE and not any(reached <= cut <= begin for cut in cuts):
            gaps.append([round(reached, 3), round(begin - reached, 3)])
        reached = max(reached, end)
    return gaps


def _numbers(
    bars: list[list[Any]], bubbles: list[list[float]], window: list[float], steps: int, first: int
) -> dict[str, float]:
    """Sums over the window, a step where the name says so."""
    length = window[1] - window[0]
    waits = [bar for bar in bars if bar[5] == "wait" and bar[4] >= first]
    return {
        "steps": steps,
        "ms": round(length, 3),
        "ms_per_step": round(length / steps, 3),
        "device_busy": round(_covered(((b[2], b[2] + b[3]) for b in bars if b[0] == 1), window) / length, 4)
        if length
        else 0.0,
        "waits_per_step": round(len(waits) / steps, 2),
        "wait_ms_per_step": round(sum(bar[3] for bar in waits) / steps, 3),
        "bubble_ms_per_step": round(_covered(((b, b + n) for b, n in bubbles), window) / steps, 3),
    }


def _covered(stretches: Iterable[tuple[float, float]], window: list[float]) -> float:
    """How much of the window the stretches cover together."""
    total, reached = 0.0, window[0]
    for begin, end in sorted(stretches):
        end = min(end, window[1])
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def _summary(numbers: dict[str, float]) -> str:
    waits = numbers["waits_per_step"]
    waited = f"{waits:g} host wait{'' if waits == 1 else 's'} a step, {numbers['wait_ms_per_step']:.1f} ms"
    parts = [
        f"{numbers['ms_per_step']:.1f} ms a step",
        f"device busy {numbers['device_busy']:.0%}",
        waited if waits else "no host wait inside a step",
    ]
    if numbers["bubble_ms_per_step"] >= 0.05:
        parts.append(f"bubbles {numbers['bubble_ms_per_step']:.1f} ms a step")
    return " · ".join(parts)


def _note(first: int, last: int, runners: list[dict[str, Any]]) -> str:
    if last == 0:
        return "nothing ran yet"
    steps = f"step {last}" if first == last else f"steps {first} to {last}"
    took = ", ".join(f"{runner['title']} {runner['numbers']['ms']:.1f} ms" for runner in runners)
    return f"{steps}: {took}; measured, pauses taken out" if took else f"{steps}: nothing ran"
