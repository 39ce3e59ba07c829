"""The static twin of the acceptance view: HTML tables with inline styles."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..html import Markup, h, join
from .reliability_figure import draw as draw_reliability

_QUIET = "color:#667078"
_CELL = "padding:2px 6px;border:0;background-color:#fff;text-align:left;vertical-align:top;white-space:nowrap"
_NUMBER = _CELL + ";text-align:right;font-variant-numeric:tabular-nums"
_LEFT = _CELL + ";font-weight:600;border-bottom:1px solid #ddd"
_HEAD = _LEFT + ";text-align:right"
_PARTS = "display:flex;flex-wrap:wrap;gap:10px 26px;align-items:flex-start"
_TABLE = "border-collapse:separate;border-spacing:2px;margin:0;font-size:12px"
OUTCOMES = {
    "accepted": "background:#c7e9dc;border-top:3px solid #009E73",
    "rejected": "background:#f8d9c8;border-top:3px solid #D55E00",
    "dropped": "background:#f1f1f1;border-top:3px solid #b5b5b5;color:#667078",
    "corrected": "background:#fbe7c0;border-top:3px solid #E69F00",
    "bonus": "background:#c9e7f8;border-top:3px solid #0072B2",
}


def draw(model: Mapping[str, Any]) -> Markup:
    """The view model of acceptance.py as HTML."""
    title = h("div", h("b", "acceptance"), h("small", f" {model['note']}", style=_QUIET), style="margin-bottom:4px")
    legend = [h("span", kind, style=f"padding:0 6px;margin-right:4px;{style}") for kind, style in OUTCOMES.items()]
    return join(title, h("div", legend, style="font-size:12px;margin-bottom:6px"), [_panel(p) for p in model["panels"]])


def _panel(panel: Mapping[str, Any]) -> Markup:
    warning = h("div", panel["synthetic"], style="color:#b34700;font-weight:600") if panel["synthetic"] else None
    reliability = draw_reliability(panel["reliability"]) if panel["reliability"] else None
    numbers = h("div", _positions(panel), _history(panel["history"]))
    return h(
        "div",
        h("div", h("b", panel["title"]), f" {panel['rule']}: {panel['say']}"),
        warning,
        h("div", _blocks(panel), numbers, style=_PARTS),
        reliability,
        style="margin-bottom:10px",
    )


def _blocks(panel: Mapping[str, Any]) -> Markup:
    head = h("tr", h("th", "position", style=_HEAD), h("th", "accepted", style=_HEAD), h("th", "block", style=_LEFT))
    rows = [
        h(
            "tr",
            h("td", block["at"], title=f"came in step {block['step']}", style=_NUMBER),
            h("td", block["n"], style=_NUMBER),
            [_token(cell) for cell in block["cells"]],
        )
        for block in panel["blocks"]
    ]
    return h("div", h("small", panel["more"], style=_QUIET), _table(head, rows))


def _token(cell: Mapping[str, Any]) -> Markup:
    text = [h("span", part, style="opacity:.6" if i % 2 else "") for i, part in enumerate(cell["p"]) if part]
    numbers = [h("div", f"{name} {value}") for name, value in cell["v"]]
    small = h("div", numbers or cell["k"], style="font-size:11px;font-variant-numeric:tabular-nums")
    return h("td", h("div", text), small, title=cell["t"], style=f"{_CELL};white-space:pre;{OUTCOMES[cell['k']]}")


def _positions(panel: Mapping[str, Any]) -> Markup:
    head = h("tr", [h("th", text, style=_HEAD) for text in ("k", "conditional", "prefix", "stand / reached / all")])
    rows = []
    for one in panel["positions"]:
        stand, reached, number = one["of"]
        count = f"{stand} / {reached} / {number}"
        rows.append(
            h("tr", h("td", one["k"], style=_NUMBER), _share(one["c"]), _share(one["a"]), h("td", count, style=_NUMBER))
        )
    note = h("small", "acceptance of the k-th draft: of those reached, and of all", style=_QUIET)
    return h("div", note, _table(head, rows))


def _share(value: float | None) -> Markup:
    if value is None:
        return h("td", "–", style=_NUMBER)
    bar = f"linear-gradient(90deg,#c7e9dc 0 {100 * value:.1f}%,#f4f5f6 {100 * value:.1f}%)"
    return h("td", percent(value), style=f"{_NUMBER};min-width:84px;background:{bar}")


def _history(history: Mapping[str, Any]) -> Markup:
    *columns, _ = history["totals"]
    names = [str(a) if a == b else f"{a}–{b}" for a, b in history["steps"]]
    head = h("tr", [h("th", text, style=_HEAD) for text in ("accepted", *names, "all")])
    rows = []
    for length, counts in history["rows"]:
        cells = [
            h("td", count or "", style=f"{_NUMBER};background:rgba(0,158,115,{count / max(total, 1):.3f})")
            for count, total in zip(counts, [*columns, history["totals"][-1]], strict=True)
        ]
        rows.append(h("tr", h("td", length, style=_NUMBER), cells))
    return h("div", h("small", "blocks by accepted length, in each stretch of steps", style=_QUIET), _table(head, rows))


def _table(head: Markup, rows: list[Markup]) -> Markup:
    return h("div", h("table", h("thead", head), h("tbody", rows), style=_TABLE), style="overflow-x:auto")


def percent(share: float) -> str:
    """As the live view writes it."""
    return f"{100 * share:.0f} %"
