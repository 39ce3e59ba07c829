"""Numbers of the command line that are checked as they are read, before any work is done."""

from __future__ import annotations

import argparse
import math


def count(text: str) -> int:
    """A whole number of at least 1."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a whole number of at least 1")
    return value


def not_negative(text: str) -> float:
    """A finite number of at least 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a number of at least 0")
    return value


def port(text: str) -> int:
    """A TCP port; 0 is any free one."""
    try:
        value = int(text)
    except ValueError:
        value = -1
    if not 0 <= value < 2**16:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a port, 1 to 65535, or 0 for any free one")
    return value
