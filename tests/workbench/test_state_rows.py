from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from engine.hooks import RowMoved
from engine.snapshot import RowView
from tests.workbench.records import make_record
from tests.workbench.vocabulary import EVIL, PIECES
from workbench.recording import StepRecord
from workbench.views.state_rows import StateRowsView, figure, view_model


def panel(record: StepRecord, runner: str) -> dict[str, Any]:
    return next(p for p in view_model(record)["panels"] if p["runner"] == runner)


def cell(one: dict[str, Any], row: int, key: str) -> dict[str, Any]:
    column = [c["key"] for c in one["columns"]].index(key)
    return next(r for r in one["rows"] if r["row"] == str(row))["cells"][column]


def with_rows(
    record: StepRecord, runner: str, before: dict[int, Any], after: dict[int, Any], *events: Any
) -> StepRecord:
    """`record` in which `runner` holds these rows: {row: (request id, cells)}; the others are empty."""
    done = record.runners[runner]

    def rows(given: dict[int, Any]) -> tuple[RowView, ...]:
        return tuple(RowView(i, *given.get(i, (None, {}))) for i in range(len(done.snapshot.rows)))

    done = replace(
        done,
        before=replace(done.before, rows=rows(before)),
        snapshot=replace(done.snapshot, rows=rows(after)),
        events=events,
    )
    return replace(record, runners={**record.runners, runner: done})


def test_both_runners_stand_side_by_side() -> None:
    panels = view_model(make_record(steps=3))["panels"]
    assert [(p["title"], p["note"]) for p in panels] == [
        ("V1 persistent batch", "dense rows; D moved 2→1"),
        ("V2 state table", "fixed rows; 3 of 6 taken"),
    ]
    assert [[r.get("id", r["kind"]) for r in p["rows"]] for p in panels] == [
        ["A", "D", "C", "free", "free", "free"],
        ["A", "C", "D", "free", "free", "free"],
    ]


def test_a_cell_is_compared_by_place() -> None:
    v1, v2 = (panel(make_record(steps=3), runner) for runner in ("v1", "v2"))
    assert cell(v1, 0, "num_tokens") == {"v": ["9"], "c": True, "t": "num_tokens: 8 → 9"}
    assert not cell(v1, 0, "num_prompt_tokens")["c"]
    moved = cell(v1, 1, "num_computed_tokens")
    assert moved["c"] and moved["t"].endswith("(the row held B)")
    # In V2 D stayed where it was: only what it computed has changed.
    assert not cell(v2, 2, "prompt_len")["c"]
    assert cell(v2, 2, "total_len")["t"] == "total_len: 7 → 8"


def test_a_cell_says_what_it_was_when_the_row_was_empty() -> None:
    record = with_rows(make_record(), "v2", {}, {3: ("Q", {"total_len": 5})})
    assert cell(panel(record, "v2"), 3, "total_len") == {"v": ["5"], "c": True, "t": "total_len: empty → 5"}


def test_a_condense_is_an_arrow_into_the_hole() -> None:
    (move,) = panel(make_record(steps=3), "v1")["moves"]
    assert (move["src"], move["dst"], move["how"], move["ids"]) == (2, 1, "condense", "D")
    assert panel(make_record(steps=3), "v2")["moves"] == []


def test_a_condense_into_a_hole_leaves_a_row_that_says_where_its_request_went() -> None:
    before = {0: ("A", {}), 1: ("B", {}), 5: ("D", {})}
    after = {0: ("A", {}), 1: ("D", {})}
    one = panel(with_rows(make_record(rows=30), "v1", before, after, RowMoved(6, "v1", 0, "D", 5, 1, "condense")), "v1")
    assert [(r["row"], r.get("note")) for r in one["rows"][2:]] == [
        ("2", "empty"), ("3", "empty"), ("4", "empty"), ("5", "D moved to row 1"), ("6–29", "24 empty rows"),
    ]  # fmt: skip
    assert (one["moves"][0]["src"], one["moves"][0]["dst"]) == (5, 1)


def test_both_halves_of_a_swap_are_one_arrow() -> None:
    cells = {0: ("A", {"num_tokens": 1}), 1: ("B", {"num_tokens": 2})}
    swapped = {0: ("B", {"num_tokens": 2}), 1: ("A", {"num_tokens": 1})}
    moves = (RowMoved(6, "v1", 0, "A", 0, 1, "swap"), RowMoved(6, "v1", 0, "B", 1, 0, "swap"))
    one = panel(with_rows(make_record(steps=1), "v1", cells, swapped, *moves), "v1")
    assert [(move["src"], move["dst"], move["ids"]) for move in one["moves"]] == [(0, 1, "A B")]
    assert one["note"] == "dense rows; A and B swapped 0↔1"
    assert one["rows"][0]["note"] == "swap: from row 1 to row 0"
    assert cell(one, 0, "num_tokens")["t"] == "num_tokens: 1 → 2 (the row held A)"


