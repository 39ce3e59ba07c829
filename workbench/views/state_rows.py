"""The state rows view: where each runner keeps a request, and what a step changed there.

V2: a table of fixed rows, free ones included. V1: the dense rows of the persistent batch, with an arrow for each row
that `condense` or `swap_states` moved. Cells are compared by place, not by request: a row that took another changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from engine.hooks import BlockTableGathered, RowFreed, RowMoved, RowWritten
from engine.snapshot import RowView

from ..html import Html
from ..recording import RunnerStep, StepRecord
from ..widget import LiveView
from .pieces import piece
from .state_rows_figure import draw
from .why import row_moves

TITLES = {"v1": "V1 persistent batch", "v2": "V2 state table"}
_FOLD = 3
"""More free rows than this in a stretch are drawn as one."""
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "seed")
_COLUMNS = {
    ("v1", "num_tokens"): ("host", "num_tokens_no_spec: prompt and outputs of the request in this row"),
    ("v1", "num_prompt_tokens"): ("host", "length of the prompt"),
    ("v1", "num_computed_tokens"): ("host", "the host's numpy is the truth, copied to the device each step"),
    ("v1", "last_token"): ("host", "the newest token of the row of token_ids_cpu; -1 stands for one still in flight"),
    ("v1", "sampling"): ("host + device", "temperature, top_p, top_k: rebuilt when the batch changes"),
    ("v2", "idx_mapping"): ("this step", "the batch position that reads this row in this step"),
    ("v2", "total_len"): ("device", "prompt and outputs so far; staged writes, then the device counts on"),
    ("v2", "prompt_len"): ("UVA", "length of the prompt"),
    ("v2", "prefill_len"): (
        "UVA",
        "tokens known when the row was taken: the prompt, after a preemption the outputs too",
    ),
    ("v2", "num_computed_tokens"): (
        "device",
        "the truth: tokens whose KV is computed; post_update counts on at the step's end",
    ),
    ("v2", "num_computed_tokens_np"): ("host", "the scheduler's optimistic upper bound, as the step began"),
    ("v2", "last_sampled_token"): ("device", "the newest sampled token; the next step reads it without the host"),
    ("v1", "drafts"): ("host", "what the next step verifies for this request"),
    ("v2", "drafts"): (
        "device",
        "draft_tokens: what the next step verifies for this request; the host does not know them",
    ),
    ("v2", "sampling"): ("UVA", "temperature, top_p, top_k, seed: one row each"),
}
"""Where each runner keeps a column, and what it means."""


def view_model(record: StepRecord) -> dict[str, Any]:
    """One panel a runner: columns, displayed rows (used, free, or a fold of free ones) and V1's moves.

    A cell is {v: visible pieces, c: changed, t: tooltip}; a move names displayed rows by their place, {src, dst, …}.
    """
    return {"step": record.step, "panels": [_panel(step, record) for step in record.runners.values()]}


def figure(record: StepRecord) -> Html:
    """The static twin: the same tables in HTML with inline styles."""
    return Html(f"state rows of step {record.step}", draw(view_model(record)))


class StateRowsView(LiveView, static="state_rows"):
    """The live state rows view."""

    view_model = staticmethod(view_model)


def _panel(step: RunnerStep, record: StepRecord) -> dict[str, Any]:
    before = {row.row: row for row in step.before.rows}
    keys = _keys(step)
    show = _Rows(step, record, keys)
    rows = _fold([show.row(row, before.get(row.row)) for row in sorted(step.snapshot.rows, key=lambda row: row.row)])
    places = {int(row["row"]): i for i, row in enumerate(rows) if row["kind"] != "fold"}
    about = [_COLUMNS.get((step.runner, key), ("", key)) for key in keys]
    return {
        "runner": step.runner,
        "title": TITLES[step.runner],
        "note": _note(step, rows),
        "columns": [{"key": key, "where": where, "title": tip} for key, (where, tip) in zip(keys, about, strict=True)],
        "rows": rows,
        "moves": _moves(step, places, record.colors),
    }


def _keys(step: RunnerStep) -> list[str]:
    """The columns in the engine's order; the sampling parameters share one, and V2's batch position leads."""
    keys = list(dict.fromkeys(key for row in (*step.snapshot.rows, *step.before.rows) for key in row.cells))
    shown = [key for key in keys if key not in _SAMPLING]
    first = ["idx_mapping"] if step.runner == "v2" else []
    drafts = ["drafts"] if any(row.draft_token_ids for row in (*step.snapshot.rows, *step.before.rows)) else []
    return [*first, *shown, *drafts, *(["sampling"] if len(shown) < len(keys) else [])]


class _Rows:
    """What every row of one runner's step needs to be shown."""

    def __init__(self, step: RunnerStep, record: StepRecord, keys: list[str]) -> None:
        self.step, self.record, self.keys = step, record, keys
        gathered = next((e.idx_mapping for e in step.of(BlockTableGathered)), ())
        self.batch = {row: position for position, row in enumerate(gathered)}
        self.finished = {view.request_id for view in step.snapshot.requests if view.status == "finished"}
        self.moves: list[RowMoved] = list(step.of(RowMoved))
        self.touched = {e.row for e in step.of(RowFreed, RowWritten)} | {r for e in self.moves for r in (e.src, e.dst)}

    def row(self, row: RowView, old: RowView | None) -> dict[str, Any]:
        was = old.request_id or "" if old else ""
        if row.request_id is None:
            keep = bool(was) or row.row in self.touched
            return {"row": str(row.row), "kind": "free", "keep": keep, "note": self._left(row.row, was)}
        notes = []
        if move := next((e for e in reversed(self.moves) if e.dst == row.row and e.request_id == row.request_id), None):
            notes.append(f"{move.how}: from row {move.src} to row {move.dst}")
        elif was != row.request_id:
            notes.append("new in this row")
        if row.request_id in self.finished:
            notes.append("finished: the row is given back in the next step")
        return {
            "row": str(row.row),
            "kind": "used",
            "id": row.request_id,
            "color": self.record.colors.get(row.request_id, "#999999"),
            "changed": was != row.request_id,
            "dim": row.request_id in self.finished,
            "note": " · ".join(notes),
            "cells": [self._cell(key, row, old if was else None) for key in self.keys],
        }

    def _cell(self, key: str, row: RowView, old: RowView | None) -> dict[str, Any]:
        if key == "idx_mapping":
            position = self.batch.get(row.row)
            tip = "not in this step" if position is None else f"idx_mapping[{position}] = {row.row}"
            return {"v": [_number(position)], "c": False, "t": tip}
        now, tip = _value(row, key, self.record.token_text)
        was = _value(old, key, self.record.token_text) if old else None
        if was == (now, tip):
            return {"v": now, "c": False, "t": tip}
        held = f" (the row held {old.request_id})" if old and old.request_id != row.request_id else ""
        change = f"{key}: {''.join(was[0]) if was else 'empty'} → {''.join(now)}{held}"
        return {"v": now, "c": True, "t": f"{change} · {tip}" if tip else change}

    def _left(self, row: int, was: str) -> str:
        if not was:
            return "free" if self.step.runner == "v2" else "empty"
        move = next((e for e in self.moves if e.src == row), None)
        return f"{move.request_id} moved to row {move.dst}" if move else f"{was} left: the row is free"


