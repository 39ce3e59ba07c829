"""The block tables view: what its model says, and what its static twin shows."""

from __future__ import annotations

import json
import re
import time
from dataclasses import replace
from typing import Any

import pytest

from engine.hooks import RowMoved
from tests.workbench.records import make_record, make_recording, with_events
from tests.workbench.vocabulary import EVIL
from workbench.recording import StepRecord
from workbench.views.block_tables import BlockTablesView, figure, view_model


def panel(record: StepRecord, runner: str) -> dict[str, Any]:
    return next(panel for panel in view_model(record)["panels"] if panel["runner"] == runner)


def row_of(panel: dict[str, Any], request: str) -> dict[str, Any]:
    return next(row for row in panel["rows"] if row["request"] == request)


def with_snapshot(record: StepRecord, runner: str, **changes: Any) -> StepRecord:
    done = record.runners[runner]
    return replace(
        record, runners={**record.runners, runner: replace(done, snapshot=replace(done.snapshot, **changes))}
    )


def test_the_model_is_plain_json_and_has_both_runners() -> None:
    model = view_model(make_record(steps=3))
    assert json.loads(json.dumps(model)) == model
    assert [p["runner"] for p in model["panels"]] == ["v1", "v2"]
    assert [p["runner"] for p in view_model(make_record(runners=("v2",)))["panels"]] == ["v2"]


def test_v2_gathers_through_idx_mapping_what_the_persistent_rows_hold() -> None:
    record = make_record(steps=3)
    v2 = panel(record, "v2")
    tables = record.runners["v2"].snapshot.block_tables
    assert [row["row"] for row in v2["gathered"]] == list(tables.idx_mapping)
    assert tables.idx_mapping != tuple(sorted(tables.idx_mapping)), (
        "the step under test must reorder, else it shows little"
    )
    for place, row in enumerate(v2["gathered"]):
        assert row["position"] == place
        held = row_of(v2, row["request"])
        assert held["row"] == row["row"]
        assert held["blocks"] == row["blocks"]
    assert v2["gathered_now"]


def test_v1_has_one_table_and_says_which_row_moved() -> None:
    v1 = panel(make_record(steps=3), "v1")
    assert v1["gathered"] == []
    assert [row["row"] for row in v1["rows"]] == [0, 1, 2]
    assert [row_of(v1, request)["label"] for request in "ADC"] == ["0", "2→1", "+2"]
    assert row_of(v1, "D")["moved"] == {"src": 2, "dst": 1, "how": "condense"}
    assert "moved D 2→1" in v1["note"]


def test_two_moves_of_one_request_in_a_step_are_told_as_one() -> None:
    record = with_events(make_record(steps=3), "v1", RowMoved(3, "v1", 0, "D", 1, 0, "swap"))
    assert row_of(panel(record, "v1"), "D")["moved"] == {"src": 2, "dst": 0, "how": "swap"}


def test_new_hit_and_shared_blocks_are_marked() -> None:
    v2 = panel(make_record(steps=3), "v2")
    assert row_of(v2, "C")["blocks"] == [[1, "nhs"], [7, "n"]]
    assert row_of(v2, "A")["blocks"] == [[1, "s"], [2, ""]]
    later = panel(make_record(steps=5), "v2")
    assert row_of(later, "C")["blocks"][0] == [1, "hs"], "a hit stays one, and is new only in its own step"


def test_the_pool_tells_owner_state_and_change_of_every_block() -> None:
    cells = {cell["id"]: cell for cell in panel(make_record(steps=3), "v2")["pool"]["cells"]}
    assert len(cells) == 64
    assert cells[0]["state"] == "null"
    assert "null block" in cells[0]["title"]
    assert (cells[1]["state"], cells[1]["owners"], cells[1]["change"]) == ("shared", ["A", "C"], "hit")
    assert "A and C, ref_cnt 2" in cells[1]["title"]
    assert (cells[7]["state"], cells[7]["change"]) == ("used", "new")
    assert cells[3]["state"] == "cached"
    assert "number " in cells[3]["title"] and "free list" in cells[3]["title"]
    assert cells[20] == {"id": 20, "state": "free", "title": cells[20]["title"]}


def test_blocks_of_a_finished_request_are_freed_and_its_row_no_longer_holds_them() -> None:
    record = make_record(steps=2)
    v2 = panel(record, "v2")
    freed = {cell["id"] for cell in v2["pool"]["cells"] if cell.get("change") == "freed"}
    assert freed == {3, 4}
    gathered = next(row for row in v2["gathered"] if row["request"] == "B")
    assert [marks for _, marks in gathered["blocks"]] == ["x", "x"]


def test_a_block_that_loses_its_cached_content_is_evicted() -> None:
    record = make_record(steps=3)
    done = record.runners["v2"]
    old = tuple(replace(b, block_hash="deadbeef") if b.block_id == 7 else b for b in done.before.pool.blocks)
    before = replace(done.before, pool=replace(done.before.pool, blocks=old))
    record = replace(record, runners={"v2": replace(done, before=before)})
    cell = panel(record, "v2")["pool"]["cells"][7]
    assert cell["change"] == "evicted"
    assert "what it had cached is gone" in cell["title"]


def test_the_free_list_is_in_the_order_of_giving_out() -> None:
    record = make_record(steps=3)
    free = record.runners["v2"].snapshot.pool.free
    pool = panel(record, "v2")["pool"]
    assert [block_id for block_id, _ in pool["free_next"]] == list(free[:5])
    assert pool["num_free"] == len(free) == 58
    reordered = replace(record.runners["v2"].snapshot.pool, free=(3, 4, *free[:5]))
    pool = panel(with_snapshot(record, "v2", pool=reordered), "v2")["pool"]
    assert pool["free_next"][:3] == [[3, True], [4, True], [free[0], False]]


