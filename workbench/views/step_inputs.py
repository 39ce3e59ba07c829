"""The step inputs view: the tensors the model got in this step, cut at the requests, and who made each.

Every token is a column, every tensor a line, so that a token can be read from its id down to its KV slot. Where V1 and
V2 fed the same numbers they are drawn once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from engine.hooks import InputsPrepared
from engine.snapshot import InputsView

from ..html import Html
from ..recording import RunnerStep, StepRecord
from ..widget import LiveView
from .pieces import piece
from .step_inputs_figure import draw

_SHOWN = 24
"""About so many token columns are drawn; longer requests fold in their middle."""
_ABOUT = {
    "input_ids": "the token ids, one a token of the step",
    "positions": "the token's place in its request",
    "query_start_loc": "where each request's tokens begin; the last entry is their number",
    "seq_lens": "tokens of the request that attention sees: computed before and in this step",
    "slot_mapping": "where the token's K and V go: block id x block size + place in the block; -1 writes nothing",
    "logits_indices": "the tokens whose logits are sampled from",
}

Cell = dict[str, Any]
"""v: visible pieces; n: columns it spans; t: tooltip; k: "" or gap, pad, end; r: the request, where it has one."""


@dataclass(frozen=True)
class _Group:
    """A request's tokens, or the padding's: columns `start`..`start + count - 1` of the tensors; some are drawn.

    An index of None in `drawn` is the fold that stands for those left out.
    """

    request_id: str
    start: int
    count: int
    drawn: tuple[int | None, ...]


def view_model(record: StepRecord) -> dict[str, Any]:
    """Panels of bands and lines of cells, one where the runners fed the same; and who made each tensor."""
    steps = list(record.runners.values())
    inputs = [step.snapshot.inputs for step in steps]
    if len(steps) == 2 and inputs[0] and inputs[1] and replace(inputs[0], made_by={}) == replace(inputs[1], made_by={}):
        panels = [_panel(steps, record)]
    else:
        panels = [_panel([step], record) for step in steps]
    return {"step": record.step, "panels": panels, "made": _made(steps)}


def figure(record: StepRecord) -> Html:
    """The static twin: the same tables in HTML with inline styles."""
    return Html(f"inputs of step {record.step}", draw(view_model(record)))


class StepInputsView(LiveView, static="step_inputs"):
    """The live step inputs view."""

    view_model = staticmethod(view_model)


def _panel(steps: Sequence[RunnerStep], record: StepRecord) -> dict[str, Any]:
    names = " and ".join(step.runner.upper() for step in steps)
    step, inputs = steps[0], steps[0].snapshot.inputs
    if inputs is None:
        return {"title": names, "note": "no inputs yet: no step has run", "bands": [], "lines": [], "stale": False}
    stale = not any(True for _ in step.of(InputsPrepared))
    padding = inputs.num_tokens_padded - inputs.num_tokens
    note = f"{inputs.num_tokens} tokens of {len(inputs.req_ids)} request{'s' if len(inputs.req_ids) != 1 else ''}"
    note += f", padded to {inputs.num_tokens_padded}" if padding else ""
    note += (
        " · of an earlier step: this one has prepared none" if stale else ", the same numbers" if len(steps) > 1 else ""
    )
    groups = _groups(inputs)
    size = step.snapshot.pool.block_size
    text = record.token_text
    lines = [
        _line("token", _per_token(groups, lambda i: _text(inputs, i, text))),
        _line("input_ids", _per_token(groups, lambda i: (_at(inputs.input_ids, i), _tip(inputs, i, text)))),
        _line("positions", _per_token(groups, lambda i: (_at(inputs.positions, i), ""))),
        _line("query_start_loc", _per_request(groups, inputs.query_start_loc)),
        _line("seq_lens", _per_request(groups, inputs.seq_lens)),
        _line("slot_mapping", _per_token(groups, lambda i: (_at(inputs.slot_mapping, i), _slot(inputs, i, size)))),
        _line("logits_indices", _per_token(groups, lambda i: (str(i) if i in inputs.logits_indices else "", ""))),
    ]
    return {
        "title": names, "note": note, "stale": stale, "lines": lines,
        "bands": [_band(group, inputs, record.colors) for group in groups],
    }  # fmt: skip


def _made(steps: Sequence[RunnerStep]) -> dict[str, Any]:
    """A line for each tensor, and for each runner its maker: [lane, words], the lane host or compute."""
    by = {step.runner.upper(): step.snapshot.inputs.made_by for step in steps if step.snapshot.inputs}
    names = [name for name in _ABOUT if any(name in made for made in by.values())]
    names += [name for name in dict.fromkeys(name for made in by.values() for name in made) if name not in _ABOUT]
    lines = [
        [name, [[_lane(made[name]), made[name]] if name in made else ["", "–"] for made in by.values()]]
        for name in names
    ]
    return {"runners": list(by), "lines": lines}


def _lane(maker: str) -> str:
    return "host" if maker.split()[0].strip(",") in ("host", "numpy") else "compute"


def _groups(inputs: InputsView) -> list[_Group]:
    counts = dict(zip(inputs.req_ids, inputs.num_scheduled_tokens, strict=True))
    limit = inputs.num_tokens_padded if inputs.num_tokens_padded <= _SHOWN else max(3, _SHOWN // (len(counts) + 1))
    groups, start = [], 0
    for request_id, count in [*counts.items(), ("", inputs.num_tokens_padded - inputs.num_tokens)]:
        if count:
            groups.append(_Group(request_id, start, count, _drawn(start, count, limit)))
        start += count
    return groups


def _drawn(start: int, count: int, limit: int) -> tuple[int | None, ...]:
    if count <= limit:
        return tuple(range(start, start + count))
    head = (limit - 1) - (limit - 1) // 2
    tail = limit - 1 - head
    return (*range(start, start + head), None, *range(start + count - tail, start + count))


def _band(group: _Group, inputs: InputsView, colors: Mapping[str, str]) -> dict[str, Any]:
    count = f"{group.count} token{'s' if group.count > 1 else ''}"
    tip = f"{group.request_id}: {count} in this step" if group.request_id else f"{group.count} places of padding"
    label = group.request_id or ("padding" if len(group.drawn) > 1 else "pad")
    color = colors.get(group.request_id, "#999999") if group.request_id else ""
    return {
        "id": group.request_id,
        "label": label,
        "count": group.count,
        "n": len(group.drawn),
        "color": color,
        "t": tip,
    }


def _line(name: str, cells: list[Cell]) -> dict[str, Any]:
    return {"name": name, "t": _ABOUT.get(name, "the token's text"), "cells": cells}


def _per_token(groups: Sequence[_Group], show: Callable[[int], tuple[str | tuple[str, ...], str]]) -> list[Cell]:
    """One cell a drawn column; a fold says in its tooltip how many it hides, and between which values they lie."""
    cells: list[Cell] = []
    for group in groups:
        for place, i in enumerate(group.drawn):
            if i is None:
                first, last = group.drawn[place - 1], group.drawn[place + 1]
                assert first is not None and last is not None
                ends = [_flat(show(i)[0]) for i in (first + 1, last - 1)]
                tip = f"{last - first - 1} tokens folded: {ends[0]} … {ends[1]}" if any(ends) else ""
                shown = ["…"] if tip else [""]
                cells.append({"v": shown, "n": 1, "t": tip, "k": "fold", "r": group.request_id, "first": False})
                continue
            value, tip = show(i)
            kind = "" if group.request_id else "pad"
            pieces = [value] if isinstance(value, str) else value
            cells.append({"v": pieces, "n": 1, "t": tip, "k": kind, "r": group.request_id, "first": place == 0})
    return cells


def _per_request(groups: Sequence[_Group], values: Sequence[int]) -> list[Cell]:
    """One cell a request, over its columns; what goes beyond the requests stands over the padding, or at the end."""
    cells: list[Cell] = []
    requests = [group for group in groups if group.request_id]
    for i, group in enumerate(requests):
        value = _at(values, i)
        cells.append({"v": [value], "n": len(group.drawn), "t": "", "k": "", "r": group.request_id, "first": True})
    rest = " ".join(map(str, values[len(requests) :]))
    if len(groups) > len(requests):
        cells.append({"v": [rest], "n": len(groups[-1].drawn), "t": "", "k": "pad", "r": "", "first": True})
    elif rest:
        cells.append({"v": [rest], "n": 1, "t": "", "k": "end", "r": "", "first": True})
    return cells


def _text(inputs: InputsView, i: int, text: Mapping[int, str]) -> tuple[tuple[str, ...], str]:
    token = _token(inputs, i)
    return (("",) if token is None or i >= inputs.num_tokens else piece(token, text)), _tip(inputs, i, text)


def _tip(inputs: InputsView, i: int, text: Mapping[int, str]) -> str:
    token = _token(inputs, i)
    if i >= inputs.num_tokens:
        return "padding: computed for nothing, written nowhere"
    return "" if token is None else f"{''.join(piece(token, text))}  (token {token})"


def _token(inputs: InputsView, i: int) -> int | None:
    return inputs.input_ids[i] if i < len(inputs.input_ids) else None


def _slot(inputs: InputsView, i: int, size: int) -> str:
    if i >= len(inputs.slot_mapping):
        return ""
    slot = inputs.slot_mapping[i]
    return "no slot: writes nothing" if slot < 0 else f"block {slot // size} × {size} + {slot % size}"


def _at(values: Sequence[int], i: int) -> str:
    return str(values[i]) if i < len(values) else ""


def _flat(value: str | tuple[str, ...]) -> str:
    return value if isinstance(value, str) else "".join(value)
