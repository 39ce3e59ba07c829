"""Token text made visible: what would not show on a page gets a sign, everything else stays as it is.

A piece is an alternating sequence (plain, sign, plain, …); renderers print the signs muted, and they escape.
"""

from __future__ import annotations

import functools
import unicodedata
from collections.abc import Mapping

NO_TEXT = "□"
"""Stands for a token without text of its own: a part of a character, or a special token."""

_NAMED = {"\n": "\\n", "\t": "\\t", "\r": "\\r", "\x00": "\\0"}
_HIDDEN = {"Cc", "Cf", "Zl", "Zp", "Cs", "Co", "Cn"}


@functools.lru_cache(maxsize=1 << 16)
def visible(text: str) -> tuple[str, ...]:
    """Splits `text` into plain text (even places) and signs (odd places).

    A space stays a space where a reader sees it: alone and before something. Other spaces become ␣, line ends \\n,
    control and format characters their code, no text at all a box. `"".join` of the result is what a page shows.
    """
    if not text:
        return "", NO_TEXT
    pieces = [""]
    for i, char in enumerate(text):
        sign = _sign(text, i, char)
        if bool(sign) == (len(pieces) % 2 == 1):
            pieces.append("")
        pieces[-1] += sign or char
    return tuple(pieces)


def piece(token_id: int, token_text: Mapping[int, str]) -> tuple[str, ...]:
    """The visible pieces of a token; an id outside the vocabulary (a padding, a placeholder) shows as its number."""
    text = token_text.get(token_id)
    return ("", f"#{token_id}") if text is None else visible(text)


def _sign(text: str, i: int, char: str) -> str:
    if char in _NAMED:
        return _NAMED[char]
    if char == " ":
        follows = i + 1 < len(text) and not text[i + 1].isspace()
        crowded = i > 0 and text[i - 1].isspace()
        return "" if follows and not crowded else "␣"
    if char == "\N{REPLACEMENT CHARACTER}":
        return char
    if unicodedata.category(char) in _HIDDEN or (char.isspace() and char != " "):
        return f"\\x{ord(char):02x}" if ord(char) < 256 else f"\\u{ord(char):04x}"
    return ""
