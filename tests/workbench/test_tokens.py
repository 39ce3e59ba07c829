from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from engine.hooks import RequestScheduled, Sampled
from engine.snapshot import RequestView
from tests.workbench.records import make_record
from tests.workbench.vocabulary import EVIL
from workbench.recording import StepRecord
from workbench.views.tokens import TokensView, figure, view_model


def lines(record: StepRecord, request_id: str) -> list[dict[str, Any]]:
    return next(r["lines"] for r in view_model(record)["requests"] if r["id"] == request_id)


def kinds(line: dict[str, Any]) -> list[str]:
    return ["+".join([token["k"], *token["f"]]) for token in line["tokens"]]


def with_request(
    record: StepRecord, runner: str, view: RequestView, before: RequestView | None = None, **events: Any
) -> StepRecord:
    """`record` in which `runner` holds this one request, with these events only."""
    done = record.runners[runner]
    done = replace(
        done,
        snapshot=replace(done.snapshot, requests=(view,), waiting=events.get("waiting", ())),
        before=replace(done.before, requests=(before,) if before else ()),
        events=events.get("events", ()),
    )
    return replace(record, runners={**record.runners, runner: done})


def request(**fields: Any) -> RequestView:
    given: dict[str, Any] = {
        "request_id": "A", "status": "running", "prompt_token_ids": (0, 1, 2, 3), "output_token_ids": (),
        "num_computed_tokens": 0, "num_cached_tokens": 0, "num_output_placeholders": 0, "num_preemptions": 0,
        "priority": 0, "block_ids": (), "finish_reason": None,
    }  # fmt: skip
    return RequestView(**{**given, **fields})


def scheduled(first: int, count: int, kind: Any = "running") -> RequestScheduled:
    return RequestScheduled(3, "v2", 0, "A", count, first, kind, 0)


ONE = make_record(runners=("v2",))


def test_a_chunk_of_a_prompt() -> None:
    record = with_request(
        ONE, "v2", request(num_computed_tokens=3, num_cached_tokens=1), events=(scheduled(1, 2, "new"),)
    )
    (line,) = lines(record, "A")
    assert kinds(line) == ["cached", "prompt+fed", "prompt+fed", "prompt+todo"]
    assert line["notes"] == [{"k": "prefill", "text": "prefill 3 / 4", "done": 0.75}]


def test_a_decode_feeds_one_token_and_gets_one() -> None:
    before = request(output_token_ids=(4,), num_computed_tokens=4)
    after = request(output_token_ids=(4, 5), num_computed_tokens=5)
    sampled = Sampled(3, "v2", 0, "A", 5, 5, 3)
    record = with_request(ONE, "v2", after, before, events=(scheduled(4, 1), sampled))
    (line,) = lines(record, "A")
    assert kinds(line) == ["prompt"] * 4 + ["sampled+fed", "sampled+new"]
    assert line["notes"] == []
    assert line["tokens"][-1]["t"] == "token 5 · position 5 · sampled in step 3 · new in this step"


def test_a_token_in_flight_is_shown_as_one() -> None:
    before = request(output_token_ids=(), num_computed_tokens=4, num_output_placeholders=1)
    after = request(output_token_ids=(4,), num_computed_tokens=5, num_output_placeholders=1)
    record = with_request(ONE, "v2", after, before, events=(scheduled(4, 1),))
    (line,) = lines(record, "A")
    assert kinds(line) == ["prompt"] * 4 + ["sampled+fed+new", "flight"]
    assert line["tokens"][-1]["t"].startswith("position 5 ")


def test_after_a_preemption_all_is_to_be_computed_again() -> None:
    preempted = request(status="preempted", output_token_ids=(4, 5), num_preemptions=1)
    (line,) = lines(with_request(ONE, "v2", preempted, preempted), "A")
    assert kinds(line) == ["prompt+todo"] * 4 + ["sampled+todo", "sampled"]
    assert line["notes"] == [{"k": "preempted", "text": "preempted, waits for blocks"}]
    resumed = request(output_token_ids=(4, 5), num_computed_tokens=3, num_preemptions=1)
    (line,) = lines(with_request(ONE, "v2", resumed, preempted, events=(scheduled(0, 3, "resumed"),)), "A")
    assert kinds(line)[:5] == ["prompt+fed"] * 3 + ["prompt+todo", "sampled+todo"]
    assert [note["text"] for note in line["notes"]] == ["prefill 3 / 6", "preempted 1× before"]


