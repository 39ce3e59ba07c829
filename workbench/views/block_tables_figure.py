"""The static drawing of a block tables model: one SVG of the tables and one of the pool for each runner.

static/block_tables.js draws the same picture live; positions come from the model, so the two cannot drift apart.
"""

from __future__ import annotations

from typing import Any

from ..html import Markup, h

INK, FAINT, FREE, CACHED = "#222222", "#767676", "#e6e6e6", "#cfe8f7"
CHANGES = {"new": "+", "hit": "✓", "evicted": "!", "freed": "×"}
YIELDING = "flex:1 1 min-content;max-width:max-content"
"""V1's panel: where both do not fit side by side, its pool goes under its table before V2 goes under V1."""
MONO = "ui-monospace,Menlo,Consolas,monospace"


def draw(model: dict[str, Any]) -> Markup:
    """Takes what `block_tables.view_model` returns."""
    last = len(model["panels"]) - 1
    panels = [_panel(panel, "" if i == last else YIELDING) for i, panel in enumerate(model["panels"])]
    row = h("div", panels, style="display:flex;flex-wrap:wrap;gap:12px 24px;margin-bottom:8px")
    return h("div", row, h("div", model["legend"], style=f"color:{FAINT};font-size:11px;white-space:pre-wrap"))


def _panel(panel: dict[str, Any], style: str) -> Markup:
    note = h("small", panel["note"], style=f"color:{FAINT}")
    pictures = [h("div", tables(panel), style="overflow:auto;max-height:440px"), pool(panel)]
    return h(
        "section",
        h("div", h("b", panel["title"]), " ", note, style="margin-bottom:4px;contain:inline-size"),
        h("div", pictures, style="display:flex;flex-wrap:wrap;gap:8px 16px;align-items:flex-start"),
        style=style,
    )


def tables(panel: dict[str, Any]) -> Markup:
    """Persistent rows and, for V2, the idx_mapping and the gathered rows."""
    layout, gathered = panel["layout"], panel["gathered"]
    places = {row["row"]: i for i, row in enumerate(panel["rows"])}
    ends = {row["row"]: len(row["blocks"]) for row in panel["rows"] if row["request"] is not None}
    shapes = [_caption(layout["left"], "persistent = input" if panel["runner"] == "v1" else "persistent (fixed rows)")]
    for i, row in enumerate(panel["rows"]):
        shapes.append(_free_row(panel, i, row) if row["request"] is None else _row(panel, i, row))
    if gathered:
        shapes.append(_caption(layout["index"] + 17, "idx_mapping", "middle"))
        shapes.append(_caption(layout["gathered"], "gathered" + ("" if panel["gathered_now"] else " (last step)")))
    for row in gathered:
        shapes.append(_gather(panel, row, places.get(row["row"]), ends.get(row["row"], 0)))
    label = f"{panel['title']}: {panel['note']}"
    return _svg(layout["width"], layout["height"], label, shapes)