def test_a_finished_request_that_the_step_left_out_is_said_to_be_finished() -> None:
    record = make_record(steps=2)
    tables = record.runners["v2"].snapshot.block_tables
    kept = [i for i, row in enumerate(tables.idx_mapping) if row != 1]
    fewer = replace(
        tables,
        idx_mapping=tuple(tables.idx_mapping[i] for i in kept),
        gathered=tuple(tables.gathered[i] for i in kept),
    )
    v2 = panel(with_snapshot(record, "v2", block_tables=fewer, inputs=None), "v2")
    assert row_of(v2, "B")["said"] == "finished"


def test_a_request_that_is_not_in_the_step_is_said_to_be_out_of_it() -> None:
    record = make_record(steps=3)
    tables = record.runners["v2"].snapshot.block_tables
    fewer = replace(tables, idx_mapping=tables.idx_mapping[:2], gathered=tables.gathered[:2])
    v2 = panel(with_snapshot(record, "v2", block_tables=fewer, inputs=None), "v2")
    out = {row["request"] for row in v2["rows"] if row.get("said") == "not run"}
    assert len(v2["gathered"]) == 2
    assert out == {"A", "C", "D"} - {row["request"] for row in v2["gathered"]}


def test_many_free_rows_are_one_line_and_two_are_two() -> None:
    v2 = panel(make_record(steps=3, rows=200), "v2")
    assert [row for row in v2["rows"] if row["request"] is None] == [{"row": 3, "to": 199, "request": None}]
    v2 = panel(make_record(steps=3, rows=5), "v2")
    assert [(row["row"], row["to"]) for row in v2["rows"] if row["request"] is None] == [(3, 3), (4, 4)]


def test_a_long_row_keeps_its_ends_and_counts_its_middle() -> None:
    v2 = panel(make_record(steps=2, prompt_len=80, budget=400, block_size=4), "v2")
    row = row_of(v2, "A")
    held = (
        make_record(steps=2, prompt_len=80, budget=400, block_size=4).runners["v2"].snapshot.block_tables.persistent[0]
    )
    assert row["total"] == len(held) == 21
    shown = [block_id for block_id, _ in row["blocks"]]
    assert shown == [*held[:3], None, *held[-4:]]
    assert row["blocks"][3] == [None, "+14"]


def test_a_pause_before_the_gather_says_that_it_is_the_last_steps() -> None:
    record = make_record(steps=3)
    done = record.runners["v2"]
    kept = tuple(event for event in done.events if type(event).__name__ != "BlockTableGathered")
    record = replace(record, runners={"v2": replace(done, events=kept, phase="update states")})
    v2 = panel(record, "v2")
    assert not v2["gathered_now"]
    assert "still the last step's" in v2["note"]
    assert "gathered (last step)" in figure(record)._repr_html_()


def test_the_state_before_the_first_step_is_drawn() -> None:
    record = make_record(steps=1)
    start = {name: replace(done, snapshot=done.before, events=()) for name, done in record.runners.items()}
    record = replace(record, step=0, runners=start)
    assert "nothing is gathered yet" in figure(record)._repr_html_()


def test_the_static_twin_shows_the_tables_and_escapes_everything() -> None:
    record = make_record(steps=3)
    page = figure(record)._repr_html_()
    for said in ("V1 block table", "idx_mapping", "pool: 64 blocks of 4 tokens", "rows 3 to 5 free"):
        assert said in page
    assert page.count("<svg") == 4
    view = record.runners["v2"].snapshot.requests[0]
    rows = tuple(
        replace(row, request_id=EVIL) if row.request_id == "A" else row for row in record.runners["v2"].snapshot.rows
    )
    requests = (replace(view, request_id=EVIL), *record.runners["v2"].snapshot.requests[1:])
    evil = figure(with_snapshot(record, "v2", rows=rows, requests=requests))._repr_html_()
    assert "<img" not in evil
    assert "&lt;img src=x" in evil
    assert repr(figure(record)) == "<block tables, step 3>"


def test_the_picture_is_as_wide_as_its_parts() -> None:
    for record in (make_record(steps=3), make_record(requests=64, blocks=512, prompt_len=22, budget=640, steps=4)):
        for p in view_model(record)["panels"]:
            layout = p["layout"]
            longest = max(len(row["blocks"]) for row in [*p["rows"], *p["gathered"]] if row["request"] is not None)
            right = layout["gathered"] if p["gathered"] else layout["left"]
            assert right + longest * layout["chip"] <= layout["width"]
            assert layout["top"] + len(p["rows"]) * layout["row"] <= layout["height"]


@pytest.mark.parametrize("runners", [("v1",), ("v1", "v2")])
def test_64_requests_and_512_blocks_are_quick(runners: tuple[str, ...]) -> None:
    record = make_record(runners, requests=64, blocks=512, prompt_len=22, budget=640, steps=4)
    begin = time.perf_counter()
    text = json.dumps(view_model(record))
    assert time.perf_counter() - begin < 0.1
    assert len(text) < 250_000


def test_the_live_view_follows_and_names_its_step() -> None:
    recording = make_recording(steps=3)
    view = BlockTablesView(recording.steps[0])
    view.show(recording.steps[2])
    assert view.model == view_model(recording.steps[2])
    assert repr(view) == "<BlockTablesView step 3>"
    assert not re.search(r"^import ", view._esm, re.MULTILINE)
