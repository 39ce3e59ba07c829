"""Subscriptions to the events and spans of an engine.

The events themselves are in events.py; nothing in this file changes the engine. An event that nobody subscribed to
costs one look-up, and is never made:

    if RowMoved in hooks.wanted:
        hooks.emit(RowMoved(...))

An observer is called at each event (`subscribe`), or keeps a log of them that is read afterwards (`record`): what comes
once a step is then a tuple until somebody reads it.

Device spans are measured by device events and emitted between steps, some steps after the one that made them, or in a
pause (`EngineCore.drain`): observing never adds a wait. Who stops observing gets what has ended by then.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from .events import (  # noqa: F401 - everybody imports them from here
    DRAFT_EVENTS,
    ON_REQUEST,
    BlockTableGathered,
    DraftProposed,
    DraftVerified,
    Event,
    GrammarAdvanced,
    GrammarBitmaskFilled,
    HostWait,
    InputsPrepared,
    KernelLaunched,
    Lane,
    OutputDelivered,
    PromptLogprobsComputed,
    RequestAdded,
    RequestFinished,
    RequestPreempted,
    RequestResumed,
    RequestScheduled,
    RowFreed,
    RowMoved,
    RowWritten,
    Sampled,
    SamplingTraced,
    SpanBegun,
    SpanEnded,
    VerificationBudgeted,
)

Subscriber = Callable[[Event], None]


class EventLog:
    """Events in the order of their emission, most of them as the fields they are made of until they are read."""

    def __init__(self) -> None:
        self._rows: list[Event | tuple[type[Event], tuple[Any, ...]]] = []
        self.keep = self._rows.append

    def __len__(self) -> int:
        return len(self._rows)

    def take(self) -> list[Event]:
        """The events that were kept since the last call."""
        rows = self._rows[:]
        del self._rows[: len(rows)]
        return [row[0](*row[1]) if type(row) is tuple else row for row in rows]  # type: ignore[misc]


@dataclass(eq=False)
class _Subscription:
    types: tuple[type[Event], ...]
    fn: Subscriber
    log: EventLog | None = None


def _wants(subscription: _Subscription, event_type: type[Event]) -> bool:
    types = subscription.types
    return event_type in types or (Event in types and event_type not in ON_REQUEST)


class Hooks:
    """The emitting side, one an engine. Thread-safe: subscriptions are replaced, never edited, under a lock."""

    def __init__(self, runner: str) -> None:
        self.runner = runner
        self.step = 0
        self.wanted: frozenset[type[Event]] = frozenset()
        """The event types that somebody subscribed to."""
        self.spans = False
        """Somebody wants spans, so the streams measure them."""
        self.errors: list[str] = []
        """Reports of subscribers that raised and were dropped."""
        self.emit_spans: Callable[[], None] = _nothing
        """Emits the device spans that have ended; the engine's device sets it."""
        self._subscriptions: tuple[_Subscription, ...] = ()
        self._routes: dict[type[Event], tuple[_Subscription, ...]] = {}
        self._logs: dict[type[Event], tuple[EventLog, ...]] = {}
        self._called: dict[type[Event], tuple[_Subscription, ...]] = {}
        with _lock:
            _all_hooks.add(self)
            for subscription in _everywhere:
                self._add(subscription)

    @contextmanager
    def subscribe(self, types: type[Event] | Iterable[type[Event]], fn: Subscriber) -> Iterator[None]:
        """Calls `fn(event)` for each event of `types` while the context is open; `Event` is all but `ON_REQUEST`."""
        subscription = _Subscription(_as_types(types), fn)
        with _lock:
            self._add(subscription)
        try:
            yield
        finally:
            self._leave(subscription)

    @contextmanager
    def record(self, types: type[Event] | Iterable[type[Event]]) -> Iterator[EventLog]:
        """Keeps the events of `types` in a log while the context is open. It grows until it is read."""
        log = EventLog()
        subscription = _Subscription(_as_types(types), log.keep, log)
        with _lock:
            self._add(subscription)
        try:
            yield log
        finally:
            self._leave(subscription)

    def wants(self, types: tuple[type[Event], ...]) -> bool:
        """Whether somebody subscribed to one of `types`."""
        return not self.wanted.isdisjoint(types)

    def emit(self, event: Event) -> None:
        """Hands `event` to its subscribers. One that raises is reported on `errors` and dropped; the step goes on."""
        self._call(self._routes.get(type(event), ()), event)

    def tell(self, event_type: type[Event], *fields: Any) -> None:
        """`emit(event_type(*fields))`, for what comes several times a step: the event is made for who is called at
        once, and a log keeps the fields."""
        for log in self._logs.get(event_type, ()):
            log.keep((event_type, fields))
        if event_type in self._called:
            self._call(self._called[event_type], event_type(*fields))

    def _call(self, subscriptions: tuple[_Subscription, ...], event: Event) -> None:
        for subscription in subscriptions:
            try:
                subscription.fn(event)
            except Exception as error:  # noqa: BLE001 - an observer must never break the engine
                self.errors.append(f"{subscription.fn!r} raised {error!r} on {type(event).__name__}: dropped")
                with _lock:
                    self._remove(subscription)

    def stamp(self) -> tuple[int, str, int]:
        """The three leading fields of an event that happens now."""
        return self.step, self.runner, time.perf_counter_ns()

    def span(self, name: str) -> AbstractContextManager[None]:
        """Measures a phase of the host, if anybody wants it measured."""
        return _HostSpan(self, name) if self.spans else _NOT_MEASURED

    def _add(self, subscription: _Subscription) -> None:
        self._replace((*self._subscriptions, subscription))

    def _leave(self, subscription: _Subscription) -> None:
        if _wants(subscription, SpanBegun) or _wants(subscription, SpanEnded):
            self.emit_spans()
        with _lock:
            self._remove(subscription)

    def _remove(self, subscription: _Subscription) -> None:
        self._replace(tuple(s for s in self._subscriptions if s is not subscription))

    def _replace(self, subscriptions: tuple[_Subscription, ...]) -> None:
        self._subscriptions = subscriptions
        routes = {t: tuple(s for s in subscriptions if _wants(s, t)) for t in Event.__subclasses__()}
        self._routes = {event_type: route for event_type, route in routes.items() if route}
        logs = {t: tuple(s.log for s in route if s.log is not None) for t, route in self._routes.items()}
        self._logs = {event_type: found for event_type, found in logs.items() if found}
        called = {t: tuple(s for s in route if s.log is None) for t, route in self._routes.items()}
        self._called = {event_type: found for event_type, found in called.items() if found}
        self.wanted = frozenset(self._routes)
        self.spans = not self.wanted.isdisjoint((SpanBegun, SpanEnded))


