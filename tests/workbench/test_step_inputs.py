from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from engine.snapshot import InputsView
from tests.workbench.records import make_record
from tests.workbench.toy_engine import V1_MADE_BY, V2_MADE_BY
from tests.workbench.vocabulary import EVIL, PIECES
from workbench.recording import StepRecord
from workbench.views.step_inputs import StepInputsView, figure, view_model


def inputs(counts: dict[str, int], padding: int = 0, **fields: Any) -> InputsView:
    """Requests whose tokens begin at position 4 x their number, in slots that count on from 100."""
    starts = [0]
    for count in counts.values():
        starts.append(starts[-1] + count)
    positions = [4 * i + k for i, count in enumerate(counts.values()) for k in range(count)]
    total = starts[-1]
    return InputsView(
        **{
            "req_ids": tuple(counts), "num_scheduled_tokens": tuple(counts.values()), "num_tokens": total,
            "num_tokens_padded": total + padding, "input_ids": (*(k % 9 for k in range(total)), *[0] * padding),
            "positions": (*positions, *[0] * padding), "query_start_loc": (*starts, *[total] * padding),
            "seq_lens": (*(4 * i + n for i, n in enumerate(counts.values())), *[0] * padding),
            "slot_mapping": (*range(100, 100 + total), *[-1] * padding),
            "logits_indices": tuple(start - 1 for start in starts[1:]), "made_by": V2_MADE_BY, **fields,
        }
    )  # fmt: skip


def record_of(view: InputsView | None, record: StepRecord | None = None, events: Any = None) -> StepRecord:
    record = record or make_record(runners=("v2",))
    done = record.runners["v2"]
    done = replace(done, snapshot=replace(done.snapshot, inputs=view), events=done.events if events is None else events)
    return replace(record, runners={**record.runners, "v2": done})


def line(model: dict[str, Any], name: str, panel: int = 0) -> list[dict[str, Any]]:
    return next(one["cells"] for one in model["panels"][panel]["lines"] if one["name"] == name)


def values(model: dict[str, Any], name: str) -> list[str]:
    return ["".join(cell["v"]) for cell in line(model, name)]


def test_every_token_is_a_column_and_every_tensor_a_line() -> None:
    model = view_model(record_of(inputs({"D": 1, "A": 3})))
    (panel,) = model["panels"]
    assert [one["name"] for one in panel["lines"]] == [
        "token", "input_ids", "positions", "query_start_loc", "seq_lens", "slot_mapping", "logits_indices",
    ]  # fmt: skip
    assert values(model, "token") == [PIECES[i] for i in range(4)]
    assert values(model, "positions") == ["0", "4", "5", "6"]
    assert values(model, "slot_mapping") == ["100", "101", "102", "103"]
    assert values(model, "query_start_loc") == ["0", "1", "4"]
    assert values(model, "seq_lens") == ["1", "7"]
    assert values(model, "logits_indices") == ["0", "", "", "3"]
    assert [cell["first"] for cell in line(model, "positions")] == [True, True, False, False]
    assert [(band["id"], band["n"], band["count"]) for band in panel["bands"]] == [("D", 1, 1), ("A", 3, 3)]
    assert panel["note"] == "4 tokens of 2 requests"


def test_a_slot_tells_its_block() -> None:
    model = view_model(record_of(inputs({"A": 2})))
    assert [cell["t"] for cell in line(model, "slot_mapping")] == ["block 25 × 4 + 0", "block 25 × 4 + 1"]
    assert line(model, "input_ids")[1]["t"] == " is  (token 1)"


def test_padding_is_grey_and_writes_nothing() -> None:
    model = view_model(record_of(inputs({"A": 1, "B": 1}, padding=2)))
    assert model["panels"][0]["note"] == "2 tokens of 2 requests, padded to 4"
    cells = line(model, "slot_mapping")
    assert [cell["k"] for cell in cells] == ["", "", "pad", "pad"]
    assert cells[-1]["v"] == ["-1"] and cells[-1]["t"] == "no slot: writes nothing"
    assert values(model, "query_start_loc") == ["0", "1", "2 2 2"]
    assert values(model, "seq_lens") == ["1", "5", "0 0"]


@pytest.mark.parametrize("counts", [{"A": 100}, {"A": 1, "B": 90, "C": 5}, {f"r{i}": 3 + i % 4 for i in range(64)}])
def test_long_requests_fold_and_lines_stay_aligned(counts: dict[str, int]) -> None:
    model = view_model(record_of(inputs(counts, padding=7)))
    (panel,) = model["panels"]
    widths = {sum(cell["n"] for cell in one["cells"] if cell["k"] != "end") for one in panel["lines"]}
    assert widths == {sum(band["n"] for band in panel["bands"])}
    assert len(line(model, "positions")) < sum(counts.values())
    for band in panel["bands"]:
        hidden = [c for c in line(model, "positions") if c["r"] == band["id"] and c["k"] == "fold"]
        assert len(hidden) == (band["count"] > band["n"])
    fold = next(cell for cell in line(model, "positions") if cell["k"] == "fold")
    assert "tokens folded: " in fold["t"]


def test_a_fold_says_between_which_values_it_hides() -> None:
    model = view_model(record_of(inputs({"A": 100})))
    cells = line(model, "positions")
    place = next(i for i, cell in enumerate(cells) if cell["k"] == "fold")
    before, after = int(cells[place - 1]["v"][0]), int(cells[place + 1]["v"][0])
    assert cells[place]["t"] == f"{after - before - 1} tokens folded: {before + 1} … {after - 1}"


def test_the_same_numbers_are_drawn_once_with_both_makers() -> None:
    model = view_model(make_record(steps=3))
    assert [panel["title"] for panel in model["panels"]] == ["V1 and V2"]
    assert model["made"]["runners"] == ["V1", "V2"]
    made = dict(model["made"]["lines"])
    assert made["input_ids"] == [["host", V1_MADE_BY["input_ids"]], ["compute", V2_MADE_BY["input_ids"]]]
    assert [lane for lane, _ in made["slot_mapping"]] == ["compute", "compute"]


def test_another_order_of_requests_is_drawn_apart() -> None:
    model = view_model(record_of(inputs({"D": 1, "A": 3}), make_record(steps=3)))
    assert [panel["title"] for panel in model["panels"]] == ["V1", "V2"]


def test_inputs_that_this_step_did_not_prepare_say_so() -> None:
    (panel,) = view_model(record_of(inputs({"A": 1}), events=()))["panels"]
    assert panel["stale"] and "of an earlier step" in panel["note"]
    (panel,) = view_model(record_of(None))["panels"]
    assert panel["lines"] == [] and "no step has run" in panel["note"]
    assert "no step has run" in figure(record_of(None))._repr_html_()


def test_the_static_twin() -> None:
    record = record_of(inputs({"A": 2}, input_ids=(PIECES.index(EVIL), 3)))
    page = figure(record)._repr_html_()
    assert repr(figure(record)) == "<inputs of step 6>"
    assert EVIL not in page and "&lt;img src=x" in page
    assert all(name in page for name in ("query_start_loc", "slot_mapping", V2_MADE_BY["input_ids"]))


def test_the_model_is_plain_json_and_the_widget_shows_it() -> None:
    record = make_record()
    assert json.loads(json.dumps(view_model(record))) == json.loads(json.dumps(StepInputsView(record).model))
    assert repr(StepInputsView(record)) == "<StepInputsView step 6>"