def pool(panel: dict[str, Any]) -> Markup:
    """All blocks by id, and the head of the free list."""
    data = panel["pool"]
    columns, size = data["columns"], data["size"]
    top = 36
    bottom = top + -(-len(data["cells"]) // columns) * size
    shapes = [_caption(0, data["title"]), _text(0, 28, data["summary"], FAINT)]
    for i, cell in enumerate(data["cells"]):
        shapes.append(_cell(cell, i % columns * size, top + i // columns * size, size, panel["colors"]))
    shapes.append(_text(0, bottom + 16, data["cache"], FAINT))
    shapes.append(_text(0, bottom + 36, "free list", FAINT))
    for i, (block_id, cached) in enumerate(data["free_next"]):
        x = 50 + i * 24
        shapes.append(h("rect", x=x, y=bottom + 24, width=22, height=17, rx=3, fill=CACHED if cached else FREE))
        shapes.append(_text(x + 11, bottom + 36, block_id, INK, "middle", 10))
    rest = data["num_free"] - len(data["free_next"])
    if rest > 0:
        shapes.append(_text(53 + len(data["free_next"]) * 24, bottom + 36, f"+{rest}", FAINT))
    return _svg(max(columns * size, 206), bottom + 48, f"{data['title']}: {data['summary']}", shapes)


def _row(panel: dict[str, Any], i: int, row: dict[str, Any]) -> Markup:
    layout = panel["layout"]
    y = layout["top"] + i * layout["row"]
    middle = y + layout["row"] / 2
    color = panel["colors"].get(row["request"], "#999999")
    end = layout["left"] + len(row["blocks"]) * layout["chip"] + 6
    parts = [
        h("title", title(row)),
        _text(28, middle + 4, row["label"], INK if row["label"] != str(row["row"]) else FAINT, "end", font_family=MONO),
        h("rect", x=33, y=y + 1, width=6, height=layout["row"] - 3, fill=color),
        _text(43, middle + 4, row["request"][:3], INK),
        _blocks(layout, layout["left"], y, row["blocks"], color),
    ]
    if row["said"]:
        parts.append(_text(end, middle + 4, row["said"], FAINT, size=10))
    return h("g", *parts)


def _free_row(panel: dict[str, Any], i: int, row: dict[str, Any]) -> Markup:
    layout = panel["layout"]
    y, many = layout["top"] + i * layout["row"], row["to"] > row["row"]
    alone = f"free, {row['left']} left" if row.get("left") else "free"
    said = f"rows {row['row']} to {row['to']} free" if many else alone
    box = h(
        "rect", x=layout["left"] + 0.5, y=y + 2.5, width=layout["table"] - 1, height=layout["row"] - 5, rx=3,
        fill="none", stroke="#bbbbbb", stroke_dasharray="3 3",
    )  # fmt: skip
    middle = y + layout["row"] / 2 + 3.5
    text = _text(layout["left"] + layout["table"] / 2, middle, said, FAINT, "middle", 9 if layout["small"] else 10)
    return h("g", _text(28, middle, row["row"], FAINT, "end"), box, text)


def _gather(panel: dict[str, Any], row: dict[str, Any], source: int | None, length: int) -> Markup:
    """The curve from a persistent row to its batch position, the mapping's cell, and the gathered blocks."""
    layout = panel["layout"]
    color = panel["colors"].get(row["request"], "#999999")
    y = layout["top"] + row["position"] * layout["row"]
    middle, index = y + layout["row"] / 2, layout["index"]
    box = {"height": layout["row"] - 3, "rx": 3, "fill": color}
    parts = [h("title", title(row))]
    if source is not None:
        x = layout["left"] + length * layout["chip"] + 6
        start = layout["top"] + source * layout["row"] + layout["row"] / 2
        bend = (index + x) / 2
        curve = f"M{x} {start}C{bend} {start} {bend} {middle} {index - 3} {middle}"
        parts.append(h("path", d=curve, fill="none", stroke=color, stroke_width=1 if layout["small"] else 1.8))
    parts += [
        h("rect", x=index, y=y + 1, width=34, **box, fill_opacity=0.2, stroke=color),
        _text(index + 17, middle + 4, row["row"], INK, "middle", 9 if layout["small"] else 11),
        h("path", d=f"M{index + 37} {middle}H{index + 48}", stroke=color, stroke_width=1.5),
        h("path", d=f"M{index + 47} {middle - 4}l7 4l-7 4z", fill=color),
        _text(layout["gathered"] - 6, middle + 4, row["position"], FAINT, "end", 9 if layout["small"] else 11),
        _blocks(layout, layout["gathered"], y, row["blocks"], color),
    ]
    return h("g", *parts)


def _blocks(layout: dict[str, Any], x: float, y: float, blocks: list[list[Any]], color: str) -> Markup:
    chip, small = layout["chip"], layout["small"]
    middle = y + layout["row"] / 2
    shapes: list[Markup] = []
    badges: list[Markup] = []
    for i, (block_id, marks) in enumerate(blocks):
        left = x + i * chip
        if block_id is None:
            shapes.append(_text(left + chip / 2, middle + 3.5, "…" if small else marks, FAINT, "middle", 9))
            continue
        stale, shared = "x" in marks, "s" in marks
        edge = INK if shared else "#999999" if stale else color
        shapes.append(h(
            "rect", x=left + 0.5, y=y + 1.5, width=chip - 2, height=layout["row"] - (3 if small else 5),
            rx=1 if small else 3, fill=color, fill_opacity=0 if stale else 0.8 if small else 0.2, stroke=edge,
            stroke_width=0.9 if small else 1.8 if shared else 1.2, stroke_dasharray="2 2" if stale else None,
        ))  # fmt: skip
        if not small:
            shapes.append(_text(left + chip / 2 - 0.5, middle + 3, block_id, FAINT if stale else INK, "middle"))
        badge = "✓" if "h" in marks else "+"
        if "n" in marks or ("h" in marks and not small):
            badges.append(_badge(left + chip - 4, y + (9 if small else 7), badge, INK if "n" in marks else FAINT))
    return h("g", shapes, badges)


def _cell(cell: dict[str, Any], x: float, y: float, size: int, colors: dict[str, str]) -> Markup:
    inner, state = size - 2, cell["state"]
    owners = [colors.get(owner, "#999999") for owner in cell.get("owners", ())]
    parts = [h("title", cell["title"])]
    plain = {"null": "#ffffff", "free": FREE, "cached": CACHED}.get(state)
    box: dict[str, Any] = {"x": x + 0.5, "y": y + 0.5, "height": inner, "rx": 2}
    if plain is not None:
        parts.append(h("rect", width=inner, fill=plain, stroke="#bbbbbb" if state == "null" else "none", **box))
    else:
        parts.append(h("rect", width=inner, fill=owners[0], **box))
        if len(owners) > 1:
            parts.append(h("rect", x=x + 0.5 + inner / 2, y=y + 0.5, width=inner / 2, height=inner, fill=owners[1]))
            parts.append(h("rect", width=inner, fill="none", stroke=INK, stroke_width=1.8 if size >= 18 else 1, **box))
    if size >= 18:
        halo: dict[str, Any] = {} if plain else {"stroke": "#ffffff", "stroke_width": 2, "paint_order": "stroke"}
        said = "∅" if state == "null" else cell["id"]
        parts.append(_text(x + size / 2 - 0.5, y + size / 2 + 3, said, FAINT if plain else INK, "middle", 9, **halo))
    if "change" in cell:
        at = (x + size - 4, y + 7) if size >= 18 else (x + size / 2 - 0.5, y + size / 2 + 3)
        parts.append(_badge(*at, CHANGES[cell["change"]]))
    return h("g", *parts)


def title(row: dict[str, Any]) -> str:
    """The tooltip of a row."""
    blocks = " ".join("…" if block_id is None else str(block_id) for block_id, _ in row["blocks"])
    place = f"batch position {row['position']} reads row {row['row']}" if "position" in row else f"row {row['row']}"
    return f"{row['request']}, {place}: {row['total']} blocks {blocks}"


def _badge(x: float, y: float, glyph: str, fill: str = INK) -> Markup:
    halo: dict[str, Any] = {"stroke": "#ffffff", "stroke_width": 2.5, "paint_order": "stroke", "font_weight": "bold"}
    return _text(x, y, glyph, fill, "middle", 10, **halo)


def _caption(x: float, said: str, anchor: str = "start") -> Markup:
    return _text(x, 12, said, FAINT, anchor)


def _text(x: float, y: float, said: str | int, fill: str, anchor: str = "start", size: int = 11, **more: Any) -> Markup:
    """Numbers stand in a monospaced font, words in the page's."""
    if isinstance(said, int):
        more = {"font_family": MONO, **more}
    return h("text", said, x=x, y=y, fill=fill, text_anchor=anchor, font_size=size, **more)


def _svg(width: float, height: float, label: str, shapes: list[Markup]) -> Markup:
    return h(
        "svg", h("title", label), *shapes, width=width, height=height, viewBox=f"0 0 {width} {height}", role="img",
        aria_label=label, xmlns="http://www.w3.org/2000/svg",
    )  # fmt: skip