class _HostSpan(AbstractContextManager[None]):
    __slots__ = ("_begin", "_hooks", "_name")

    def __init__(self, hooks: Hooks, name: str) -> None:
        self._hooks = hooks
        self._name = name
        self._begin = 0

    def __enter__(self) -> None:
        hooks, self._begin = self._hooks, time.perf_counter_ns()
        if SpanBegun in hooks.wanted:
            hooks.tell(SpanBegun, hooks.step, hooks.runner, self._begin, self._name, "host")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        hooks, end = self._hooks, time.perf_counter_ns()
        hooks.tell(SpanEnded, hooks.step, hooks.runner, end, self._name, "host", self._begin, end)


def _nothing() -> None:
    return


_NOT_MEASURED = nullcontext()
_lock = threading.RLock()
_all_hooks: weakref.WeakSet[Hooks] = weakref.WeakSet()
_everywhere: list[_Subscription] = []


@contextmanager
def subscribe(types: type[Event] | Iterable[type[Event]], fn: Subscriber) -> Iterator[None]:
    """As `Hooks.subscribe`, for every engine of the process, those made later included."""
    subscription = _Subscription(_as_types(types), fn)
    with _lock:
        _everywhere.append(subscription)
        for hooks in _all_hooks:
            hooks._add(subscription)
    try:
        yield
    finally:
        with _lock:
            _everywhere.remove(subscription)
            everyone = list(_all_hooks)
        for hooks in everyone:
            hooks._leave(subscription)


def _as_types(types: type[Event] | Iterable[type[Event]]) -> tuple[type[Event], ...]:
    several = isinstance(types, Iterable) and not isinstance(types, type | str)
    result: tuple[Any, ...] = tuple(types) if several else (types,)  # type: ignore[arg-type]
    for t in result:
        if not (isinstance(t, type) and issubclass(t, Event)):
            # A set: a class with slots is made a second time by its decorator, and the first one may still be there.
            names = ", ".join(sorted({c.__name__ for c in Event.__subclasses__()}))
            raise TypeError(f"subscribe: {t!r} is no event type; the event types are Event (all) and {names}")
    return result


@dataclass
class WaitCounter:
    """Counts the host's waits by reason; runners report through it, tests hold V2's step to zero."""

    inside_step: dict[str, int] = field(default_factory=dict)
    outside_step: dict[str, int] = field(default_factory=dict)
    total_ns: int = 0
    """Time that the host has stood still in all."""

    def add(self, reason: str, inside_step: bool, ns: int) -> None:
        self.total_ns += ns
        counts = self.inside_step if inside_step else self.outside_step
        counts[reason] = counts.get(reason, 0) + 1
