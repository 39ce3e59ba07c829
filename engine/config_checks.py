"""What every part of the configuration checks its values with."""

from __future__ import annotations

import difflib
from collections.abc import Collection
from typing import Any


class ConfigError(ValueError):
    """A configuration that can't be: says what was asked, what is possible and what to do."""


def closest(name: str, names: Any) -> str:
    """`", did you mean 'x'?"` for the nearest of `names`, or nothing."""
    match = difflib.get_close_matches(name, list(names), n=1, cutoff=0.5)
    return f", did you mean {match[0]!r}?" if match else ""


def check_choice(what: str, value: Any, choices: Collection[str]) -> None:
    """ConfigError if `value` is none of `choices`."""
    if value not in choices:
        raise ConfigError(
            f"{what}={value!r}: possible are {', '.join(map(repr, choices))}{closest(str(value), choices)}"
        )


def check_positive(name: str, value: Any) -> None:
    """ConfigError if `value` is no whole number of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name}={value!r}: must be a whole number of at least 1")
