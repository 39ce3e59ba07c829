"""The tokens view: each request's text, token by token, coloured by where a token came from, and why the step looks so.

What V1 and V2 have alike is drawn once; where they part, each has its line and the first differing token is marked.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

from engine.hooks import RequestScheduled, Sampled
from engine.snapshot import RequestView

from ..html import Html
from ..recording import RunnerStep, StepRecord
from ..widget import LiveView
from .pieces import piece
from .tokens_figure import draw
from .why import why

_SHOWN = 1200
"""About so many tokens are drawn; longer stretches of one kind fold in their middle."""
LEGEND = {
    "prompt": "prompt",
    "cached": "prefix cache hit",
    "sampled": "sampled",
    "flight": "in flight",
    "todo": "not computed yet",
    "fed": "input of this step",
    "new": "new in this step",
    "differs": "V1 and V2 part",
}
_ORIGIN = {"prompt": "of the prompt", "cached": "of the prompt, found in the prefix cache", "sampled": "sampled"}

Token = dict[str, Any]
"""k: kind (prompt, cached, sampled, flight, fold); f: flags (todo, fed, new, differs); p: pieces; t: tooltip."""


@dataclass(frozen=True)
class _Line:
    """One request on one runner. `marks[i]` holds for the positions from `cuts[i]` to before `cuts[i + 1]`."""

    ids: tuple[int, ...]
    cuts: tuple[int, ...]
    marks: tuple[tuple[str, ...], ...]
    notes: list[dict[str, Any]]
    dim: bool
    sampled_in: dict[int, int]


def view_model(record: StepRecord) -> dict[str, Any]:
    """Per request its lines (one where the runners agree) of tokens, folds and notes; legend; sentences."""
    drawn: dict[str, dict[str, _Line]] = {}
    for name, step in record.runners.items():
        for request_id, line in _lines(step):
            drawn.setdefault(request_id, {})[name] = line
    order = [r for r in record.prompts if r in drawn] + [r for r in drawn if r not in record.prompts]
    several = len(record.runners) > 1
    lines = {r: _merged(drawn[r], len(record.runners)) for r in order}
    parted = {r: place for r in order if several and (place := _parting(drawn[r])) is not None}
    limit = max(6, min(80, _SHOWN // max(1, 2 * sum(map(len, lines.values())))))
    requests = []
    for r in order:
        shown = [
            {
                "runners": name.upper() if several else "",
                "tokens": list(_tokens(line, parted.get(r), limit, record.token_text)),
                "notes": line.notes,
                "dim": line.dim,
            }
            for name, line in lines[r].items()
        ]
        requests.append({"id": r, "color": record.colors.get(r, "#999999"), "lines": shown})
    present = {
        mark for request in lines.values() for line in request.values() for marks in line.marks for mark in marks
    }
    present |= {"differs"} if parted else set()
    return {
        "step": record.step,
        "note": _agreement(list(parted)) if several and order else "",
        "requests": requests,
        "legend": [[mark, label] for mark, label in LEGEND.items() if mark in present],
        "why": why(record),
    }


def figure(record: StepRecord) -> Html:
    """The static twin: the same tokens in HTML with inline styles."""
    return Html(f"tokens of step {record.step}", draw(view_model(record)))


class TokensView(LiveView, static="tokens"):
    """The live tokens view."""

    view_model = staticmethod(view_model)


def _agreement(parted: Sequence[str]) -> str:
    if parted:
        return f"V1 and V2 part on {', '.join(parted[:6])}{' …' if len(parted) > 6 else ''}"
    return "V1 and V2 agree"


def _merged(lines: dict[str, _Line], runners: int) -> dict[str, _Line]:
    """One line, of no runner, where both have the same; else one each."""
    first, *others = lines.values()
    return {"": first} if len(lines) == runners and all(line == first for line in others) else lines


def _parting(lines: Mapping[str, _Line]) -> int | None:
    """The first position where two runners hold different tokens. To be the other's beginning is no parting."""
    first, *others = lines.values()
    pairs = enumerate(zip(first.ids, others[0].ids, strict=False)) if others else ()
    return next((position for position, (a, b) in pairs if a != b), None)


