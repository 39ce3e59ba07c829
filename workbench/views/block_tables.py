"""Block tables: persistent row -> idx_mapping -> gathered row -> pool.

What holds each KV block, and how the step found it. The model is made here and in block_pool.py; block_tables_figure.py
draws its static twin, static/block_tables.js the live one.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from engine.hooks import BlockTableGathered, RequestScheduled, RowFreed, RowMoved, RowWritten
from engine.snapshot import RequestView, RowView, Snapshot

from ..html import Html
from ..recording import RunnerStep, StepRecord
from ..widget import LiveView
from .block_pool import pool_model
from .block_tables_figure import draw

MANY_ROWS = 16
"""From here on rows are thin and blocks are marks without a number."""
LEGEND = (
    "+ new in this step   2→1 moved   ✓ prefix hit   ! its cached content evicted   × freed   "
    "dark outline: shared, ref_cnt 2 or more   light blue: free but still cached   dashed: no longer the row's"
)
TITLES = {"v1": "V1 block table", "v2": "V2 block tables"}


def view_model(record: StepRecord, every_title: bool = True) -> dict[str, Any]:
    """All that both renderings draw, in plain JSON values; for `every_title` see `pool_model`.

    A block of a row is `[block id, marks]`; the marks are letters: n new in this step, h found in the prefix cache,
    s shared (ref_cnt of 2 or more), x no longer the row's (a finished request's row is freed in the next step).
    `[None, "+5"]` stands for five blocks left out of the middle of a long row.
    """
    steps = [record.runners[name] for name in ("v1", "v2") if name in record.runners]
    panels = [_panel(done, record.colors, every_title) for done in steps]
    return {"step": record.step, "panels": panels, "legend": LEGEND}


def figure(record: StepRecord) -> Html:
    """The static twin."""
    return Html(f"block tables, step {record.step}", draw(view_model(record)))


class BlockTablesView(LiveView, static="block_tables"):
    """The live view. Pointing at a request marks it here and, through the dashboard, in every other view."""

    view_model = staticmethod(functools.partial(view_model, every_title=False))


def _panel(done: RunnerStep, colors: Mapping[str, str], every_title: bool) -> dict[str, Any]:
    snapshot = done.snapshot
    marks = _Marks(done)
    rows = _rows(done, marks)
    gathered = _gathered(done, marks) if done.runner == "v2" else []
    return {
        "runner": done.runner,
        "title": TITLES[done.runner],
        "note": _note(done, rows, gathered),
        "gathered_now": done.runner == "v1" or any(done.of(BlockTableGathered)),
        "colors": {view.request_id: colors.get(view.request_id, "#999999") for view in snapshot.requests},
        "rows": rows,
        "gathered": gathered,
        "layout": _layout(rows, gathered),
        "pool": pool_model(done, every_title),
    }


class _Marks:
    """The marks of a block in a row of a request."""

    def __init__(self, done: RunnerStep) -> None:
        self._requests = {view.request_id: view for view in done.snapshot.requests}
        self._before = {view.request_id: frozenset(view.block_ids) for view in done.before.requests}
        self._hits = _hits(done)
        self._blocks = {block.block_id: block for block in done.snapshot.pool.blocks}

    def of(self, request_id: str | None, block_ids: tuple[int, ...]) -> list[list[Any]]:
        request = self._requests.get(request_id or "")
        return [[block_id, self._of_block(request, place, block_id)] for place, block_id in enumerate(block_ids)]

    def _of_block(self, request: RequestView | None, place: int, block_id: int) -> str:
        block = self._blocks.get(block_id)
        if request is None or block is None or request.request_id not in block.owners:
            return "x"
        new = block_id not in self._before.get(request.request_id, frozenset())
        hit = place < self._hits.get(request.request_id, 0)
        return "n" * new + "h" * hit + "s" * (block.ref_cnt > 1)


def _hits(done: RunnerStep) -> dict[str, int]:
    """Leading blocks of each request from the prefix cache. A resumed request's are known in its step only."""
    size = done.snapshot.pool.block_size
    hits = {v.request_id: max(v.num_cached_tokens, 0) // size for v in done.snapshot.requests if not v.num_preemptions}
    for event in done.of(RequestScheduled):
        if event.kind != "running":
            hits[event.request_id] = max(event.num_cached_tokens, 0) // size
    return hits


def _rows(done: RunnerStep, marks: _Marks) -> list[dict[str, Any]]:
    """One entry a row; a run of free rows longer than two is one entry, `row` to `to`."""
    tables = done.snapshot.block_tables.persistent
    freed = {event.row: event.request_id for event in done.of(RowFreed)}
    said = _Remarks(done)
    rows: list[dict[str, Any]] = []
    for group in _free_runs(done.snapshot.rows, keep=done.runner == "v2"):
        first = group[0]
        if first.request_id is not None:
            request, blocks = first.request_id, tables[first.row] if first.row < len(tables) else ()
            rows.append({
                "row": first.row, "request": request, "blocks": marks.of(request, blocks), "total": len(blocks),
                "moved": said.moves.get(request), "label": said.label(request, first.row), "said": said.of(request),
            })  # fmt: skip
        elif len(group) > 2:
            rows.append({"row": first.row, "to": group[-1].row, "request": None})
        else:
            rows.extend({"row": row.row, "to": row.row, "request": None, "left": freed.get(row.row)} for row in group)
    return rows


class _Remarks:
    """What is written at a row: its number, with `+` if it is new and `from→` if it moved; and a word beside it."""

    def __init__(self, done: RunnerStep) -> None:
        self.moves = _moves(done)
        self._written = {event.request_id for event in done.of(RowWritten)}
        self._finished = {view.request_id for view in done.snapshot.requests if view.status == "finished"}
        self._batch = _batch_ids(done.snapshot)
        self._dense = done.runner == "v1"

    def label(self, request_id: str, row: int) -> str:
        if request_id in self.moves:
            return f"{self.moves[request_id]['src']}→{row}"
        return f"+{row}" if request_id in self._written else str(row)

    def of(self, request_id: str) -> str:
        if self._dense or request_id in self._batch:
            return ""
        return "finished" if request_id in self._finished else "not run"


def _free_runs(rows: tuple[RowView, ...], keep: bool) -> list[list[RowView]]:
    """Rows, neighbouring free ones in one list. V1's batch is dense: its free rows need no line (`keep` False)."""
    runs: list[list[RowView]] = []
    for row in rows:
        if row.request_id is None and not keep:
            continue
        if runs and row.request_id is None and runs[-1][0].request_id is None:
            runs[-1].append(row)
        else:
            runs.append([row])
    return runs


def _moves(done: RunnerStep) -> dict[str, dict[str, Any]]:
    moves: dict[str, dict[str, Any]] = {}
    for event in done.of(RowMoved):
        src = moves.get(event.request_id, {}).get("src", event.src)
        moves[event.request_id] = {"src": src, "dst": event.dst, "how": event.how}
    return moves


def _batch_ids(snapshot: Snapshot) -> list[str | None]:
    """The request of each batch position."""
    tables = snapshot.block_tables
    if snapshot.inputs is not None and len(snapshot.inputs.req_ids) == len(tables.idx_mapping):
        return list(snapshot.inputs.req_ids)
    owners = {row.row: row.request_id for row in snapshot.rows}
    return [owners.get(row) for row in tables.idx_mapping]


def _gathered(done: RunnerStep, marks: _Marks) -> list[dict[str, Any]]:
    tables = done.snapshot.block_tables
    found = zip(tables.idx_mapping, _batch_ids(done.snapshot), tables.gathered, strict=False)
    return [
        {"position": i, "row": row, "request": request, "blocks": marks.of(request, blocks), "total": len(blocks)}
        for i, (row, request, blocks) in enumerate(found)
    ]


def _note(done: RunnerStep, rows: list[dict[str, Any]], gathered: list[dict[str, Any]]) -> str:
    used = sum(row["request"] is not None for row in rows)
    if done.runner == "v1":
        moves = [f"{request} {move['src']}→{move['dst']}" for request, move in _moves(done).items()]
        moved = f"; moved {', '.join(moves)}" if moves else ""
        return f"{used} dense {_plural('row', used)}{moved}"
    if not gathered:
        return "rows never move; nothing is gathered yet"
    stale = "" if any(done.of(BlockTableGathered)) else " (still the last step's)"
    return f"rows never move; idx_mapping gathers {len(gathered)} of {used} {_plural('row', used)}{stale}"


def _layout(rows: list[dict[str, Any]], gathered: list[dict[str, Any]]) -> dict[str, Any]:
    """Geometry that both renderings share, in px; long rows are cut to it in place."""
    lines = max(len(rows), len(gathered), 1)
    small = lines > MANY_ROWS
    most = max((row["total"] for row in [*rows, *gathered] if row["request"] is not None), default=0)
    widest = max((block[0] for row in rows for block in row.get("blocks", ())), default=0)
    chip = 8 if small else 33 if widest > 999 else 25
    room = 24 if small else 8
    for row in [*rows, *gathered]:
        if "blocks" in row:
            row["blocks"] = _cut(row["blocks"], room)
    table = max(min(most, room) * chip, 100)
    left = 60
    index = left + table + 56
    target = index + 70
    width = (target if gathered else left) + table
    height = 12 if small else 26
    return {
        "small": small, "row": height, "chip": chip, "left": left, "table": table, "index": index, "gathered": target,
        "top": 22, "width": width + 4, "height": 22 + lines * height + 6,
    }  # fmt: skip


def _cut(blocks: list[list[Any]], room: int) -> list[list[Any]]:
    """The first and the last blocks, the middle counted: hits stand at the front, new blocks at the end."""
    if len(blocks) <= room:
        return blocks
    head = (room - 1) // 2
    tail = room - 1 - head
    return [*blocks[:head], [None, f"+{len(blocks) - head - tail}"], *blocks[-tail:]]


def _plural(word: str, count: int) -> str:
    return word if count == 1 else word + "s"
