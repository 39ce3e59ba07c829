"""The static twin of the budget view: tables with inline styles, and two charts as SVG."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..html import Markup, h, join, picture

WIDE, HIGH = 300, 120
"""Of a chart's square, in pixels."""
LEFT, TOP, RIGHT, FOOT = 60, 10, 12, 20
_QUIET = "color:#667078"
_PARTS = "display:flex;flex-wrap:wrap;gap:10px 26px;align-items:flex-start"
_CELL = "padding:1px 8px;border:0;background:#fff;text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap"
_HEAD = _CELL + ";font-weight:600;border-bottom:1px solid #ddd"
LEGENDS = {
    "shares": "drafts verified of a request, by requests running: mean, least and most; dashed: all there are",
    "costs": "measured cost of a step, by its tokens; dots: sizes that were chosen, the newest filled",
    "loads": "means by load; expected and came: tokens, where confidences were known",
    "steps": "the newest steps; ms: what a step costs with no drafts, with the chosen ones, with all",
}


def draw(model: Mapping[str, Any]) -> Markup:
    """The view model of budget.py as HTML."""
    title = h("div", h("b", "verification budget"), h("small", f" {model['note']}", style=_QUIET))
    return join(title, [_panel(one) for one in model["panels"]])


def _panel(panel: Mapping[str, Any]) -> Markup:
    costs = panel["costs"]
    return h(
        "div",
        h("div", h("b", panel["title"]), f" {panel['say']}", style="margin-bottom:4px"),
        h("div", _shares(panel["shares"]), _costs(costs) if costs else None, style=_PARTS),
        h("div", _table("loads", panel["loads"]), _table("steps", panel["steps"]), style=_PARTS),
        style="margin-bottom:10px",
    )


def _table(name: str, table: Mapping[str, Any]) -> Markup:
    head = h("tr", [h("th", text, style=_HEAD) for text in table["head"]])
    rows = [h("tr", [h("td", text, style=_CELL) for text in row]) for row in table["rows"]]
    looks = "border-collapse:separate;border-spacing:1px;margin:0;font-size:12px"
    whole = h("div", h("table", h("thead", head), h("tbody", rows), style=looks), style="overflow-x:auto")
    return h("div", h("small", LEGENDS[name], style=_QUIET), whole, style="min-width:0")


def _shares(shares: Mapping[str, Any]) -> Markup:
    most, widest = shares["most"], shares["max"]
    marks = [h("line", x1=0, y1=0, x2=WIDE, y2=0, stroke="#8c959f", stroke_dasharray="4 3")]
    for load, mean, least, largest, _ in shares["points"]:
        x = round(WIDE * load / widest, 1)
        y, low, high = (round(HIGH * (1 - value / most), 1) for value in (mean, least, largest))
        marks.append(h("line", x1=x, y1=low, x2=x, y2=high, stroke="#56B4E9", stroke_width=3))
        marks.append(h("circle", cx=x, cy=y, r=4, fill="#0072B2"))
    return _chart("shares", marks, shares["ends"])


def _costs(costs: Mapping[str, Any]) -> Markup:
    widest, highest = costs["max"]
    marks = []
    for _, points in costs["curves"]:
        path = " ".join(f"{WIDE * x / widest:.1f},{HIGH * (1 - y / highest):.1f}" for x, y in points)
        marks.append(h("polyline", points=path, fill="none", stroke="#009E73", stroke_width=1.5))
    for i, (tokens, ms, _) in enumerate(costs["chosen"]):
        newest = i == len(costs["chosen"]) - 1
        x, y = round(WIDE * tokens / widest, 1), round(HIGH * (1 - ms / highest), 1)
        marks.append(h("circle", cx=x, cy=y, r=4, fill="#D55E00" if newest else "#fff", stroke="#D55E00"))
    return _chart("costs", marks, costs["ends"])


def _chart(name: str, marks: list[Markup], ends: list[str]) -> Markup:
    """Marks over axes from 0 to what is written at their ends."""
    width, height = LEFT + WIDE + RIGHT, TOP + HIGH + FOOT
    labels = [
        _label("0", -6, HIGH + 4, "end"),
        _label(ends[1], -6, 4, "end"),
        _label("0", 0, HIGH + 15, "middle"),
        _label(ends[0], WIDE + RIGHT, HIGH + 15, "end"),
    ]
    axes = h("path", d=f"M0 0V{HIGH}H{WIDE}", fill="none", stroke="#8c959f")
    plot = picture(LEGENDS[name], width, height, axes, marks, labels, x=LEFT, y=TOP)
    return h("div", h("div", h("small", LEGENDS[name], style=_QUIET), style=f"max-width:{width}px"), plot)


def _label(text: str, x: int, y: int, anchor: str) -> Markup:
    return h("text", text, x=x, y=y, text_anchor=anchor, font_size=11, fill="#667078")
