"""The static twin of the sampling view: an HTML table with inline styles; a bar is a background of its cell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..html import Markup, h, join

_QUIET = "color:#667078"
_LINE = "border:0;border-bottom:1px solid #ececec"
_CELL = f"padding:1px 6px;{_LINE};height:24px;white-space:nowrap;text-align:left;font-weight:400;background-color:#fff"
_NUMBER = _CELL + ";text-align:right;font-variant-numeric:tabular-nums"
_HEAD = f"padding:2px 6px 5px;{_LINE};text-align:left;vertical-align:bottom;font-weight:600;background-color:#fff"
_BAR, _WON, _CUT, _NOISE, _INK = "#c9e7f8", "#8bcbf0", "#D55E00", "#E69F00", "#444"


def draw(model: Mapping[str, Any]) -> Markup:
    """The view model of sampling.py as HTML."""
    title = h("div", h("b", "sampling"), h("small", f" {model['note']}", style=_QUIET), style="margin-bottom:4px")
    return join(title, _strip(model), [_panel(panel) for panel in model["panels"]])


def _strip(model: Mapping[str, Any]) -> Markup:
    """The request's text up to the chosen token and on, as far as it was traced."""
    color = next((color for _, color, chosen in model["requests"] if chosen), "#999999")
    before = [h("span", text, style=_QUIET) for text in model["before"] if text]
    tokens = [h("span", _pieces(each["p"]), title=each["t"], style=_token(each)) for each in model["tokens"]]
    style = f"border-left:4px solid {color};padding-left:8px;margin:4px 0 8px;line-height:1.75;white-space:pre-wrap"
    return h("div", before, tokens, style=style)


def _token(each: Mapping[str, Any]) -> str:
    style = "padding:0 1px;margin-right:1px;border-bottom:2px solid #0072B2;border-radius:2px 2px 0 0"
    style += ";background:#0072B2;color:#fff" if each["chosen"] else ""
    return style + (";outline:2px solid #D55E00" if each["differs"] else "")


def _pieces(parts: Sequence[str]) -> list[Markup]:
    return [h("span", text, style="opacity:.6" if i % 2 else "") for i, text in enumerate(parts) if text]


def _panel(panel: Mapping[str, Any]) -> Markup:
    cut = panel["taken"] + 1
    heads = [_head(stage) for stage in panel["stages"]]
    heads[cut:cut] = [h("th", "logprob", style=_HEAD), h("th", "rank", style=_HEAD)]
    plain = _QUIET + ";font-weight:400"
    races = [h("th", name, h("div", what, style=plain), colspan=2, style=_HEAD) for name, what in panel["races"]]
    head = h("tr", h("th", panel["title"], style=_HEAD), heads, races)
    return h(
        "div",
        h(
            "div",
            h(
                "table",
                h("thead", head),
                h("tbody", [_row(line, cut) for line in panel["lines"]]),
                style="border-collapse:separate;border-spacing:0;margin:0;font-size:12px",
            ),
            style="overflow-x:auto",
        ),
        h("div", panel["more"], style=_QUIET + ";font-size:11px;margin:3px 0"),
        h("div", [h("div", text) for text in panel["say"]], style=f"font-size:12px;color:{_INK};margin-bottom:8px"),
    )


def _head(stage: Mapping[str, Any]) -> Markup:
    kept = 100 * (1 - stage["cut"])
    style = _HEAD + ";min-width:104px"
    if stage["say"]:
        bar = f"linear-gradient(90deg,#8c959f 0 {kept:.1f}%,{_CUT} {kept:.1f}%)"
        style += f";background:{bar} bottom/100% 4px no-repeat #fff"
    return h(
        "th",
        [h("div", name) for name in stage["names"]],
        h("div", stage["left"], style=_QUIET + ";font-weight:400"),
        h("div", stage["say"], style=f"color:{_CUT};font-weight:400") if stage["say"] else None,
        title=stage["t"],
        scope="col",
        style=style,
    )


def _row(line: Mapping[str, Any], cut: int) -> Markup:
    cells = [_cell(cell, bool(line["win"])) for cell in line["cells"]]
    cells[cut:cut] = [h("td", text, style=_NUMBER) for text in line["logprob"]]
    races = [part for race in line["races"] for part in _race(race)]
    won = h("small", f" ◀ {' '.join(line['win'])}", style="color:#0072B2;font-weight:600") if line["win"] else None
    name = h(
        "th", _pieces(line["p"]), won, title=line["t"], scope="row", style=_CELL + (";font-weight:650" if won else "")
    )
    return h("tr", name, cells, races)


def _cell(cell: Mapping[str, Any], won: bool) -> Markup:
    if cell["k"]:
        mark, style = ("✕", f"color:{_CUT}") if cell["k"] == "cut" else ("·", "color:#b5b5b5")
        return h("td", mark, title=cell["t"], style=f"{_CELL};{style}")
    width, color = f"{100 * cell['w']:.1f}%", _WON if won else _BAR
    bar = f"linear-gradient(90deg,{color} 0 {width},#fff {width})"
    changed = h("span", f" {cell['d']}", style="color:#b34700") if cell["d"] else None
    return h(
        "td",
        h(
            "div",
            h("span", cell["p"]),
            h("span", cell["x"], changed, style=_QUIET + ";font-size:11px"),
            style="display:flex;justify-content:space-between;gap:10px;font-variant-numeric:tabular-nums",
        ),
        title=cell["t"],
        style=f"{_CELL};background:{bar} 0 50%/100% 20px no-repeat #fff",
    )


def _race(race: Mapping[str, Any] | None) -> list[Markup]:
    """The logit as a ring, the score as a dot, the noise between them; and both as numbers."""
    if race is None:
        return [h("td", style=_CELL), h("td", style=_CELL)]
    # The marks stay whole at both ends of the track.
    a, b = (8 + 84 * race[end] for end in ("a", "b"))
    radius, color = (5.5, "#0072B2") if race["win"] else (3.5, "#8c959f")
    low, high = sorted((a, b))
    track = (
        f"radial-gradient(circle at {b:.1f}% 50%,{color} 0 {radius}px,transparent {radius + 0.5}px),"
        f"radial-gradient(circle at {a:.1f}% 50%,#fff 0 1.5px,{_INK} 2px 3px,transparent 3.5px),"
        f"linear-gradient(90deg,transparent {low:.1f}%,{_NOISE} {low:.1f}% {high:.1f}%,transparent {high:.1f}%) "
        "0 50%/100% 3px no-repeat #fff"
    )
    strong = ";font-weight:650" if race["win"] else ""
    return [
        h("td", style=f"{_CELL};min-width:130px;background:{track}", title=race["t"]),
        h("td", race["n"], " ", h("span", race["s"], style=strong.lstrip(";") or _QUIET), style=_NUMBER),
    ]
