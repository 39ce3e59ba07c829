"""The static twin of the tokens: HTML with inline styles. Every kind and flag differs by form as well as by colour."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..html import Markup, h, join

_INKS = {"prompt": "#bbbbbb", "cached": "#56B4E9", "sampled": "#0072B2"}
_QUIET = "color:#667078"
_PILL = (
    "display:inline;color:#667078;font-size:11px;cursor:pointer;"
    "border:1px solid #dfe2e5;border-radius:8px;padding:0 6px;margin:0 2px"
)


def draw(model: Mapping[str, Any]) -> Markup:
    """The view model of tokens.py as HTML."""
    lines = [_line(request, line) for request in model["requests"] for line in request["lines"]]
    legend = [
        h("span", label, style=_style(kind, [kind]) + ";margin-right:10px;font-size:11px")
        for kind, label in model["legend"]
    ]
    why = [h("div", *(h("b", text) if owner else text for text, owner in sentence)) for sentence in model["why"]]
    return join(
        h("div", h("b", "tokens"), h("small", f" {model['note']}", style=_QUIET), style="margin-bottom:4px"),
        lines,
        h("div", legend, style="margin:6px 0"),
        h("div", h("b", "why this step looks so"), why, style="font-size:12px;color:#444"),
    )


def _line(request: Mapping[str, Any], line: Mapping[str, Any]) -> Markup:
    runner = h("small", line["runners"], " ", style="color:#667078") if line["runners"] else None
    notes = [h("small", " ", note["text"], style="color:#667078;white-space:nowrap") for note in line["notes"]]
    style = f"border-left:4px solid {request['color']};padding-left:8px;margin:5px 0;line-height:1.75"
    return h(
        "div",
        h("b", request["id"], style="margin-right:6px"),
        runner,
        [_token(token) for token in line["tokens"]],
        notes,
        style=style,
    )


def _token(token: Mapping[str, Any]) -> Markup:
    if token["k"] == "fold":
        summary = h("summary", token["p"][0], style=_PILL)
        return h("details", summary, h("span", token["t"], style="white-space:pre-wrap"), style="display:inline")
    children = [
        h("span", text, style="opacity:.55") if i % 2 else h("span", text) for i, text in enumerate(token["p"]) if text
    ]
    return h("span", children, title=token["t"], style=_style(token["k"], token["f"]))


def _style(kind: str, flags: Sequence[str]) -> str:
    if kind == "flight":
        return "border:1.5px dashed #0072B2;border-radius:3px;padding:0 4px;margin-right:1px"
    ink = _INKS.get(kind, "#bbbbbb")
    style = "white-space:pre-wrap;padding:0 1px;margin-right:1px;border-radius:2px 2px 0 0"
    if kind == "cached":
        hatch = f"repeating-linear-gradient(135deg,{ink} 0 2px,transparent 2px 4px)"
        style += f";padding-bottom:4px;background:{hatch} bottom/100% 4px no-repeat"
    else:
        style += f";border-bottom:2px {'dotted' if 'todo' in flags else 'solid'} {ink}"
    if "todo" in flags:
        style += ";color:#8a8a8a"
    if "new" in flags:
        style += ";background:#0072B2;color:#fff" + (";box-shadow:inset 0 0 0 2px #9ecbe8" if "fed" in flags else "")
    elif "fed" in flags:
        style += f";background-color:{'#cfe3f1' if kind == 'sampled' else '#e4e4e4'}"
    if "differs" in flags:
        style += ";outline:2px solid #D55E00"
    return style
