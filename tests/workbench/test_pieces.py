from __future__ import annotations

import pytest

from workbench.views.pieces import NO_TEXT, piece, visible


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        (" the", (" the",)),
        ("\n", ("", "\\n")),
        (" ", ("", "␣")),
        ("a \n", ("a", "␣\\n")),
        ("  x  y", ("", "␣␣", "x", "␣␣", "y")),
        ("\t", ("", "\\t")),
        ("\\n", ("\\n",)),
        ("\x1b[1m", ("", "\\x1b", "[1m")),
        ("a\u202eb", ("a", "\\u202e", "b")),
        ("\u00a0", ("", "\\xa0")),
        ("\ufffd", ("", "\ufffd")),
        ("<img src=x>", ("<img src=x>",)),
        ("", ("", NO_TEXT)),
    ],
)
def test_visible(text: str, pieces: tuple[str, ...]) -> None:
    assert visible(text) == pieces


def test_piece_of_an_unknown_id_is_its_number() -> None:
    assert piece(-1, {}) == ("", "#-1")
    assert piece(3, {3: "\n"}) == ("", "\\n")
