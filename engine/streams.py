"""What a stream, an event and a span are, whatever the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from .hooks import Lane


class Event(Protocol):
    """A mark in a stream. `synchronize` blocks the host until the work before it is done."""

    def synchronize(self) -> None: ...
    def query(self) -> bool: ...


class Stream(Protocol):
    """An ordered queue of device work."""

    lane: Lane

    def submit(self, name: str, fn: Callable[..., Any], *args: Any) -> None:
        """Queues `fn(*args)`; its result is dropped, so it writes to tensors or to a holder that later work reads."""

    def record_event(self, *, for_host: bool = True) -> Event:
        """A mark behind all work so far; without `for_host` only streams wait for it."""
        ...

    def wait_event(self, event: Event) -> None:
        """Work submitted from now on starts after `event`. The host does not wait."""


class Span(NamedTuple):
    """A measured piece of device work; times on the clock of `time.perf_counter_ns`."""

    step: int
    name: str
    lane: Lane
    begin_ns: int
    end_ns: int
