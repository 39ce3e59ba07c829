"""Every environment switch in one typed table: name, default, where it acts, what it does.

A bad value raises and says what is possible.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Switch:
    name: str
    default: Any
    parse: Callable[[str], Any]
    values: str
    where: str
    what: str


def _flag(text: str) -> bool:
    return {"0": False, "false": False, "1": True, "true": True}[text.lower()]


def _above_0(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise ValueError
    return value


SWITCHES = (
    Switch(
        "VLLM_USE_V2_MODEL_RUNNER", None, _flag, "0 or 1", "engine/worker.py",
        "Which runner is built when the config leaves use_v2_model_runner at None. Unset: V2.",
    ),
    Switch(
        "RUNNERSCOPE_CPU_KVCACHE_SPACE", 1.0, _above_0, "GiB, a number above 0", "engine/worker.py",
        "The most memory that the KV cache takes on a CPU.",
    ),
    Switch(
        "RUNNERSCOPE_CACHE", None, str, "a folder", "engine/models/resolve.py",
        "Where downloaded models are kept. Unset: runnerscope in the user's cache folder.",
    ),
)  # fmt: skip

_BY_NAME = {switch.name: switch for switch in SWITCHES}


def get(name: str) -> Any:
    """The value of switch `name` in this process's environment; an empty variable counts as unset."""
    switch = _BY_NAME[name]
    text = os.environ.get(name, "")
    if not text:
        return switch.default
    try:
        return switch.parse(text)
    except (KeyError, ValueError):
        raise ValueError(f"environment variable {name}={text!r}: possible is {switch.values}") from None
