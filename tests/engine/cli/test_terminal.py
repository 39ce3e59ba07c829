"""What a terminal is sent: nothing that steers it, in columns of one width."""

from __future__ import annotations

import pytest

from engine.cli import terminal


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain, ünïcode, 漢字 😀", "plain, ünïcode, 漢字 😀"),
        ("\x1b[31mred", "\\e[31mred"),
        ("a\rb\x07\x7f\x9b2J", "a\\rb\\x07\\x7f\\x9b2J"),
        ("user\u202egnp.exe", "user\\u202egnp.exe"),
        ("zero\u200bwidth", "zero\\u200bwidth"),
        ("a\u2028b\ud800\U000e0041", "a\\u2028b\\ud800\\U000e0041"),
        ("👩\u200d🚀", "👩\u200d🚀"),
    ],
)
def test_printable_escapes_what_steers_a_terminal(text: str, shown: str) -> None:
    assert terminal.printable(text) == shown


def test_printable_keeps_only_what_is_asked_for() -> None:
    assert terminal.printable("a\n\tb\r", keep="\n\t") == "a\n\tb\\r"
    assert terminal.printable("a\nb") == "a\\nb"


def test_columns_align_by_width_and_not_by_length() -> None:
    lines = terminal.columns([["漢字", "1"], ["a", "22"]], right=frozenset({1}))
    assert lines == ["漢字   1", "a     22"]
    assert terminal.clip("漢字漢字", 5) == "漢字…"