def _lines(step: RunnerStep) -> Iterator[tuple[str, _Line]]:
    before = {view.request_id: len(view.output_token_ids) for view in step.before.requests}
    fed = {
        e.request_id: (e.num_computed_tokens, e.num_computed_tokens + e.num_tokens) for e in step.of(RequestScheduled)
    }
    sampled_in: dict[str, dict[int, int]] = {}
    for e in step.of(Sampled):
        sampled_in.setdefault(e.request_id, {})[e.position] = e.sampled_in_step
    for view in step.snapshot.requests:
        request_id = view.request_id
        ids = (*view.prompt_token_ids, *view.output_token_ids)
        # What a finished request still has in flight is thrown away when it arrives.
        total = len(ids) + (view.num_output_placeholders if view.status != "finished" else 0)
        new = len(view.prompt_token_ids) + before.get(request_id, 0)
        first, last = fed.get(request_id, (0, 0))
        places = {0, len(view.prompt_token_ids), view.num_cached_tokens, view.num_computed_tokens, new, first, last}
        cuts = sorted({min(max(place, 0), total) for place in (*places, len(ids) - 1, len(ids), total)})
        marks = tuple(_marks(view, new, range(first, last), position) for position in cuts[:-1])
        dim = view.status == "finished" and request_id not in fed
        line = _Line(ids, tuple(cuts), marks, _notes(view, step), dim, sampled_in.get(request_id, {}))
        yield request_id, line


def _marks(view: RequestView, new: int, fed: range, position: int) -> tuple[str, ...]:
    """The kind and the flags of the token at `position`."""
    prompt_len, known = len(view.prompt_token_ids), len(view.prompt_token_ids) + len(view.output_token_ids)
    flags = ["fed"] if position in fed else []
    if position >= known:
        return ("flight", *flags)
    kind = "sampled" if position >= prompt_len else "cached" if position < view.num_cached_tokens else "prompt"
    # The last sampled token is not computed either, but that is no debt: it is the next step's input.
    owed = position < known - 1 or position < prompt_len
    if position >= view.num_computed_tokens and owed and view.status != "finished":
        flags.append("todo")
    if position >= new:
        flags.append("new")
    return (kind, *flags)


def _notes(view: RequestView, step: RunnerStep) -> list[dict[str, Any]]:
    """Small words after the text; `done` of a note is the part of its bar that is full."""
    again = view.num_preemptions > 0
    notes: list[dict[str, Any]] = []
    if view.status == "finished":
        notes.append({"k": "finished", "text": f"finished: {view.finish_reason}"})
    elif view.status == "preempted":
        notes.append({"k": "preempted", "text": "preempted, waits for blocks"})
    elif view.status == "waiting":
        queue = step.snapshot.waiting
        place = f", {queue.index(view.request_id) + 1} of {len(queue)} in the queue" if view.request_id in queue else ""
        notes.append({"k": "waiting", "text": f"waits{place}"})
    else:
        total = len(view.prompt_token_ids) + (len(view.output_token_ids) if again else 0)
        done = view.num_computed_tokens
        # A resumed request is through its prefill once all but the newest token is computed.
        if done < total - (1 if again and view.output_token_ids else 0):
            notes.append({"k": "prefill", "text": f"prefill {done} / {total}", "done": done / total})
    if again and view.status != "preempted":
        notes.append({"k": "waiting", "text": f"preempted {view.num_preemptions}× before"})
    return notes


def _tokens(line: _Line, parting: int | None, limit: int, text: Mapping[int, str]) -> Iterator[Token]:
    """The tokens of a line; of each stretch with the same marks that is longer than `limit`, the middle as one fold."""
    stretches = [(start, stop, marks) for (start, stop), marks in zip(pairwise(line.cuts), line.marks, strict=True)]
    for (kind, *flags), group in groupby(stretches, key=lambda stretch: stretch[2]):
        spans = list(group)
        start, stop = spans[0][0], spans[-1][1]
        folded = range(start + limit // 2, stop - (limit - limit // 2)) if stop - start > limit + 2 else range(0)
        for position in range(start, stop):
            if position not in folded:
                yield _token(line, position, kind, flags, position == parting, text)
            elif position == folded.start:
                hidden = "".join("".join(piece(line.ids[place], text)) for place in folded)
                yield {"k": "fold", "f": [kind, *flags], "p": [f"{len(folded)} more"], "t": hidden}


def _token(line: _Line, position: int, kind: str, flags: list[str], parts: bool, text: Mapping[int, str]) -> Token:
    if kind == "flight":
        tip = f"position {position} · sampled on the device, not yet on the host"
        return {"k": kind, "f": flags, "p": ["…"], "t": tip}
    flags = [*flags, "differs"] if parts else flags
    token = line.ids[position]
    return _known(token, piece(token, text), position, kind, tuple(flags), line.sampled_in.get(position))


@functools.lru_cache(maxsize=1 << 14)
def _known(
    token: int, pieces: tuple[str, ...], position: int, kind: str, flags: tuple[str, ...], sampled_in: int | None
) -> Token:
    """Most tokens of a step are those of the step before."""
    tip = f"token {token} · position {position} · {_ORIGIN[kind]}"
    tip += f" in step {sampled_in}" if sampled_in is not None else ""
    tip += "".join(f" · {LEGEND[flag]}" for flag in flags)
    return {"k": kind, "f": flags, "p": pieces, "t": tip}
