"""The acceptance view: it says the truth of each draft, its twins agree, and a step pays only while it is watched."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import Any

import pytest

from engine import SamplingParams
from engine.hooks import DRAFT_EVENTS
from tests.engine.dspark.golden import HEADS, ROOT, golden
from tests.workbench.drafted import MAX_DRAFTS, make_drafted_record, make_drafted_recording
from tests.workbench.pictures import pictures
from tests.workbench.records import make_record
from tests.workbench.sessions import prompt, tiny_session
from tests.workbench.vocabulary import EVIL, PIECES
from workbench import AcceptanceView, Dashboard, Recording
from workbench.recording import StepRecord
from workbench.views.acceptance import BLOCKS, CLOSED, HELP, figure, reliability_figure, traced, view_model
from workbench.views.acceptance_figure import OUTCOMES
from workbench.views.acceptance_numbers import COLUMNS, Round, by_position, over_time

pytestmark = pytest.mark.slow

LONG: dict[str, Any] = {"runners": ("v1", "v2"), "requests": 3, "steps": 40, "max_tokens": 30, "blocks": 128}
RECORD = make_drafted_record(**LONG)
ROUNDS = traced(RECORD)["v2"]
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
FEW = SamplingParams(temperature=0.0, allowed_token_ids=[5, 6, 7], max_tokens=14, ignore_eos=True)


def panel(runner: str = "v2", record: StepRecord = RECORD, **chosen: Any) -> dict[str, Any]:
    return next(p for p in view_model(record, **chosen)["panels"] if p["title"] == runner.upper())


def words_of(page: str) -> str:
    return html.unescape(re.sub(r"<[^>]+>", "", page))


def test_a_block_tells_each_token_its_numbers_and_its_outcome() -> None:
    own = [one for one in ROUNDS if one.proposed.request_id == "A"]
    assert len(own) > BLOCKS
    shown = panel(request_id="A")
    assert shown["more"] == f"{len(own) - BLOCKS} earlier" and len(shown["blocks"]) == BLOCKS
    kinds = set()
    for one, block in zip(own[-BLOCKS:], shown["blocks"], strict=True):
        proposed, verified, *drafts = one.proposed, one.verified, *block["cells"][:-1]
        assert (block["at"], block["n"]) == (proposed.position, f"{verified.num_accepted} of {len(drafts)}")
        for k, cell in enumerate(drafts):
            kinds.add(cell["k"])
            stands = verified.uniforms[k] * proposed.draft_probs[k] < verified.target_probs[k]
            behind = any(other["k"] != "accepted" for other in drafts[:k])
            assert cell["k"] == ("dropped" if behind else "accepted" if stands else "rejected")
            values = {name: float(text.replace("<", "")) for name, text in cell["v"]}
            exact = {"p": verified.target_probs[k], "q": proposed.draft_probs[k], "u": verified.uniforms[k]}
            assert values == pytest.approx(exact, abs=0.0051)
            assert f"token {proposed.token_ids[k]} at position {proposed.position + k}" in cell["t"]
        last = block["cells"][-1]
        whole = verified.num_accepted == len(drafts)
        assert (last["k"], last["v"]) == ("bonus" if whole else "corrected", [])
        assert f"token {verified.next_token_id} at position {proposed.position + verified.num_accepted}" in last["t"]
        kinds.add(last["k"])
    assert kinds == set(HELP) == set(OUTCOMES), "the case is meant to have every outcome"


def test_acceptance_by_position_counts_what_was_reached() -> None:
    assert [one["k"] for one in by_position(ROUNDS)] == [*range(1, MAX_DRAFTS + 1)]
    for one in by_position(ROUNDS):
        k = one["k"]
        enough = [r for r in ROUNDS if r.num_drafts >= k]
        reached = [r for r in enough if r.verified.num_accepted >= k - 1]
        stand = [r for r in enough if r.verified.num_accepted >= k]
        assert one["of"] == [len(stand), len(reached), len(enough)]
        assert one["c"] == pytest.approx(len(stand) / len(reached), abs=1e-4)
        assert one["a"] == pytest.approx(len(stand) / len(enough), abs=1e-4)
    never = [r for r in ROUNDS if r.num_drafts >= 2 and r.verified.num_accepted == 0]
    assert by_position(never)[1]["c"] is None and by_position(never)[1]["a"] == 0
    assert by_position([]) == []


def test_accepted_lengths_over_time_count_every_block_once() -> None:
    found = over_time(ROUNDS)
    assert len(found["steps"]) <= COLUMNS and found["steps"][-1][1] == ROUNDS[-1].step
    assert [row[0] for row in found["rows"]] == [*reversed(range(MAX_DRAFTS + 1))]
    for length, counts in found["rows"]:
        for (first, last), count in zip(found["steps"], counts[:-1], strict=True):
            assert count == sum(first <= r.step <= last and r.verified.num_accepted == length for r in ROUNDS)
    assert sum(counts[-1] for _, counts in found["rows"]) == found["totals"][-1] == len(ROUNDS)
    assert over_time(ROUNDS[:1])["steps"] == [[ROUNDS[0].step] * 2]


def test_confidences_stand_in_the_blocks_and_in_a_diagram() -> None:
    assert panel()["reliability"] is None and pictures(figure(RECORD)._repr_html_()) == []
    shown = panel(record=make_drafted_record(confident=True, **LONG))
    assert {name for block in shown["blocks"] for cell in block["cells"] for name, _ in cell["v"]} == set("pquc")
    assert [stage["name"] for stage in shown["reliability"]["stages"]] == ["as the head says it"]


def test_the_diagrams_can_stand_alone() -> None:
    record = make_drafted_record(confident=True, calibrated=True, **{**LONG, "runners": ("v2",)})
    alone, whole = reliability_figure(record)._repr_html_(), figure(record)._repr_html_()
    assert len(pictures(alone)) == 2 and pictures(alone) == pictures(whole)
    with pytest.raises(ValueError, match="no drafts with confidences are traced here"):
        reliability_figure(RECORD)


def test_synthetic_acceptance_is_marked_in_both_twins() -> None:
    record = make_drafted_record(method="synthetic", **LONG)
    assert all(p["synthetic"].startswith("synthetic: ") for p in view_model(record)["panels"])
    page = words_of(figure(record)._repr_html_())
    assert page.count("these numbers say nothing about the drafter") == 2 and "synthetic rejection" in page
    assert panel()["synthetic"] == "" and "synthetic" not in figure(RECORD)._repr_html_()


def test_it_shows_only_what_has_happened_by_then_and_only_runners_with_drafts() -> None:
    recording = make_drafted_recording(runners=("v2",), steps=6)
    counts = [len(traced(record)["v2"]) for record in recording.steps]
    assert counts == sorted(counts) and counts[0] < counts[-1]
    assert [p["title"] for p in view_model(RECORD)["panels"]] == ["V1", "V2"]
    assert [p["title"] for p in view_model(recording.steps[-1])["panels"]] == ["V2"]


def test_what_is_not_there_is_said() -> None:
    assert view_model(make_record()) == CLOSED
    with pytest.raises(ValueError, match="trace_drafts=True and a speculative_config"):
        figure(make_record())
    with pytest.raises(ValueError, match="no drafts of request 'Z' are traced here; traced are A, B"):
        figure(RECORD, "Z")


def test_the_static_twin_has_every_word_of_the_model_and_no_markup_of_a_token() -> None:
    record = make_drafted_record(confident=True, calibrated=True, **LONG)
    names = [r for r, _, _ in view_model(record)["requests"]]
    evil = PIECES.index(EVIL)
    request = next(
        r for r in names if any(EVIL in "".join(c["p"]) for p in view_model(record, r)["panels"] for b in p["blocks"]
        for c in b["cells"])
    )  # fmt: skip
    model, page = view_model(record, request), figure(record, request)._repr_html_()
    assert evil and EVIL not in page and "&lt;img src=x" in page
    words = words_of(page)
    for one in model["panels"]:
        for block in one["blocks"]:
            for cell in block["cells"]:
                for text in ("".join(cell["p"]), *(f"{name} {value}" for name, value in cell["v"])):
                    assert text in words
        for line in one["positions"]:
            assert " / ".join(map(str, line["of"])) in words
        found = one["reliability"]
        cells = [text for row in (found["head"], *found["rows"]) for text in row]
        errors = [f"{stage['name']}: ECE {stage['ece']:.3f}" for stage in found["stages"]]
        for text in (one["say"], one["rule"], one["more"], found["say"], found["note"], *cells, *errors):
            assert text in words
    stages = [stage for one in model["panels"] for stage in one["reliability"]["stages"]]
    drawn = pictures(page)
    assert [one.count("<circle") for one in drawn] == [len(stage["points"]) for stage in stages]
    assert len(drawn) == 4 and "<svg" not in page
    assert repr(figure(record, request)).startswith(f"<acceptance of request {request}")


# -- sessions and the live view


def test_a_session_traces_when_asked_and_the_recording_keeps_it(tmp_path: Path) -> None:
    keywords: dict[str, Any] = {"speculative_config": NGRAM, "async_scheduling": False, "sampling_params": FEW}
    session = tiny_session([prompt(1, 9), prompt(2, 5)], trace_drafts=True, **keywords)
    record = session.run_until("end")
    rounds: dict[str, list[Round]] = traced(record)
    for name, own in rounds.items():
        assert sum(one.verified.num_accepted for one in own) > 0
        for one in own:
            view = next(v for v in record.runners[name].snapshot.requests if v.request_id == one.proposed.request_id)
            text = (*view.prompt_token_ids, *view.output_token_ids)
            stand = (*one.proposed.token_ids[: one.verified.num_accepted], one.verified.next_token_id)
            came = text[one.proposed.position : one.proposed.position + len(stand)]
            assert came and came == stand[: len(came)]
            assert set(one.proposed.token_ids) <= record.token_text.keys()
    assert set(rounds) == {"v1", "v2"}
    json.dumps(view_model(record), allow_nan=False)
    session.reset(trace_drafts=False)
    assert not any(traced(session.run_until("end")).values())
    session.reset(trace_drafts=True)
    record = session.run_until("end")
    loaded = Recording.load(session.recording.save(tmp_path / "run.json.gz"))
    assert view_model(loaded.steps[-1]) == view_model(record) != CLOSED


def test_a_trained_drafters_confidences_reach_the_diagram() -> None:
    head = HEADS[0]
    with_confidences: dict[str, Any] = {
        "model": str(ROOT / head / "target"),
        "load_format": "auto",
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "max_num_batched_tokens": 64,
        "speculative_config": {"method": "dspark", "model": str(ROOT / head / "draft")},
        "sampling_params": SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True),
    }
    ids = golden(head).values["prompt"].tolist()
    session = tiny_session([{"prompt_token_ids": ids}], runners="v2", trace_drafts=True, **with_confidences)
    (shown,) = view_model(session.run_until("end"))["panels"]
    drafts = [cell for block in shown["blocks"] for cell in block["cells"] if cell["v"]]
    assert drafts and all([name for name, _ in cell["v"]] == ["p", "q", "u", "c"] for cell in drafts)
    (stage,) = shown["reliability"]["stages"]
    assert sum(stage["bars"]) == sum(one["of"][2] for one in shown["positions"])


def test_a_step_is_traced_only_while_the_view_is_open() -> None:
    keywords: dict[str, Any] = {"speculative_config": NGRAM, "async_scheduling": False, "sampling_params": FEW}
    dash = Dashboard(tiny_session([prompt(1, 9)], **keywords))
    view = dash.views["acceptance"]
    assert isinstance(view, AcceptanceView)

    def wanted() -> set[bool]:
        return {dash.session.llm(name).hooks.wants(DRAFT_EVENTS) for name in dash.session.runners}

    dash.run(3)
    assert wanted() == {False} and not view.watching and view.model == CLOSED and not dash.session.trace_drafts
    view.watching = True
    assert wanted() == {True} and view.model["note"].startswith("no drafts are traced yet")
    dash.run(5)
    assert [p["title"] for p in view.model["panels"]] == ["V1", "V2"]
    dash.reset(prompts=[prompt(2, 5)])
    assert wanted() == {True}, "a new session is watched too"
    dash.run(4)
    view.watching = False
    assert wanted() == {False} and view.model == CLOSED
    dash.step()
    assert view.model == CLOSED
    dash.close()


def test_a_choice_that_is_no_longer_there_gives_way() -> None:
    view = AcceptanceView(RECORD)
    assert view.model == view_model(RECORD, "A")
    view.request = "B"
    assert view.model == view_model(RECORD, "B") != view_model(RECORD, "A")
    view.request = "Z"
    assert view.model == view_model(RECORD)
    view.show(make_record(steps=0))
    assert view.model["panels"] == [] and view.model["open"]
