"""Numbers of the command line that are checked as they are read, before any work is done."""

from __future__ import annotations

import argparse
import math


def _read(text: str, kind: type[int] | type[float], least: float, below: float, must_be: str) -> float:
    """`kind(text)` from `least` to what is below `below`; else an error that says what it must be."""
    try:
        value = kind(text)
    except ValueError:
        value = math.nan
    if not least <= value < below:
        raise argparse.ArgumentTypeError(f"{text!r}: must be {must_be}")
    return value


def count(text: str) -> int:
    """A whole number of at least 1."""
    return int(_read(text, int, 1, math.inf, "a whole number of at least 1"))


def not_negative(text: str) -> float:
    """A finite number of at least 0."""
    return _read(text, float, 0, math.inf, "a number of at least 0")


def port(text: str) -> int:
    """A TCP port; 0 is any free one."""
    return int(_read(text, int, 0, 2**16, "a port, 1 to 65535, or 0 for any free one"))
