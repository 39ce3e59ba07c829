"""What a terminal may be sent: model text made harmless, columns that line up, one line an error."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence


class UserError(Exception):
    """Something asked for that can't be; its text is the one line that the user sees."""


_NAMED = {"\n": "\\n", "\t": "\\t", "\r": "\\r", "\x1b": "\\e"}
_SPOOFING = frozenset({"Cc", "Cf", "Cs", "Co", "Zl", "Zp"})
_JOINERS = frozenset("\u200c\u200d")
"""Format characters that ordinary text of some scripts (and emoji) needs; they can't reorder or hide anything."""


def printable(text: str, *, keep: str = "") -> str:
    """`text` with every character that could steer a terminal (control, bidirectional, separator) written as an escape.

    Characters of `keep` (say "\\n\\t") stay as they are.
    """
    return "".join(c if c in keep or _harmless(c) else _escape(c) for c in text)


def _harmless(char: str) -> bool:
    return char in _JOINERS or unicodedata.category(char) not in _SPOOFING


def _escape(char: str) -> str:
    if char in _NAMED:
        return _NAMED[char]
    code = ord(char)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def width(text: str) -> int:
    """Columns that `text` takes in a terminal: two for a wide character, none for a combining mark."""
    return sum(
        0 if unicodedata.combining(c) or c in _JOINERS else 2 if unicodedata.east_asian_width(c) in "WF" else 1
        for c in text
    )


def clip(text: str, columns: int) -> str:
    """`text` in at most `columns` columns, an ellipsis standing for what was cut."""
    if width(text) <= columns:
        return text
    kept = ""
    for char in text:
        if width(kept + char) > columns - 1:
            break
        kept += char
    return kept + "…"


def columns(rows: Sequence[Sequence[str]], *, right: frozenset[int] = frozenset(), indent: str = "") -> list[str]:
    """`rows` as lines with aligned columns; those numbered in `right` are set flush right."""
    widths = [max(width(row[i]) for row in rows) for i in range(len(rows[0]))] if rows else []
    lines = []
    for row in rows:
        cells = []
        for i, cell in enumerate(row):
            fill = " " * (widths[i] - width(cell))
            cells.append(fill + cell if i in right else cell + fill)
        lines.append((indent + "  ".join(cells)).rstrip())
    return lines
