"""What `run_until` may stop at: an event type, a function of the record, or one of a few names."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any

from engine import hooks
from engine.hooks import Event

from .recording import StepRecord

Condition = Callable[[StepRecord], bool]


def _happened(*types: type[Event]) -> Condition:
    return lambda record: any(True for done in record.runners.values() for _ in done.of(*types))


def _prefix_hit(record: StepRecord) -> bool:
    events = (e for done in record.runners.values() for e in done.of(hooks.RequestScheduled))
    return any(e.kind != "running" and e.num_cached_tokens > 0 for e in events)


NAMED: dict[str, tuple[Condition, str]] = {
    "token": (_happened(hooks.Sampled), "a token reaches the host"),
    "finished": (_happened(hooks.RequestFinished), "a request finishes"),
    "preempted": (_happened(hooks.RequestPreempted), "a request is preempted"),
    "resumed": (_happened(hooks.RequestResumed), "a preempted request comes back"),
    "row moved": (_happened(hooks.RowMoved), "V1 moves a row (condense or swap)"),
    "row freed": (_happened(hooks.RowFreed), "a row becomes free"),
    "prefix hit": (_prefix_hit, "a prompt is found in the prefix cache"),
}
"""The named conditions and what each waits for. "end", which every session has, runs until nothing is left to do."""


def parse_condition(condition: Any) -> Condition | None:
    """A function of the record; None for "end". Raises TypeError or ValueError that says what is possible."""
    if condition == "end":
        return None
    if isinstance(condition, str):
        if condition in NAMED:
            return NAMED[condition][0]
        names = [*NAMED, "end"]
        near = difflib.get_close_matches(condition, names, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"run_until({condition!r}): the named conditions are {', '.join(map(repr, names))}.{hint}")
    if isinstance(condition, type) and issubclass(condition, Event):
        return _happened(condition)
    if callable(condition):
        return condition
    raise TypeError(
        f"run_until({condition!r}): give a name, an event type of engine.hooks, or a function of the record"
    )
