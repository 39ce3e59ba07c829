"""The budget view: it says what was chosen, expected and came, and its twins agree."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from engine import SamplingParams
from engine.hooks import Sampled, VerificationBudgeted
from tests.engine.dspark.golden import ROOT, golden
from tests.workbench.budgeted import COSTS, NUM_DRAFTS, make_budgeted_record, make_budgeted_recording
from tests.workbench.pictures import pictures
from tests.workbench.records import make_record
from tests.workbench.sessions import prompt, tiny_session
from workbench import BudgetView, Recording
from workbench.views.budget import CLOSED, STEPS, budgeted, figure, step_costs, view_model
from workbench.views.budget_figure import LEGENDS
from workbench.widget import static_text

RECORD = make_budgeted_record(steps=40)
FOUND = list(budgeted(RECORD, "v2"))


def panel(record: Any = RECORD) -> dict[str, Any]:
    (found,) = view_model(record)["panels"]
    return dict(found)


def test_tokens_belong_to_the_step_that_sampled_them() -> None:
    assert [one.step for one in FOUND] == list(range(1, 41))
    events = [event for step in RECORD.history.steps for event in step.runners["v2"].of(Sampled)]
    for one in FOUND[:-1]:
        assert one.came == sum(event.sampled_in_step == one.step for event in events) >= one.event.num_reqs
    assert FOUND[-1].came is None, "in flight"


def test_each_load_has_its_means() -> None:
    shown = panel()
    for row in shown["loads"]["rows"]:
        own = [one for one in FOUND if one.event.num_reqs == int(row[0])]
        known = [one for one in own if one.event.expected_tokens is not None and one.came is not None]
        verified = fmean(one.event.budget for one in own)
        assert row[1:5] == [str(len(own)), str(int(row[0]) * 5), f"{verified:.1f}", f"{verified / int(row[0]):.2f}"]
        assert row[5] == f"{fmean(one.event.expected_tokens or 0 for one in known):.1f}"
        assert row[6] == f"{fmean(one.came or 0 for one in known):.1f}"
    loads = sorted({one.event.num_reqs for one in FOUND})
    assert [row[0] for row in shown["loads"]["rows"]] == [str(load) for load in loads]
    assert [point[0] for point in shown["shares"]["points"]] == loads
    for load, mean, least, most, steps in shown["shares"]["points"]:
        own = [one.event.budget / load for one in FOUND if one.event.num_reqs == load]
        assert (mean, least, most, steps) == pytest.approx((fmean(own), min(own), max(own), len(own)), abs=1e-3)
    assert (shown["shares"]["most"], shown["shares"]["max"]) == (NUM_DRAFTS, loads[-1])


def test_the_newest_steps_say_what_decided() -> None:
    rows = panel()["steps"]["rows"]
    assert [row[0] for row in rows] == [str(step) for step in range(40, 40 - STEPS, -1)]
    for row, one in zip(rows, reversed(FOUND), strict=False):
        event, table = one.event, COSTS[1 if one.event.num_reqs == 1 else 8]
        numbers = (event.num_reqs, event.num_drafts, event.budget)
        assert row[1:4] == [str(n) for n in numbers] and row[4] == f"{event.expected_tokens:.1f}"
        costs = [table(event.num_tokens + n) / 1e3 for n in (0, event.budget, event.num_drafts)]
        assert row[6:] == [f"{cost:.2f}" for cost in costs]
    first = panel(make_budgeted_record(steps=1))["steps"]["rows"]
    assert first[0][4:6] == ["–", "–"], "nothing was known, and nothing has come"


def test_the_curves_are_what_the_engine_divides_by() -> None:
    assert step_costs(RECORD.history.meta["speculation"]) == COSTS
    costs = panel()["costs"]
    (one, stairs), (eight, straight) = costs["curves"]
    assert (one, eight) == (1, 8) and straight == [[8, 2.0], [16, 2.5], [48, 9.0]]
    # Up to the largest captured size a step costs what the next captured one does.
    assert stairs == [[1, 1.0], [1, 1.2], [2, 1.2], [2, 1.9], [4, 1.9], [4, 2.6], [6, 2.6]]
    newest = FOUND[-1].event
    assert costs["chosen"][-1][0] == newest.num_tokens + newest.budget
    assert sum(steps for *_, steps in costs["chosen"]) == len(FOUND)
    assert panel(make_budgeted_record(measured=False))["costs"] is None


def test_a_captured_step_has_no_more_drafts_than_there_are() -> None:
    recording = make_budgeted_recording(steps=2)
    done = recording.steps[-1].runners["v2"]
    events = [e for e in done.events if not isinstance(e, VerificationBudgeted)]
    padded = VerificationBudgeted(2, "v2", 0, 3, 15, 4, 20, 5.0)
    object.__setattr__(done, "events", (*events, padded))
    (*_, last) = budgeted(recording.steps[-1], "v2")
    assert (last.verified, last.event.budget) == (15, 20)


def test_what_is_not_there_is_said() -> None:
    assert view_model(make_record()) == CLOSED
    with pytest.raises(ValueError, match="verification_schedule='budgeted'"):
        figure(make_record())


def test_the_static_twin_has_every_word_and_mark_of_the_model() -> None:
    page = figure(RECORD)._repr_html_()
    words = html.unescape(re.sub(r"<[^>]+>", " ", page))
    shown = panel()
    cells = [text for name in ("loads", "steps") for row in (shown[name]["head"], *shown[name]["rows"]) for text in row]
    for text in (shown["title"], shown["say"], *cells):
        assert text in words
    shares, costs = pictures(page)
    for chart, model in ((shares, shown["shares"]), (costs, shown["costs"])):
        assert re.findall(r"<text[^>]*>([^<]+)</text>", chart) == ["0", model["ends"][1], "0", model["ends"][0]]
    assert shares.count("<circle") == len(shown["shares"]["points"])
    assert costs.count("<circle") == len(shown["costs"]["chosen"])
    assert costs.count("<polyline") == len(shown["costs"]["curves"])
    assert "<svg" not in page, "a notebook that isn't trusted would lose it"
    assert repr(figure(RECORD)) == "<verification budget up to step 40>"


def test_both_twins_say_the_same_of_their_charts() -> None:
    module = static_text("budget.js")
    assert all(f'"{legend}"' in module for legend in LEGENDS.values())


def test_the_live_view_follows_the_record() -> None:
    view = BudgetView(RECORD)
    assert view.model == view_model(RECORD)
    view.show(make_record())
    assert view.model == CLOSED


def golden_session(schedule: str, **more: Any) -> Any:
    sequence, head = golden("vanilla").sequence, ROOT / "vanilla"
    prompts = [
        {"prompt_token_ids": sequence[: 3 + i], "arrive_at_step": 1 + 4 * i, "max_tokens": 12 + i} for i in range(4)
    ]
    spec = {"method": "dspark", "model": str(head / "draft"), "verification_schedule": schedule}
    return tiny_session(
        prompts, runners="v2", model=str(head / "target"), load_format="auto", dtype="float32",
        skip_tokenizer_init=True, max_num_batched_tokens=64, num_gpu_blocks_override=96, speculative_config=spec,
        sampling_params=SamplingParams(temperature=0.0, ignore_eos=True), **more,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("loop", [False, True], ids=["plain", "overlapped"])
def test_a_session_under_a_budget(loop: bool, tmp_path: Path) -> None:
    session = golden_session("budgeted", async_scheduling=loop, trace_drafts=True)
    record = session.run_until("end")
    found = list(budgeted(record, "v2"))
    assert len({one.event.num_reqs for one in found}) > 2, "the case is meant to have several loads"
    for one in found:
        assert one.came is not None and one.event.num_reqs <= one.came <= one.event.num_reqs * (1 + NUM_DRAFTS)
        assert one.event.num_drafts == one.event.num_reqs * NUM_DRAFTS
    # In a step that verifies nothing but drafts, those that were judged are those that the budget paid for.
    rounds = [pair for step in record.history.steps for pair in step.runners["v2"].rounds]
    for one in found:
        judged = [p for p, _ in rounds if p.verified_in_step == one.event.step]
        assert sum(len(p.token_ids) for p in judged) <= one.verified
    json.dumps(view_model(record), allow_nan=False)
    loaded = Recording.load(session.recording.save(tmp_path / "run.json.gz"))
    assert view_model(loaded.steps[-1]) == view_model(record)
    assert set(step_costs(record.history.meta["speculation"])) == {1, 4}


@pytest.mark.slow
def test_without_a_budget_nothing_is_open() -> None:
    assert view_model(golden_session("fixed").run(6)) == CLOSED
    session = tiny_session([prompt(1, 5)])
    assert view_model(session.run(3)) == CLOSED and session.recording.meta["speculation"] is None