def _value(row: RowView, key: str, text: Mapping[int, str]) -> tuple[Sequence[str], str]:
    """What a cell shows, and what its tooltip adds."""
    if key == "sampling":
        given = {name: row.cells.get(name) for name in _SAMPLING if row.cells.get(name) is not None}
        return [_sampling(given)], ", ".join(f"{name} {_number(value)}" for name, value in given.items())
    if key == "drafts":
        return _drafts(row, text)
    value = row.cells.get(key)
    if value is None or key not in ("last_token", "last_sampled_token"):
        return [_number(value)], ""
    token = int(value)
    if token < 0:
        return ["", "in flight"], "-1"
    if key == "last_sampled_token" and (row.cells.get("total_len") or 0) <= (row.cells.get("prefill_len") or 0):
        return ["–"], f"holds {token} from an earlier use: nothing is sampled in this row yet"
    return piece(token, text), f"token {token}"


def _drafts(row: RowView, text: Mapping[int, str]) -> tuple[Sequence[str], str]:
    if not row.draft_token_ids:
        return ["–"], ""
    sure = row.confidences or ()
    about = [
        f"draft {j}: token {token}" + (f", confidence {sure[j - 1]:.2f}" if sure else "")
        for j, token in enumerate(row.draft_token_ids, 1)
    ]
    return [part for token in row.draft_token_ids for part in piece(token, text)], " · ".join(about)


def _sampling(given: Mapping[str, int | float | None]) -> str:
    if not given.get("temperature"):
        return "greedy"
    off = {"top_p": (1,), "top_k": (0, -1), "min_p": (0,)}
    short = {"top_p": "p", "top_k": "k", "min_p": "min"}
    parts = [f"{short[n]} {_number(given[n])}" for n in short if n in given and given[n] not in off[n]]
    return " ".join([f"T {_number(given['temperature'])}", *parts])


def _number(value: int | float | None) -> str:
    return "–" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def _fold(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    out: list[dict[str, Any]] = []
    stretch: list[dict[str, Any]] = []
    for row in [*rows, None]:
        if row is not None and row["kind"] == "free" and not row["keep"]:
            stretch.append(row)
            continue
        if len(stretch) > _FOLD:
            first, last = stretch[0], stretch[-1]
            name = f"{first['row']}–{last['row']}"
            out.append({"row": name, "kind": "fold", "note": f"{len(stretch)} {first['note']} rows"})
        else:
            out += stretch
        stretch = []
        if row is not None:
            out.append(row)
    return out


def _moves(step: RunnerStep, places: Mapping[int, int], colors: Mapping[str, str]) -> list[dict[str, Any]]:
    return [
        {
            "src": places[move.src],
            "dst": places[move.dst],
            "how": move.how,
            "ids": f"{move.request_id} {other}".strip(),
            "color": colors.get(move.request_id, "#999999"),
            "t": f"{move.how}: {move.request_id} from row {move.src} to row {move.dst}"
            + (f", {other} the other way" if other else ""),
        }
        for move, other in row_moves(step)
        if move.src in places and move.dst in places
    ]


def _note(step: RunnerStep, rows: list[dict[str, Any]]) -> str:
    if step.runner == "v2":
        return f"fixed rows; {sum(row['kind'] == 'used' for row in rows)} of {len(step.snapshot.rows)} taken"
    moves = [
        f"{move.request_id} moved {move.src}→{move.dst}"
        if move.how == "condense"
        else f"{move.request_id} and {other} swapped {move.src}↔{move.dst}"
        for move, other in row_moves(step)
    ]
    more = f" and {len(moves) - 3} more" if len(moves) > 3 else ""
    return f"dense rows; {', '.join(moves[:3])}{more}" if moves else "dense rows"
