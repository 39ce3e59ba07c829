"""What the checks of SamplingParams share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def is_whole(value: Any) -> bool:
    """An int, which True is not."""
    return isinstance(value, int) and not isinstance(value, bool)


MAX_FLOAT32 = (2 - 2**-23) * 2.0**127
MIN_FLOAT32 = 2.0**-126
"""The least normal number: tables of the runners hold nothing smaller that is not 0."""


def is_real(value: Any) -> bool:
    """A number that is finite in float32, as which the runners hold it."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -MAX_FLOAT32 <= value <= MAX_FLOAT32


def as_tuple(name: str, value: Any, what: str) -> tuple[Any, ...]:
    """`value` as a tuple, None as none. ValueError if it is no collection."""
    if value is None:
        return ()
    if not isinstance(value, list | tuple | set | frozenset):
        raise ValueError(f"{name}={value!r}: must be {what}, or None for none")
    return tuple(value)


def settle_token_ids(name: str, value: Any, limit: int, distinct: bool = True) -> tuple[int, ...]:
    """Token ids, at least one and at most `limit`; with `distinct` each of them once."""
    ids = as_tuple(name, value, "a list of token ids")
    if any(not is_whole(token) or token < 0 for token in ids):
        raise ValueError(f"{name}={value!r}: must be token ids")
    if not ids:
        raise ValueError(f"{name}={value!r}: is empty; give at least one token id, or None for none")
    settled = tuple(dict.fromkeys(ids)) if distinct else ids
    if len(settled) > limit:
        raise ValueError(f"{name} has {len(settled)} ids: at most {limit} are possible")
    return settled


def settle_logit_bias(value: Any, limit: int) -> dict[int, float] | None:
    """Token id -> bias from -100 to 100; None for none. Ids may be text, as JSON has them."""
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise ValueError(f"logit_bias={value!r}: must be a dict of token id -> bias, or None for none")
    settled: dict[int, float] = {}
    for key, bias in value.items():
        token = int(key) if isinstance(key, str) and key.isascii() and key.isdecimal() else key
        if not is_whole(token) or token < 0:
            raise ValueError(f"logit_bias has the key {key!r}: must be a token id")
        if not is_real(bias):
            raise ValueError(f"logit_bias[{key!r}]={bias!r}: must be a finite number (-100 all but forbids a token)")
        settled[token] = min(100.0, max(-100.0, float(bias)))
    if len(settled) > limit:
        raise ValueError(f"logit_bias has {len(settled)} ids: at most {limit} are possible")
    return settled or None
