"""The sampling view: it says the truth of a draw, its twins agree, and a step pays only while it is watched."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine import SamplingParams
from engine.hooks import SamplingTraced
from tests.workbench.drawn import BIASED, FUSED, make_drawn_record, make_drawn_recording, make_trace, softmax
from tests.workbench.records import make_record
from tests.workbench.sessions import prompt, tiny_session
from tests.workbench.vocabulary import EVIL, PIECES
from workbench import Dashboard, Recording, SamplingView
from workbench.recording import StepRecord
from workbench.views.sampling import CLOSED, WINDOW, figure, traced, view_model
from workbench.views.sampling_panel import ROWS

pytestmark = pytest.mark.slow

RECORD = make_drawn_record(runners=("v1", "v2"), steps=6)
RANDOM = SamplingParams(temperature=0.8, seed=3, top_p=0.9, max_tokens=6, ignore_eos=True)


def panel(record: StepRecord = RECORD, **chosen: Any) -> dict[str, Any]:
    (only,) = view_model(record, **chosen)["panels"]
    return only


def share(text: str) -> float:
    return float(text.removeprefix("<").removesuffix(" %")) / 100


def test_a_line_tells_a_tokens_probability_behind_every_stage() -> None:
    position = max(traced(RECORD)["A"])
    trace = traced(RECORD)["A"][position]["v2"]
    shown = panel()
    assert [stage["names"] for stage in shown["stages"]] == [["model"], ["logit_bias"], ["temperature"], ["top_k"]]
    assert shown["more"] == "without effect on this row: penalties"
    assert len(shown["lines"]) == ROWS
    columns = [stage for stage in trace.stages if stage.stage != ("penalties",)]
    by_model = sorted(range(len(PIECES)), key=lambda t: -float(trace.stages[0].logits[t] or 0))
    tokens = [int(line["t"].removeprefix("token ")) for line in shown["lines"]]
    assert tokens == [t for t in by_model if t in tokens] and {trace.sampled, BIASED} <= set(tokens)
    for token, line in zip(tokens, shown["lines"], strict=True):
        assert line["win"] == (["V1", "V2"] if token == trace.sampled else [])
        for stage, cell in zip(columns, line["cells"], strict=True):
            logits = [-math.inf if x is None else x for x in stage.logits]
            if logits[token] == -math.inf:
                assert (cell["k"], cell["w"]) == ("cut", 0)
            else:
                assert cell["w"] == pytest.approx(softmax(logits)[token], abs=1e-4)
                assert share(cell["p"]) == pytest.approx(cell["w"], abs=6e-4)
        assert line["cells"][1]["d"] == ("+1.50" if token == BIASED else "")
        assert line["cells"][2]["d"] == "", "the temperature changes every logit"
        logprob = math.log(softmax([float(x or 0) for x in trace.stages[0].logits])[token])
        assert float(line["logprob"][0].replace("−", "-")) == pytest.approx(logprob, abs=6e-3)
        assert line["logprob"][1] == (str(by_model.index(token) + 1) if token in by_model[:10] else "> 10")


def test_a_head_tells_the_mass_that_its_stage_cut() -> None:
    *kept, last = panel()["stages"]
    assert all(stage["say"] == "" and stage["cut"] == 0 for stage in kept)
    trace = next(iter(traced(RECORD)["A"].values()))["v2"]
    last = panel(request_id="A", position=min(traced(RECORD)["A"]))["stages"][-1]
    assert last["left"] == "8 left"
    assert last["cut"] == pytest.approx(1 - trace.stages[-1].mass_left, abs=1e-4)
    assert share(last["say"].removeprefix("cuts ")) == pytest.approx(last["cut"], abs=6e-4)


def test_the_race_is_won_by_the_largest_sum_and_each_runner_has_its_own_noise() -> None:
    shown = panel()
    assert shown["races"] == [["V1", "○ logit  ● with noise"], ["V2", "○ logit  ● with noise"]]
    for place in range(2):
        running = [(line["races"][place], line["win"]) for line in shown["lines"] if line["races"][place]]
        best = max(running, key=lambda pair: pair[0]["b"])
        assert best[0]["win"] and best[1]
        assert sum(race["win"] for race, _ in running) == 1
        assert all(0 <= race[end] <= 1 for race, _ in running for end in "ab")
    noises = [[race["n"] for race in line["races"]] for line in shown["lines"] if all(line["races"])]
    assert any(a != b for a, b in noises)
    assert re.match(r"V1 divides .*“.+” wins with a chance of \d", shown["say"][0])
    assert re.match(r"V2 adds Gumbel noise, .* the position \d+ alone", shown["say"][1])


def test_runners_with_other_logits_have_a_panel_each() -> None:
    record = with_trace(RECORD, "v1", make_trace("v1", 5, seed=99))
    first, second = view_model(record)["panels"]
    assert (first["title"], second["title"]) == ("V1", "V2")
    assert second["stages"][1]["names"] == list(FUSED) and len(second["lines"][0]["races"]) == 1


def test_rounding_is_no_difference() -> None:
    trace = traced(RECORD)["A"][max(traced(RECORD)["A"])]["v1"]
    stages = tuple(
        replace(stage, logits=tuple(x if x is None else x + 1e-4 for x in stage.logits)) for stage in trace.stages
    )
    assert panel(with_trace(RECORD, "v1", replace(trace, stages=stages)))["title"] == "V1 and V2"


def test_a_greedy_draw_has_no_noise() -> None:
    shown = panel(make_drawn_record(greedy=True))
    assert [stage["names"] for stage in shown["stages"]] == [["model"]]
    assert shown["races"] == [["V1", "● logit"], ["V2", "● logit"]]
    assert all(race["n"] == "" and race["a"] == race["b"] for line in shown["lines"] for race in line["races"])
    assert "is greedy" in shown["say"][0]


def test_where_the_runners_part_is_marked_once() -> None:
    position = sorted(traced(RECORD)["A"])[1]
    record = with_trace(RECORD, "v1", make_trace("v1", 5, seed=99), position)
    model = view_model(record)
    assert [token["at"] for token in model["tokens"] if token["differs"]] == [position]
    assert model["note"].endswith(f"; V1 and V2 part at position {position}")


def test_the_chosen_token_and_those_around_it() -> None:
    record = make_drawn_record(runners=("v2",), requests=1, steps=90, max_tokens=99, blocks=128)
    places = sorted(traced(record)["A"])
    assert len(places) > 2 * WINDOW
    newest = view_model(record)
    assert [token["at"] for token in newest["tokens"]] == places[-WINDOW:] and not newest["pinned"]
    middle = view_model(record, "A", places[WINDOW])
    assert len(middle["tokens"]) == WINDOW and middle["pinned"]
    assert [token["at"] for token in middle["tokens"] if token["chosen"]] == [places[WINDOW]]
    assert "".join(middle["before"]).startswith("…")
    assert "".join(view_model(record, "A", places[0])["before"]) == record.prompts["A"]


def test_it_shows_only_what_has_happened_by_then() -> None:
    recording = make_drawn_recording(runners=("v2",), steps=6)
    counts = [len(traced(record).get("A", {})) for record in recording.steps]
    assert counts == sorted(counts) and counts[0] < counts[-1]


def test_what_is_not_there_is_said() -> None:
    assert view_model(make_record()) == CLOSED
    with pytest.raises(ValueError, match="trace_sampling=True"):
        figure(make_record())
    with pytest.raises(ValueError, match="no draw of request 'Z' is traced here; traced are A, B"):
        figure(RECORD, "Z")
    with pytest.raises(ValueError, match=r"no draw at position 2 of request A: traced are \d+ to \d+"):
        figure(RECORD, "A", 2)


def test_the_static_twin_has_every_word_of_the_model_and_no_markup_of_a_token() -> None:
    position = next(
        at for at, runners in traced(RECORD)["A"].items() if EVIL in {PIECES[t] for t in runners["v2"].token_ids}
    )
    model = view_model(RECORD, "A", position)
    page = figure(RECORD, "A", position)._repr_html_()
    assert "<img" not in page and "&lt;img" in page
    words = re.sub(r"<[^>]+>", "", page)
    for unescaped, escaped in (("&lt;", "<"), ("&gt;", ">"), ("&#x27;", "'"), ("&quot;", '"'), ("&amp;", "&")):
        words = words.replace(unescaped, escaped)
    (shown,) = model["panels"]
    cells = [text for line in shown["lines"] for cell in line["cells"] for text in (cell["p"], cell["x"], cell["d"])]
    heads = [text for stage in shown["stages"] for text in (*stage["names"], stage["left"], stage["say"])]
    races = [race[key] for line in shown["lines"] for race in line["races"] if race for key in "ns"]
    names = ["".join(line["p"]) for line in shown["lines"]]
    logprobs = [text for line in shown["lines"] for text in line["logprob"]]
    for text in (*cells, *heads, *races, *names, *logprobs, *shown["say"], shown["more"], model["note"]):
        assert text in words
    assert repr(figure(RECORD, "A", position)) == f"<sampling of request A, position {position}>"


# -- sessions and the live view


def test_a_session_traces_when_asked_and_the_recording_keeps_it(tmp_path: Path) -> None:
    session = tiny_session([prompt(1, 9), prompt(2, 5)], sampling_params=RANDOM, trace_sampling=True)
    record = session.run_until("end")
    draws = traced(record)
    assert {r: len(own) for r, own in draws.items()} == {"A": 6, "B": 6}
    for position, runners in draws["A"].items():
        model = view_model(record, "A", position)
        json.dumps(model, allow_nan=False)
        for name, trace in runners.items():
            ids = record.runners[name].snapshot.requests[0]
            assert trace.sampled == (*ids.prompt_token_ids, *ids.output_token_ids)[position]
    session.reset(trace_sampling=False)
    assert not traced(session.run_until("end"))
    session.reset(trace_sampling=True)
    record = session.run_until("end")
    loaded = Recording.load(session.recording.save(tmp_path / "run.json.gz"))
    assert view_model(loaded.steps[-1]) == view_model(record)


def test_a_step_is_traced_only_while_the_view_is_open() -> None:
    dash = Dashboard(tiny_session([prompt(1, 9)], sampling_params=RANDOM))
    view = dash.views["sampling"]
    assert isinstance(view, SamplingView)

    def wanted() -> set[bool]:
        return {SamplingTraced in dash.session.llm(name).hooks.wanted for name in dash.session.runners}

    dash.run(3)
    assert wanted() == {False} and not view.watching and view.model == CLOSED and not dash.session.trace_sampling
    view.watching = True
    assert wanted() == {True} and view.model["note"].startswith("no draw is traced yet")
    dash.run(2)
    assert [token["chosen"] for token in view.model["tokens"]][-1]
    dash.reset(prompts=[prompt(2, 5)])
    assert wanted() == {True}, "a new session is watched too"
    dash.run(2)
    view.watching = False
    assert wanted() == {False} and view.model == CLOSED
    dash.step()
    assert view.model == CLOSED
    dash.close()


def test_a_choice_that_is_no_longer_there_gives_way() -> None:
    recording = make_drawn_recording(steps=6)
    last, position = recording.steps[-1], min(traced(recording.steps[-1])["B"])
    view = SamplingView(last)
    view.position = min(traced(last)["A"])
    assert view.model == view_model(last, "A", min(traced(last)["A"])), "the first request need not be named"
    view.request, view.position = "B", position
    assert view.model == view_model(last, "B", position)
    view.position = -1
    assert view.model == view_model(last, "B")
    view.position = 10_000
    assert view.model == view_model(last, "B")
    view.request = "Z"
    assert view.model == view_model(last)
    view.show(make_record(steps=0))
    assert view.model["panels"] == [] and view.model["open"]


def with_trace(record: StepRecord, runner: str, trace: Any, position: int | None = None) -> StepRecord:
    """`record` in which this runner drew A's token at `position` (the newest) so."""
    position = max(traced(record)["A"]) if position is None else position
    history = Recording(token_text=dict(record.token_text), prompts=dict(record.prompts), colors=dict(record.colors))
    for step in record.history.steps:
        done = step.runners[runner]
        events = tuple(
            replace(event, trace=trace)
            if isinstance(event, SamplingTraced) and (event.request_id, event.position) == ("A", position)
            else event
            for event in done.events
        )
        history.append({**step.runners, runner: replace(done, events=events)})
    return history.steps[-1]
