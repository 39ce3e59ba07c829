"""Events and spans of the engine, and subscriptions to them.

Only what an observer may know is here; nothing in this file changes the engine. An event is a frozen dataclass that
carries the step, the runner and a time (`time.perf_counter_ns`). An event that nobody subscribed to costs one
look-up, and is never made:

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
from typing import Any, Literal

from .sample.trace import SamplingTrace

Lane = Literal["host", "compute", "copy"]


@dataclass(frozen=True, slots=True)
class Event:
    """What every event carries. `step` counts engine steps from 1; `time_ns` is `time.perf_counter_ns()`."""

    step: int
    runner: str
    time_ns: int


@dataclass(frozen=True, slots=True)
class RequestAdded(Event):
    request_id: str
    prompt_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RequestScheduled(Event):
    """`num_tokens` of the request run in this step, from position `num_computed_tokens` on."""

    request_id: str
    num_tokens: int
    num_computed_tokens: int
    kind: Literal["new", "running", "resumed"]
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class RequestPreempted(Event):
    request_id: str
    num_computed_tokens: int
    by: str
    """The request whose need for a block caused it."""


@dataclass(frozen=True, slots=True)
class RequestResumed(Event):
    request_id: str


@dataclass(frozen=True, slots=True)
class RequestFinished(Event):
    request_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class RowWritten(Event):
    """A request got a row: of the persistent batch (V1) or of the state table (V2)."""

    request_id: str
    row: int


@dataclass(frozen=True, slots=True)
class RowMoved(Event):
    """V1 only: `condense` fills a hole (`src` -> `dst`); `swap` exchanges two rows."""

    request_id: str
    src: int
    dst: int
    how: Literal["condense", "swap"]


@dataclass(frozen=True, slots=True)
class RowFreed(Event):
    request_id: str
    row: int


@dataclass(frozen=True, slots=True)
class BlockTableGathered(Event):
    """V2 only: batch position i of this step reads state row `idx_mapping[i]`."""

    idx_mapping: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class InputsPrepared(Event):
    """`made_by` names, for each input tensor, who made it: a kernel, a host loop, a copy."""

    num_reqs: int
    num_tokens: int
    num_tokens_padded: int
    made_by: dict[str, str]


@dataclass(frozen=True, slots=True)
class KernelLaunched(Event):
    name: str
    form: str


@dataclass(frozen=True, slots=True)
class HostWait(Event):
    """The host stood still for a stream. `inside_step` is False for the wait that fetches a finished step's output."""

    reason: str
    begin_ns: int
    end_ns: int
    inside_step: bool


@dataclass(frozen=True, slots=True)
class Sampled(Event):
    """A token of a step reached the host. `position` is its absolute position in the request."""

    request_id: str
    token_id: int
    position: int
    sampled_in_step: int


@dataclass(frozen=True, slots=True)
class SamplingTraced(Event):
    """How the token at `position` was drawn; it follows the token's `Sampled`. See `ON_REQUEST`."""

    request_id: str
    position: int
    sampled_in_step: int
    trace: SamplingTrace


@dataclass(frozen=True, slots=True)
class DraftProposed(Event):
    """k drafts that a step judged, the first of them for `position`. Told when that step's tokens reach the host, on
    either runner: on V2 the host sees the drafts no sooner.

    `draft_probs` [k] is q, the drafter's probability of each draft, 1 for one that was not drawn; `confidences` [k],
    None where the drafter has none. See `ON_REQUEST`.
    """

    request_id: str
    position: int
    verified_in_step: int
    token_ids: tuple[int, ...]
    draft_probs: tuple[float, ...]
    confidences: tuple[float, ...] | None


@dataclass(frozen=True, slots=True)
class DraftVerified(Event):
    """What became of the drafts of the `DraftProposed` just before.

    `target_probs` [k] is p, the target's probability of each draft, `uniforms` [k] the u that decided. The first
    `num_accepted` drafts stand; `next_token_id` follows them, a bonus behind all k and a correction otherwise. A
    request that ends inside them drops the rest. `method` is the rule, as in `rejection_sample_method`; what
    "synthetic" accepts says nothing about the drafter. See `ON_REQUEST`.
    """

    request_id: str
    position: int
    verified_in_step: int
    method: str
    target_probs: tuple[float, ...]
    uniforms: tuple[float, ...]
    num_accepted: int
    next_token_id: int


@dataclass(frozen=True, slots=True)
class VerificationBudgeted(Event):
    """The host decided that a step verifies `budget` of the drafts of its `num_reqs` requests, who have up to
    `num_drafts`; `expected_tokens` is what it expects of the step, None while no confidences have arrived. The step
    runs `num_tokens` tokens besides the drafts: one of each request, and a captured step's padding."""

    num_reqs: int
    num_drafts: int
    num_tokens: int
    budget: int
    expected_tokens: float | None


@dataclass(frozen=True, slots=True)
class PromptLogprobsComputed(Event):
    """Logprobs of a prompt's own tokens at the positions `start` .. `start + num_positions - 1` reached the host: those
    of the part of the prompt that `computed_in_step` ran, the `k` most likely tokens of each. Logits of `chunk_rows`
    positions existed at a time."""

    request_id: str
    computed_in_step: int
    start: int
    num_positions: int
    k: int
    chunk_rows: int


@dataclass(frozen=True, slots=True)
class GrammarBitmaskFilled(Event):
    """A request's grammar has said what may follow, for the step under way: `num_allowed_tokens` of each of its rows of
    logits, one behind its last known token and one behind each of its drafts.

    The grammar goes along with the first `num_allowed_drafts` of the drafts (-1 is none); its matcher has walked over
    them and was rolled back. Rows behind the draft that it refuses allow everything, as no token of theirs is kept.
    """

    request_id: str
    draft_token_ids: tuple[int, ...]
    num_allowed_drafts: int
    num_allowed_tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GrammarAdvanced(Event):
    """A step's tokens reached the host, and the request's grammar has taken `token_ids` of them. With `is_terminated`
    the output is complete; `error` says why it can't be held to the grammar any longer. What the step sampled behind
    either is dropped."""

    request_id: str
    sampled_in_step: int
    token_ids: tuple[int, ...]
    is_terminated: bool
    error: str | None


@dataclass(frozen=True, slots=True)
class OutputDelivered(Event):
    request_id: str
    new_token_ids: tuple[int, ...]
    new_text: str
    finish_reason: str | None


@dataclass(frozen=True, slots=True)
class SpanBegun(Event):
    """A phase of the host begins (device spans come whole, as `SpanEnded`)."""

    name: str
    lane: Lane


@dataclass(frozen=True, slots=True)
class SpanEnded(Event):
    """A measured stretch of time in one lane, `begin_ns`..`end_ns` on the clock of `time.perf_counter_ns`."""

    name: str
    lane: Lane
    begin_ns: int
    end_ns: int


DRAFT_EVENTS: tuple[type[Event], ...] = (DraftProposed, DraftVerified)
ON_REQUEST: tuple[type[Event], ...] = (SamplingTraced, *DRAFT_EVENTS)
"""Events that cost the device work of its own: only who names the type gets them, `Event` is all of the others."""

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
    result = (types,) if isinstance(types, type) else tuple(types)
    for t in result:
        if not (isinstance(t, type) and issubclass(t, Event)):
            names = ", ".join(sorted(c.__name__ for c in Event.__subclasses__()))
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
