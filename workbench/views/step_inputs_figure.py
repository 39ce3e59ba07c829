"""The static twin of the step inputs: HTML tables with inline styles."""

from __future__ import annotations

from typing import Any

from ..html import Markup, h

_QUIET = "#667078"
_CELL = "padding:0 5px;height:22px;border:0;border-bottom:1px solid #ececec;text-align:right;white-space:nowrap"

_DOT = "display:inline-block;width:8px;height:8px;border-radius:4px;margin-right:5px;background:"


def draw(model: dict[str, Any]) -> Markup:
    """The view model of step_inputs.py as HTML."""
    panels = h("div", [_panel(panel) for panel in model["panels"]], style="min-width:0;max-width:100%")
    beside = h(
        "div", panels, _made(model["made"]), style="display:flex;flex-wrap:wrap;gap:6px 28px;align-items:flex-start"
    )
    return h("div", h("b", "step inputs"), beside)


def _panel(panel: dict[str, Any]) -> Markup:
    head = h(
        "div",
        h("b", panel["title"]),
        h("small", f" {panel['note']}", style=f"color:{_QUIET}"),
        style="margin:4px 0 2px",
    )
    if not panel["lines"]:
        return h("div", head)
    bands = [_band(band) for band in panel["bands"]]
    rows = [_line(line) for line in panel["lines"]]
    style = "border-collapse:separate;border-spacing:0;margin:0;font:12px ui-monospace,Menlo,Consolas,monospace"
    table = h(
        "table",
        h("thead", h("tr", h("th", style=_CELL), bands)),
        h("tbody", rows),
        style=style + (";opacity:.55" if panel["stale"] else ""),
    )
    return h("div", head, h("div", table, style="overflow-x:auto"))


def _band(band: dict[str, Any]) -> Markup:
    color = band["color"] or "#d5d5d5"
    count = h("small", f" ×{band['count']}", style=f"color:{_QUIET};font-weight:400") if band["count"] > 1 else None
    style = _CELL + f";text-align:left;border-bottom:3px solid {color};border-left:1px solid #ccc;background:#fff"
    return h("th", band["label"], count, colspan=band["n"], title=band["t"], style=style)


def _line(line: dict[str, Any]) -> Markup:
    name = h("th", line["name"], title=line["t"], style=_CELL + ";text-align:left;font-weight:400;background:#fff")
    return h("tr", name, [_cell(cell, line["name"] != "token") for cell in line["cells"]], style="background:#fff")


def _cell(cell: dict[str, Any], number: bool) -> Markup:
    style = _CELL
    if cell["first"]:
        style += ";border-left:1px solid #ccc"
    if cell["n"] > 1:
        style += ";text-align:left"
    if cell["k"] in ("pad", "end", "fold") or not number:
        style += f";color:{'#a5a5a5' if cell['k'] == 'pad' else _QUIET}"
    if not number:
        style += ";max-width:80px;overflow:hidden;text-overflow:ellipsis"
    if cell["k"] == "pad":
        style += ";background:#f4f4f4"
    parts = [h("span", text, style="opacity:.6" if i % 2 else "") for i, text in enumerate(cell["v"]) if text]
    return h("td", parts, colspan=cell["n"], title=cell["t"] or None, style=style)


def _made(made: dict[str, Any]) -> Markup | None:
    if not made["lines"]:
        return None
    cell = "padding:1px 8px;border:0;border-bottom:1px solid #ececec;text-align:left;vertical-align:top;font-weight:400"
    head = h(
        "tr", [h("th", text, style=cell + f";color:{_QUIET};background:#fff") for text in ("made by", *made["runners"])]
    )
    rows = []
    for name, makers in made["lines"]:
        cells = [
            h("td", _dot(lane), words, style=cell + ";max-width:230px;white-space:normal") for lane, words in makers
        ]
        rows.append(
            h(
                "tr",
                h("th", name, style=cell + ";font-family:ui-monospace,monospace;background:#fff"),
                cells,
                style="background:#fff",
            )
        )
    return h(
        "table",
        h("thead", head),
        h("tbody", rows),
        style="border-collapse:collapse;font-size:11px;line-height:1.4;margin:4px 0",
    )


def _dot(lane: str) -> Markup | None:
    color = {"host": "#56B4E9", "compute": "#009E73"}.get(lane)
    return (
        h("span", title=f"made by the {'host' if lane == 'host' else 'device'}", style=_DOT + color) if color else None
    )
