"""The static twin of the state rows: two HTML tables with inline styles, V1's moves as an SVG beside its rows."""

from __future__ import annotations

from typing import Any

from ..html import Markup, h

ROW = 22
"""Height of a row in pixels: the arrows are drawn to it."""
_CELL = "padding:0 5px;height:21px;line-height:21px;border:0;border-bottom:1px solid #e8e8e8;white-space:nowrap"
_RIGHT = _CELL + ";text-align:right"
_MONO = "font:12px ui-monospace,Menlo,Consolas,monospace"
_CHANGED = ";background:#faf3b8;font-weight:600"


def draw(model: dict[str, Any]) -> Markup:
    """The view model of state_rows.py as HTML."""
    return h(
        "div",
        [_panel(panel) for panel in model["panels"]],
        style="display:flex;flex-wrap:wrap;gap:8px 28px;align-items:flex-start",
    )


def _panel(panel: dict[str, Any]) -> Markup:
    head = [_head("row", "", "row number"), _head("request", "", "the request in this row")]
    head += [_head(column["key"], column["where"], column["title"]) for column in panel["columns"]]
    rows = [_row(row, len(panel["columns"])) for row in panel["rows"]]
    table = h(
        "table",
        h("thead", h("tr", head)),
        h("tbody", rows),
        style=f"border-collapse:separate;border-spacing:0;margin:0;{_MONO}",
    )
    beside = h("div", table, _arrows(panel), style="display:flex;align-items:flex-end")
    note = h("small", f" {panel['note']}", style="color:#667078")
    return h("div", h("div", h("b", panel["title"]), note, style="margin-bottom:2px"), beside)


def _head(key: str, where: str, tip: str) -> Markup:
    parts = key.replace("_", "_\n").split("\n")
    name = [part for i, piece in enumerate(parts) for part in ([h("wbr")] if i else []) + [h("span", piece)]]
    where_line = h("div", where or "\N{NO-BREAK SPACE}", style="color:#9a9a9a;font-size:9px;line-height:12px")
    style = (
        "padding:0 5px 2px;border:0;border-bottom:1px solid #bbb;text-align:right;vertical-align:bottom;background:#fff"
    )
    return h(
        "th",
        h("div", name, style="max-width:62px;margin-left:auto;line-height:13px"),
        where_line,
        title=tip,
        style=f"{style};font-weight:400;font:10px system-ui,sans-serif;color:#555",
    )


def _row(row: dict[str, Any], columns: int) -> Markup:
    number = h("td", row["row"], style=_RIGHT + ";color:#667078")
    if row["kind"] != "used":
        text = h(
            "td", row["note"], colspan=columns + 1, style=_CELL + ";text-align:left;color:#9a9a9a;font-style:italic"
        )
        return h("tr", number, text, style="background:#fff")
    swatch = h(
        "span",
        style=f"display:inline-block;width:9px;height:9px;border-radius:2px;margin-right:5px;background:{row['color']}",
    )
    who = h(
        "td",
        swatch,
        h("b", row["id"]),
        title=row["note"] or None,
        style=_CELL + ";text-align:left" + (_CHANGED if row["changed"] else ""),
    )
    cells = [
        h("td", _pieces(cell["v"]), title=cell["t"] or None, style=_RIGHT + (_CHANGED if cell["c"] else ""))
        for cell in row["cells"]
    ]
    return h("tr", number, who, cells, style="background:#fff" + (";opacity:.6" if row["dim"] else ""))


def _pieces(parts: list[str]) -> list[Markup]:
    return [h("span", text, style="opacity:.6" if i % 2 else "") for i, text in enumerate(parts) if text]


def _arrows(panel: dict[str, Any]) -> Markup | None:
    if not panel["moves"]:
        return None
    height, width = ROW * len(panel["rows"]), 26 + 9 * len(panel["moves"])
    shapes = []
    for lane, move in enumerate(panel["moves"]):
        a, b = (ROW * (move[end] + 0.5) for end in ("src", "dst"))
        bend = 18 + 9 * lane
        heads = [_arrow_head(b, move["color"])] + ([_arrow_head(a, move["color"])] if move["how"] == "swap" else [])
        path = h(
            "path",
            d=f"M8 {a:g} C{8 + bend} {a:g} {8 + bend} {b:g} 8 {b:g}",
            fill="none",
            stroke=move["color"],
            stroke_width=2,
        )
        shapes.append(h("g", h("title", move["t"]), path, heads))
    label = "; ".join(move["t"] for move in panel["moves"])
    return h(
        "svg",
        shapes,
        width=width,
        height=height,
        viewBox=f"0 0 {width} {height}",
        role="img",
        aria_label=label,
        style="display:block",
    )


def _arrow_head(y: float, color: str) -> Markup:
    return h("path", d=f"M2 {y:g} l8 -4.5 v9 z", fill=color)