def test_waiting_and_finished() -> None:
    (line,) = lines(with_request(ONE, "v2", request(status="waiting"), waiting=("Z", "A")), "A")
    assert line["notes"] == [{"k": "waiting", "text": "waits, 2 of 2 in the queue"}]
    done = request(status="finished", output_token_ids=(4,), num_computed_tokens=0, finish_reason="stop")
    (line,) = lines(with_request(ONE, "v2", done, done), "A")
    assert kinds(line) == ["prompt"] * 4 + ["sampled"]
    assert line["notes"] == [{"k": "finished", "text": "finished: stop"}]
    assert line["dim"]
    late = replace(done, num_output_placeholders=1)
    (line,) = lines(with_request(ONE, "v2", late, late), "A")
    assert kinds(line) == ["prompt"] * 4 + ["sampled"], "what is still in flight will be thrown away"


def test_runners_that_agree_share_a_line_and_those_that_part_do_not() -> None:
    record = make_record()
    model = view_model(record)
    assert model["note"] == "V1 and V2 agree"
    assert all([line["runners"] for line in request["lines"]] == [""] for request in model["requests"])
    view = record.runners["v2"].snapshot.requests[0]
    other = replace(view, output_token_ids=(view.output_token_ids[0] + 1, *view.output_token_ids[1:]))
    requests = (other, *record.runners["v2"].snapshot.requests[1:])
    done = replace(record.runners["v2"], snapshot=replace(record.runners["v2"].snapshot, requests=requests))
    parted = replace(record, runners={**record.runners, "v2": done})
    model = view_model(parted)
    assert model["note"] == "V1 and V2 part on A"
    first, second = lines(parted, "A")
    assert (first["runners"], second["runners"]) == ("V1", "V2")
    for line in (first, second):
        marked = [i for i, token in enumerate(line["tokens"]) if "differs" in token["f"]]
        assert marked == [len(view.prompt_token_ids)]


def test_long_stretches_fold_and_keep_their_text() -> None:
    prompt = tuple(i % 9 for i in range(500))
    record = with_request(ONE, "v2", request(prompt_token_ids=prompt, num_computed_tokens=500), events=())
    (line,) = lines(record, "A")
    (fold,) = [token for token in line["tokens"] if token["k"] == "fold"]
    shown = len(line["tokens"]) - 1
    assert fold["p"] == [f"{500 - shown} more"]
    place = line["tokens"].index(fold)
    assert fold["t"] == "".join(record.token_text[t] for t in prompt[place : place + 500 - shown]).replace("\n", "\\n")


def test_the_legend_names_what_is_there_and_nothing_else() -> None:
    record = with_request(ONE, "v2", request(num_computed_tokens=4), events=(scheduled(0, 4, "new"),))
    assert [mark for mark, _ in view_model(record)["legend"]] == ["prompt", "fed"]


def test_the_static_twin_escapes_what_a_model_writes() -> None:
    page = figure(make_record(steps=3))._repr_html_()
    assert "&lt;img src=x onerror=alert(1)&gt;" in page
    assert EVIL not in page
    assert "<img" not in page


def test_the_static_twin_holds_every_word_of_the_model() -> None:
    record = make_record(steps=3)
    model, page = view_model(record), figure(record)._repr_html_()
    assert repr(figure(record)) == "<tokens of step 3>"
    assert all(note["text"] in page for r in model["requests"] for line in r["lines"] for note in line["notes"])
    assert page.count("position ") == sum(len(line["tokens"]) for r in model["requests"] for line in r["lines"])


def test_the_model_is_plain_json_and_the_widget_shows_it() -> None:
    record = make_record()
    assert json.loads(json.dumps(view_model(record))) == json.loads(json.dumps(TokensView(record).model))
    assert repr(TokensView(record)) == "<TokensView step 6>"
