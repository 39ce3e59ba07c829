"""The sampling view: how one token was drawn. Tokens are lines, the sampler's stages columns, a bar is a probability.

A line can be followed from the model's logits through every processor to the race of logit + noise. Where V1 and V2
draw from the same distribution it is drawn once, with a race for each; a stage that left the row as it was has no
column.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import traitlets

from engine.sample.trace import SamplingTrace

from ..html import Html
from ..recording import StepRecord
from ..widget import LiveView
from .pieces import piece, visible
from .sampling_figure import draw as draw_figure
from .sampling_panel import panels

WINDOW = 40
"""So many of a request's tokens can be chosen at once: those around the chosen one."""
CONTEXT = 48
"""Characters of the prompt's end that stand before them."""
CLOSED: dict[str, Any] = {
    "open": False,
    "note": "",
    "requests": [],
    "before": [],
    "tokens": [],
    "pinned": False,
    "panels": [],
}

Draws = dict[str, dict[int, dict[str, SamplingTrace]]]
"""By request, position and runner."""


def view_model(record: StepRecord, request_id: str | None = None, position: int | None = None) -> dict[str, Any]:
    """The draw of the token at `position` of a request; left out, of the first request's newest token that was traced.

    Without traces `CLOSED`. Raises ValueError for a request or a position that has none.
    """
    draws = traced(record)
    if not draws:
        return CLOSED
    request_id = next(iter(draws)) if request_id is None else request_id
    if request_id not in draws:
        raise ValueError(f"no draw of request {request_id!r} is traced here; traced are {', '.join(draws)}")
    own = draws[request_id]
    newest = max(own)
    chosen = newest if position is None else position
    if chosen not in own:
        raise ValueError(f"no draw at position {chosen} of request {request_id}: traced are {min(own)} to {newest}")
    places = sorted(own)
    first = max(0, min(places.index(chosen) - WINDOW // 2, len(places) - WINDOW))
    parted = next((place for place in places if len({trace.sampled for trace in own[place].values()}) > 1), None)
    hidden = f"… {first} more " if first else ""
    apart = f"; V1 and V2 part at position {parted}" if parted is not None else ""
    before = visible(hidden or record.prompts.get(request_id, "")[-CONTEXT:])
    return {
        "open": True,
        "note": f"request {request_id}, position {chosen}{', the newest' if chosen == newest else ''}{apart}",
        "requests": [[r, record.colors.get(r, "#999999"), r == request_id] for r in draws],
        "before": before,
        "tokens": [
            _choice(own[place], place, place == chosen, place == parted, record)
            for place in places[first : first + WINDOW]
        ],
        "pinned": position is not None,
        "panels": panels(own[chosen], chosen, record.token_text),
    }


def figure(record: StepRecord, request_id: str | None = None, position: int | None = None) -> Html:
    """The static twin. Raises ValueError, saying what there is, where no such draw is traced."""
    if not traced(record):
        raise ValueError("no draw is traced here: make the session with trace_sampling=True, or set it, and step on")
    model = view_model(record, request_id, position)
    return Html(f"sampling of {model['note']}", draw_figure(model))


def traced(record: StepRecord) -> Draws:
    """Every draw up to this record that was traced; requests in the order of their names."""
    found: Draws = {}
    for step in record.history.steps:
        for runner, done in step.runners.items():
            for event in done.draws:
                found.setdefault(event.request_id, {}).setdefault(event.position, {})[runner] = event.trace
    # A runner may bring a position's draw a step later than the other; the runners' order stays V1, V2.
    return {
        r: {position: dict(sorted(by.items())) for position, by in found[r].items()}
        for r in [*record.prompts, *found]
        if r in found
    }


class SamplingView(LiveView, static="sampling"):
    """The live sampling view. The page sets `watching`, `request` ("" is the first) and `position` (-1 is the
    newest). While it is not watching it computes nothing."""

    view_model = staticmethod(view_model)
    watching = traitlets.Bool(True).tag(sync=True)
    request = traitlets.Unicode("").tag(sync=True)
    position = traitlets.Int(-1).tag(sync=True)
    _record: StepRecord | None = None

    def show(self, record: StepRecord) -> None:
        """Draws this record, if somebody is watching."""
        self._step, self._record = record.step, record
        self._draw()

    @traitlets.observe("watching", "request", "position")
    def _draw(self, _change: Any = None) -> None:
        if self._record is None:
            return
        if not self.watching:
            self.model = CLOSED
            return
        # What was chosen may not be there: the cursor went back, or the session began anew.
        draws = traced(self._record)
        request = self.request if self.request in draws else next(iter(draws), None)
        position = self.position if self.position in draws.get(request or "", {}) else None
        waits = "no draw is traced yet: step on, and watch how the next tokens are drawn"
        model = view_model(self._record, request, position)
        self.model = model if model["open"] else {**CLOSED, "open": True, "note": waits}


def _choice(
    runners: Mapping[str, SamplingTrace], position: int, chosen: bool, differs: bool, record: StepRecord
) -> dict[str, Any]:
    """A token that can be chosen: p pieces, t tooltip, at its position, and whether here the runners part."""
    pieces = {name.upper(): piece(trace.sampled, record.token_text) for name, trace in runners.items()}
    drawn = ", ".join(f"{name} drew {''.join(p)!r}" for name, p in pieces.items())
    *_, shown = pieces.values()
    return {"p": shown, "t": f"position {position}: {drawn}", "at": position, "chosen": chosen, "differs": differs}
