"""The timeline: what was measured is where it is drawn, and the sums are right."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import Any

import plotly.graph_objects as go
import pytest

from engine.hooks import Event, HostWait, SpanEnded
from tests.workbench.records import make_record, make_recording, with_events
from tests.workbench.vocabulary import EVIL
from workbench.recording import Recording, RunnerStep, StepRecord
from workbench.views.timeline import TimelineView, figure, view_model

MS = 1_000_000


def runner(model: dict[str, Any], name: str) -> dict[str, Any]:
    return next(runner for runner in model["runners"] if runner["runner"] == name)


def handmade(*steps: tuple[float, float, list[Event], tuple[tuple[float, float], ...]]) -> StepRecord:
    """A V1 run of steps given as (begin ms, end ms, events, pauses in ms)."""
    recording = Recording()
    snapshot = make_record(steps=1).runners["v1"].snapshot
    for number, (begin, end, events, pauses) in enumerate(steps, start=1):
        stretches = tuple((int(a * MS), int(b * MS)) for a, b in pauses)
        done = RunnerStep(
            "v1", number, snapshot, snapshot, tuple(events), "output", int(begin * MS), int(end * MS), stretches
        )
        recording.append({"v1": done})
    return recording.steps[-1]


def span(step: int, lane: Any, begin: float, end: float, name: str = "x") -> SpanEnded:
    return SpanEnded(step, "v1", int(end * MS), name, lane, int(begin * MS), int(end * MS))


def wait(step: int, begin: float, end: float, inside: bool = True) -> HostWait:
    return HostWait(step, "v1", int(end * MS), "tokens", int(begin * MS), int(end * MS), inside)


def test_a_run_without_pauses_keeps_every_distance() -> None:
    record = handmade(
        (100, 110, [span(1, "host", 100, 102), span(1, "compute", 102, 107), wait(1, 103, 107)], ()),
        (112, 120, [span(2, "compute", 114, 119)], ()),
    )
    v1 = runner(view_model(record), "v1")
    assert [bar[:6] for bar in v1["bars"]] == [
        [0, "x", 0.0, 2.0, 1, "span"], [1, "x", 2.0, 5.0, 1, "span"], [1, "x", 14.0, 5.0, 2, "span"],
        [0, "tokens", 3.0, 4.0, 1, "wait"],
    ]  # fmt: skip
    assert v1["steps"] == [[1, 0.0, 10.0], [2, 12.0, 20.0]]
    assert v1["bubbles"] == [[7.0, 7.0]]
    assert v1["numbers"] == {
        "steps": 2, "ms": 20.0, "ms_per_step": 10.0, "device_busy": 0.5, "waits_per_step": 0.5, "wait_ms_per_step": 2.0,
        "bubble_ms_per_step": 3.5,
    }  # fmt: skip


def test_a_pause_is_taken_out_and_marked_and_is_no_bubble() -> None:
    record = handmade(
        (100, 110, [span(1, "compute", 102, 107)], ()),
        (5000, 5010, [span(2, "compute", 5002, 5007), span(2, "compute", 5008, 5010)], ((110, 5000),)),
    )
    v1 = runner(view_model(record), "v1")
    assert v1["steps"] == [[1, 0.0, 10.0], [2, 10.0, 20.0]]
    assert v1["pauses"] == [[10.0, 4890.0]]
    assert [bar[2] for bar in v1["bars"]] == [2.0, 12.0, 18.0]
    assert v1["bubbles"] == [[17.0, 1.0]]
    assert v1["numbers"]["ms"] == 20.0


def test_device_work_that_runs_into_the_next_step_keeps_its_own_step() -> None:
    record = handmade(
        (0, 4, [span(1, "host", 0, 2)], ()),
        (
            4,
            9,
            [span(1, "compute", 2, 8), span(2, "host", 4, 6), wait(1, 6, 8, inside=False), span(2, "compute", 8, 14)],
            (),
        ),
    )
    v1 = runner(view_model(record), "v1")
    assert [(bar[4], bar[5]) for bar in v1["bars"] if bar[0] == 1 or bar[5] != "span"] == [
        (1, "span"),
        (2, "span"),
        (1, "fetch"),
    ]
    assert v1["bubbles"] == []
    assert v1["window"] == [0.0, 14.0]
    assert v1["numbers"]["waits_per_step"] == 0
    assert "no host wait inside a step" in v1["summary"]


def test_a_runner_that_idled_at_first_counts_its_steps_as_the_session_does() -> None:
    record = handmade(
        (0, 1, [], ()),
        (1, 4, [span(1, "host", 1, 2)], ()),
        (4, 9, [span(1, "compute", 2, 5), span(2, "host", 4, 6)], ()),
    )
    assert [(bar[0], bar[4]) for bar in runner(view_model(record), "v1")["bars"]] == [(0, 2), (0, 3), (1, 2)]


def test_inner_host_spans_know_their_depth() -> None:
    record = handmade(
        (0, 10, [span(1, "host", 1, 3), span(1, "host", 0, 8), span(1, "host", 8, 9), span(1, "host", 2, 3)], ())
    )
    assert [(bar[2], bar[6]) for bar in runner(view_model(record), "v1")["bars"]] == [
        (0.0, 0),
        (1.0, 1),
        (2.0, 2),
        (8.0, 0),
    ]


def test_a_host_span_that_is_mostly_a_wait_stands_behind_it() -> None:
    record = handmade(
        (0, 10, [span(1, "host", 0, 2), span(1, "host", 2, 9), wait(1, 2.5, 8.5), span(1, "compute", 1, 8)], ())
    )
    assert [bar[5] for bar in runner(view_model(record), "v1")["bars"]] == ["span", "around", "span", "wait"]
    texts = {text for trace in figure(record).data if trace.name == "host" for text in trace.text}
    assert texts == {"x", ""}


def test_overlapping_spans_are_busy_time_once() -> None:
    record = handmade((0, 10, [span(1, "compute", 0, 6), span(1, "compute", 4, 5), span(1, "compute", 6.01, 8)], ()))
    v1 = runner(view_model(record), "v1")
    assert v1["numbers"]["device_busy"] == pytest.approx(0.799, abs=1e-3)
    assert v1["bubbles"] == [], "ten microseconds between two kernels are no bubble"


def test_both_runners_begin_at_zero_and_the_window_holds_both() -> None:
    model = view_model(make_record(steps=9))
    assert model["first"] == 4
    for name in ("v1", "v2"):
        begins = {step: begin for step, begin, _ in runner(model, name)["steps"]}
        assert begins[4] == 0.0
        assert begins[3] < 0 < begins[5]
    assert model["view"][1] == max(r["window"][1] for r in model["runners"])
    assert model["extent"][0] < model["view"][0] == 0.0
    v1, v2 = (runner(model, name)["numbers"] for name in ("v1", "v2"))
    assert (v1["waits_per_step"], v2["waits_per_step"]) == (1, 0)
    assert v2["device_busy"] > v1["device_busy"]


def test_only_the_steps_kept_are_sent_and_the_twins_say_the_same() -> None:
    record = make_record(steps=40, max_tokens=60)
    model = view_model(record)
    assert min(step for step, *_ in runner(model, "v1")["steps"]) == 17
    few = view_model(record, kept=8)
    assert runner(few, "v1")["summary"] == runner(model, "v1")["summary"]
    assert len(json.dumps(model)) < 60_000


def test_a_runner_that_has_nothing_left_to_do_says_so() -> None:
    record = make_record(steps=3)
    idle = replace(record.runners["v2"], events=(), begin_ns=0, end_ns=0)
    recording = Recording()
    record = recording.append({"v1": record.runners["v1"], "v2": idle})
    v2 = runner(view_model(record), "v2")
    assert v2["summary"] == "nothing to do in these steps"
    assert v2["bars"] == []
    assert len(figure(record).data) > 0


def test_before_the_first_step_there_is_an_empty_timeline() -> None:
    record = make_record(steps=1)
    start = {name: replace(done, snapshot=done.before, events=()) for name, done in record.runners.items()}
    record = replace(record, step=0, runners=start, history=Recording())
    assert view_model(record)["note"] == "nothing ran yet"
    assert list(figure(record).data) == []


def test_the_static_twin_draws_each_bar_once_where_the_model_has_it() -> None:
    record = make_record(steps=6)
    model, chart = view_model(record), figure(record)
    assert isinstance(chart, go.Figure)
    drawn = sorted(
        (round(base, 3), round(x, 3)) for trace in chart.data for base, x in zip(trace.base, trace.x, strict=True)
    )
    expected = [(bar[2], bar[3]) for r in model["runners"] for bar in r["bars"]] + [
        tuple(gap) for r in model["runners"] for gap in r["bubbles"]
    ]
    assert drawn == sorted(expected)
    names = {trace.name for trace in chart.data}
    assert {"host", "compute", "copy", "host waits, inside the step", "bubble: the device idles"} <= names
    assert any("paused" in note.text for note in chart.layout.annotations)
    assert len(chart.to_json()) < 60_000


def test_names_of_spans_are_text() -> None:
    record = make_record(steps=2)
    begin = record.runners["v2"].begin_ns
    evil = SpanEnded(2, "v2", begin + MS, EVIL, "host", begin, begin + MS)
    recording = Recording()
    record = recording.append(with_events(record, "v2", evil).runners)
    shown = figure(record).to_json()
    assert "<img" not in shown and "\\u003cimg" not in shown.lower()
    assert "&lt;img" in shown


def test_a_long_history_is_quick() -> None:
    record = make_record(requests=64, blocks=512, prompt_len=22, budget=640, steps=30, max_tokens=40)
    begin = time.perf_counter()
    json.dumps(view_model(record))
    assert time.perf_counter() - begin < 0.1


def test_the_live_view_follows() -> None:
    recording = make_recording(steps=3)
    view = TimelineView(recording.steps[0])
    view.show(recording.steps[2])
    assert view.model["step"] == 3
    assert repr(view) == "<TimelineView step 3>"
