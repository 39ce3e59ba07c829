"""Static HTML: elements that escape by construction, and the object a notebook shows.

A text that reaches `h` as a plain `str` is escaped; only what `h` built is taken as markup. Styles are inline, since
GitHub drops style sheets from notebooks.
"""

from __future__ import annotations

import base64
import html
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Markup:
    """Markup that `h` built; nothing else should make one."""

    text: str


Child = Markup | str | int | float | None
VOID = frozenset({"br", "hr", "col", "img"})


def h(tag: str, *children: Child | list[Markup], style: str = "", **attributes: str | int | float | None) -> Markup:
    """One element. Children that are no `Markup` are escaped; attributes given as None are left out.

    A trailing underscore of an attribute's name is dropped and the others become dashes: `class_`, `aria_label`.
    """
    pairs = {"style": style or None, **attributes}
    rendered = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{html.escape(str(value), quote=True)}"'
        for name, value in pairs.items()
        if value is not None
    )
    if tag in VOID:
        return Markup(f"<{tag}{rendered}>")
    return Markup(f"<{tag}{rendered}>{_join(children)}</{tag}>")


def join(*children: Child | list[Markup]) -> Markup:
    """Several children one after the other, without an element around them."""
    return Markup(_join(children))


def picture(label: str, width: int, height: int, *marks: Child | list[Markup], x: int = 0, y: int = 0) -> Markup:
    """An SVG drawing as an image, its origin at (x, y). JupyterLab takes plain SVG out of a notebook that it doesn't
    trust, and leaves the texts that were in it."""
    drawing = h(
        "svg", *marks, xmlns="http://www.w3.org/2000/svg", viewBox=f"{-x} {-y} {width} {height}", width=width,
        height=height, font_family="sans-serif",
    )  # fmt: skip
    data = base64.b64encode(drawing.text.encode()).decode()
    return h("img", src=f"data:image/svg+xml;base64,{data}", alt=label, width=width, height=height)


def _join(children: tuple[Child | list[Markup], ...]) -> str:
    parts: list[str] = []
    for child in children:
        if isinstance(child, list):
            parts.extend(piece.text for piece in child)
        elif isinstance(child, Markup):
            parts.append(child.text)
        elif child is not None:
            parts.append(html.escape(str(child), quote=True))
    return "".join(parts)


FRAME = (
    "font:13px/1.5 system-ui,-apple-system,'Segoe UI',sans-serif;color:#222;background:#fff;"
    "padding:8px 10px;border-radius:6px;max-width:1400px;overflow-x:auto"
)
"""The style around a static twin: its own paper, so that it reads on a dark page too."""


@dataclass(frozen=True, slots=True)
class Html:
    """What a notebook shows for a static twin. Its `repr` holds no address, so nbval can compare it."""

    name: str
    markup: Markup = field(repr=False)

    def _repr_html_(self) -> str:
        return h("div", self.markup, style=FRAME).text

    def __repr__(self) -> str:
        return f"<{self.name}>"
