"""The static twin of what the acceptance view says of confidences: a diagram for each stage, and a table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..html import Markup, h, picture

SIDE, STRIP, GAP, MARGIN = 168, 36, 8, 8
"""Of a diagram, in pixels: the square, the counts below it, what lies between, and around."""
_QUIET = "color:#667078"
_CELL = "padding:1px 8px;border:0;background:#fff;text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap"


def draw(found: Mapping[str, Any]) -> Markup:
    """What `confidence_reliability` returns, as HTML."""
    head = h(
        "tr", [h("th", text, style=f"{_CELL};font-weight:600;border-bottom:1px solid #ddd") for text in found["head"]]
    )
    rows = [h("tr", [h("td", text, style=_CELL) for text in row]) for row in found["rows"]]
    table = h(
        "table",
        h("thead", head),
        h("tbody", rows),
        style="border-collapse:separate;border-spacing:1px;margin:0;font-size:12px",
    )
    note = h("div", h("small", found["note"], style=_QUIET))
    return h(
        "div",
        h("div", h("small", f"confidence of a prefix → share accepted ↑; {found['say']}", style=_QUIET)),
        h(
            "div",
            [_stage(stage) for stage in found["stages"]],
            h("div", h("div", table, style="overflow-x:auto"), note, style="min-width:0"),
            style="display:flex;flex-wrap:wrap;gap:10px 26px;align-items:flex-start",
        ),
    )  # fmt: skip


def _stage(stage: Mapping[str, Any]) -> Markup:
    most = max(stage["bars"])
    step, foot = SIDE / len(stage["bars"]), SIDE + GAP + STRIP
    points = [
        h(
            "circle",
            cx=round(SIDE * said, 1),
            cy=round(SIDE * (1 - happened), 1),
            r=round(2 + 4 * (count / most) ** 0.5, 1),
            fill="#56B4E9",
            stroke="#0072B2",
        )
        for said, happened, count in stage["points"]
    ]
    bars = [
        h(
            "rect",
            x=round(i * step + 0.5, 1),
            y=round(foot - STRIP * count / most, 1),
            width=round(step - 1, 1),
            height=round(STRIP * count / most, 1),
            fill="#8c959f",
        )
        for i, count in enumerate(stage["bars"])
        if count
    ]
    width, height = SIDE + 2 * MARGIN, foot + 2 * MARGIN
    plot = picture(
        f"reliability of the confidences {stage['name']}",
        width,
        height,
        h("rect", width=SIDE, height=SIDE, fill="#f4f5f6"),
        h("line", x1=0, y1=SIDE, x2=SIDE, y2=0, stroke="#8c959f", stroke_dasharray="4 3"),
        points,
        bars,
        h("line", x1=0, y1=foot, x2=SIDE, y2=foot, stroke="#8c959f"),
        x=MARGIN,
        y=MARGIN,
    )
    return h("div", h("div", f"{stage['name']}: ECE {stage['ece']:.3f}", style="font-size:12px"), plot,
             h("div", h("small", f"below: prefixes of each bin, at most {most:,}", style=_QUIET)))  # fmt: skip