def test_a_row_of_v2_that_was_given_back_says_so() -> None:
    one = panel(with_rows(make_record(rows=20), "v2", {7: ("B", {"total_len": 3})}, {}), "v2")
    assert [(r["row"], r["note"]) for r in one["rows"]] == [
        ("0–6", "7 free rows"), ("7", "B left: the row is free"), ("8–19", "12 free rows"),
    ]  # fmt: skip


def test_v2_shows_which_batch_position_reads_a_row() -> None:
    record = make_record(steps=3)
    one, gathered = panel(record, "v2"), record.runners["v2"].snapshot.block_tables.idx_mapping
    shown = {row: cell(one, row, "idx_mapping")["v"] for row in gathered}
    assert shown == {row: [str(position)] for position, row in enumerate(gathered)}
    idle = with_rows(record, "v2", {}, {0: ("A", {})})
    assert cell(panel(idle, "v2"), 0, "idx_mapping") == {"v": ["–"], "c": False, "t": "not in this step"}


def test_tokens_and_sampling_read_as_people_write_them() -> None:
    cells = {
        "last_sampled_token": 9,
        "total_len": 8,
        "prefill_len": 7,
        "temperature": 0.8,
        "top_p": 0.95,
        "top_k": 40,
        "seed": 7,
    }
    one = panel(with_rows(make_record(), "v2", {}, {0: ("A", cells)}), "v2")
    assert PIECES[9] == "\n"
    assert cell(one, 0, "last_sampled_token")["v"] == ("", "\\n")
    assert cell(one, 0, "last_sampled_token")["t"].endswith("· token 9")
    assert cell(one, 0, "sampling")["v"] == ["T 0.8 p 0.95 k 40"]
    assert "seed 7" in cell(one, 0, "sampling")["t"]
    unsampled = panel(with_rows(make_record(), "v2", {}, {0: ("A", {**cells, "total_len": 7})}), "v2")
    assert cell(unsampled, 0, "last_sampled_token")["v"] == ["–"]
    flying = panel(with_rows(make_record(), "v1", {}, {0: ("A", {"last_token": -1})}), "v1")
    assert cell(flying, 0, "last_token")["v"] == ["", "in flight"]


def test_a_row_whose_request_has_finished_is_dim_until_it_leaves() -> None:
    record = make_record(steps=2)
    row = next(r for r in panel(record, "v1")["rows"] if r.get("id") == "B")
    assert row["dim"] and "finished" in row["note"]


def test_the_static_twin() -> None:
    record = make_record(steps=3)
    record = with_rows(
        record, "v1", {}, {0: ("A", {"last_token": PIECES.index(EVIL)})}, RowMoved(3, "v1", 0, "A", 4, 0, "condense")
    )
    page = figure(record)._repr_html_()
    assert repr(figure(record)) == "<state rows of step 3>"
    assert EVIL not in page and "&lt;img src=x" in page
    assert page.count("<svg") == 1 and "A from row 4 to row 0" in page
    assert page.count("<table") == 2
    assert "V2 state table" in page


def test_the_model_is_plain_json_and_the_widget_shows_it() -> None:
    record = make_record()
    assert json.loads(json.dumps(view_model(record))) == json.loads(json.dumps(StateRowsView(record).model))
    assert repr(StateRowsView(record)) == "<StateRowsView step 6>"


def test_drafts_of_the_next_step_are_a_column_where_there_are_some() -> None:
    record = make_record(steps=3)
    assert "drafts" not in [column["key"] for column in panel(record, "v2")["columns"]]
    step = record.runners["v2"]
    rows = [
        replace(row, draft_token_ids=(1, 2), confidences=(0.75, 0.5)) if row.row == 0 else row
        for row in step.snapshot.rows
    ]
    step = replace(step, snapshot=replace(step.snapshot, rows=tuple(rows)))
    one = panel(replace(record, runners={**record.runners, "v2": step}), "v2")
    shown = cell(one, 0, "drafts")
    assert shown["c"] and "draft 2: token 2, confidence 0.50" in shown["t"]
    assert "draft_tokens: what the next step verifies" in next(
        c["title"] for c in one["columns"] if c["key"] == "drafts"
    )
    others = [r for r in one["rows"] if r["kind"] == "used" and r["row"] != "0"]
    assert [cell(one, int(r["row"]), "drafts")["v"] for r in others] == [["–"]] * len(others)
