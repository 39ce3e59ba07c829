"""The acceptance view: the drafts of each block beside p, q, u and confidence, and what became of them.

Beside a request's newest blocks stand numbers of all requests: acceptance by position, accepted lengths over time, and
confidences held to outcomes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import traitlets

from ..html import Html
from ..recording import StepRecord
from ..widget import LiveView
from .acceptance_figure import draw as draw_figure
from .acceptance_numbers import Round, by_position, over_time
from .pieces import piece
from .reliability import confidence_reliability
from .reliability_figure import draw as draw_reliability

BLOCKS = 8
"""So many of a request's blocks are shown, the newest."""
CLOSED: dict[str, Any] = {"open": False, "note": "", "requests": [], "panels": []}
SYNTHETIC = (
    "synthetic: drafts are accepted at given rates, whatever the model says. The tokens are not the model's, and these "
    "numbers say nothing about the drafter."
)
HELP = {
    "accepted": "the draft stands",
    "rejected": "the first draft that does not stand",
    "dropped": "thrown away with the rejected one, whatever its own numbers",
    "corrected": "drawn by the target in place of the rejected draft",
    "bonus": "drawn by the target behind drafts that all stand",
}
"""The outcomes of a token, and what each means."""


def view_model(record: StepRecord, request_id: str | None = None) -> dict[str, Any]:
    """The newest blocks of a request, the first that had drafts if left out, and the numbers of all.

    Without traces `CLOSED`. Raises ValueError for a request that has none.
    """
    rounds = traced(record)
    known = _requests(record, rounds)
    if not known:
        return CLOSED
    chosen = known[0] if request_id is None else request_id
    if chosen not in known:
        raise ValueError(f"no drafts of request {chosen!r} are traced here; traced are {', '.join(known)}")
    return {
        "open": True,
        "note": f"request {chosen}, its newest blocks; the numbers are of all requests",
        "requests": [[r, record.colors.get(r, "#999999"), r == chosen] for r in known],
        "panels": [_panel(name, own, chosen, record) for name, own in rounds.items() if own],
    }


def figure(record: StepRecord, request_id: str | None = None) -> Html:
    """The static twin. Raises ValueError, saying what there is, where no such drafts are traced."""
    model = view_model(record, request_id)
    if not model["open"]:
        raise ValueError(
            "no drafts are traced here: make the session with trace_drafts=True and a speculative_config, or set it, "
            "and step on"
        )
    return Html(f"acceptance of {model['note']}", draw_figure(model))


def reliability_figure(record: StepRecord) -> Html:
    """Of the static twin the confidences alone. Raises ValueError where no draft came with one."""
    speculation = record.history.meta.get("speculation") or {}
    every = [one for rounds in traced(record).values() for one in rounds]
    found = confidence_reliability(every, speculation.get("calibration"))
    if found is None:
        raise ValueError(
            "no drafts with confidences are traced here: make the session with trace_drafts=True and a "
            "speculative_config of method 'dspark' with a model, and step on"
        )
    return Html(f"reliability of confidences up to step {record.step}", draw_reliability(found))


def traced(record: StepRecord) -> dict[str, list[Round]]:
    """Every round up to this record that was traced, by runner, in their order."""
    return {
        name: [Round(step.step, *pair) for step in record.history.steps for pair in step.runners[name].rounds]
        for name in record.runners
    }


class AcceptanceView(LiveView, static="acceptance"):
    """The live acceptance view. The page sets `watching` and `request` ("" is the first). While it is not watching it
    computes nothing."""

    view_model = staticmethod(view_model)
    watching = traitlets.Bool(True).tag(sync=True)
    request = traitlets.Unicode("").tag(sync=True)
    _record: StepRecord | None = None

    def show(self, record: StepRecord) -> None:
        """Draws this record, if somebody is watching."""
        self._step, self._record = record.step, record
        self._draw()

    @traitlets.observe("watching", "request")
    def _draw(self, _change: Any = None) -> None:
        if self._record is None:
            return
        if not self.watching:
            self.model = CLOSED
            return
        # What was chosen may not be there: the cursor went back, or the session began anew.
        known = _requests(self._record, traced(self._record))
        model = view_model(self._record, self.request if self.request in known else None)
        waits = "no drafts are traced yet: with a speculative_config, step on"
        self.model = model if model["open"] else {**CLOSED, "open": True, "note": waits}


def _requests(record: StepRecord, rounds: dict[str, list[Round]]) -> list[str]:
    """Those that had drafts, in the order in which they came."""
    there = {one.proposed.request_id for own in rounds.values() for one in own}
    return [r for r in dict.fromkeys([*record.prompts, *sorted(there)]) if r in there]


def _panel(runner: str, rounds: Sequence[Round], request_id: str, record: StepRecord) -> dict[str, Any]:
    method = rounds[-1].verified.method
    own = [one for one in rounds if one.proposed.request_id == request_id]
    earlier = len(own) - BLOCKS
    accepted = sum(one.verified.num_accepted for one in rounds)
    speculation = record.history.meta.get("speculation") or {}
    return {
        "title": runner.upper(),
        "rule": f"{method} rejection",
        "synthetic": SYNTHETIC if method == "synthetic" else "",
        "say": (
            f"{len(rounds):,} blocks with {sum(one.num_drafts for one in rounds):,} drafts: {accepted:,} accepted, "
            f"{1 + accepted / len(rounds):.2f} tokens a block with the target's own"
        ),
        "blocks": [_block(one, record) for one in own[-BLOCKS:]],
        "more": f"{earlier} earlier" if earlier > 0 else "",
        "positions": by_position(rounds),
        "history": over_time(rounds),
        "reliability": confidence_reliability(rounds, speculation.get("calibration")),
    }


def _block(one: Round, record: StepRecord) -> dict[str, Any]:
    """A round: where it stands, how many were accepted, and its tokens, the target's own last."""
    proposed, verified = one.proposed, one.verified
    cells = []
    for k, token in enumerate(proposed.token_ids):
        kind = "accepted" if k < verified.num_accepted else "rejected" if k == verified.num_accepted else "dropped"
        values = {"p": verified.target_probs[k], "q": proposed.draft_probs[k], "u": verified.uniforms[k]}
        if proposed.confidences is not None:
            values["c"] = proposed.confidences[k]
        cells.append(_cell(kind, token, proposed.position + k, values, record))
    kind = "bonus" if verified.num_accepted == one.num_drafts else "corrected"
    cells.append(_cell(kind, verified.next_token_id, proposed.position + verified.num_accepted, {}, record))
    return {
        "at": proposed.position,
        "step": one.step,
        "n": f"{verified.num_accepted} of {one.num_drafts}",
        "cells": cells,
    }


def _cell(kind: str, token: int, position: int, values: dict[str, float], record: StepRecord) -> dict[str, Any]:
    """k: the outcome; p: the token's pieces; v: its numbers; t: a tooltip."""
    exact = "".join(f", {name} = {value:.5f}" for name, value in values.items())
    return {
        "k": kind,
        "p": piece(token, record.token_text),
        "v": [[name, _number(value)] for name, value in values.items()],
        "t": f"{kind}: {HELP[kind]}; token {token} at position {position}{exact}",
    }


def _number(value: float) -> str:
    return "<.01" if 0 < value < 0.005 else f"{value:.2f}".removeprefix("0")
