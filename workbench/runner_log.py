"""One engine and what it did, step by step. The log only grows: a step that is in it never changes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Literal

from engine import LLM
from engine.hooks import DRAFT_EVENTS, Event, SamplingTraced, SpanBegun, SpanEnded
from engine.interrupts import deferred_interrupt
from engine.snapshot import PendingSnapshot, Snapshot

from .prompts import SessionRequest
from .recording import RunnerStep
from .sharing import shared

WHOLE = "output"
"""The phase after which a step is whole."""


@dataclass(frozen=True)
class _Ran:
    """A whole step whose device state and device spans have not been read yet."""

    before: PendingSnapshot
    after: PendingSnapshot
    engine_step: int
    num_events: int
    """How many events there were, in all, when it ended."""
    begin_ns: int
    end_ns: int
    pauses: tuple[tuple[int, int], ...]


@dataclass
class _Walk:
    """A step that is being walked through phase by phase."""

    phases: Iterator[str]
    before: PendingSnapshot
    begin_ns: int
    pauses: list[tuple[int, int]] = field(default_factory=list)


class RunnerLog:
    """Runs one engine and keeps its steps. A pause drains the device; within one `run_to` nothing stops."""

    def __init__(self, name: Literal["v1", "v2"], llm: LLM) -> None:
        self.name = name
        self.llm = llm
        self.core = llm.core
        self.steps: list[RunnerStep] = []
        self.open: RunnerStep | None = None
        """The step that is being walked through, as far as it has come."""
        self._arrivals: list[SessionRequest] = []
        self._events: list[Event] = []
        self._walk: _Walk | None = None
        self._last: PendingSnapshot | None = None
        self._paused_since: int | None = None
        self._first: PendingSnapshot | None = None
        self._state: tuple[PendingSnapshot, Snapshot] | None = None
        """The last snapshot that was read; the next one shares with it what did not change."""
        self._stack = ExitStack()
        self._stack.enter_context(self.core.hooks.subscribe(Event, self._events.append))
        self._traces = ExitStack()
        self._drafts = ExitStack()

    def close(self) -> None:
        """Ends the subscriptions and the engine; the steps stay."""
        self._traces.close()
        self._drafts.close()
        self._stack.close()
        self.llm.close()

    def trace_sampling(self, on: bool) -> None:
        """From the next step on, records how each token is drawn, or no longer."""
        self._traces.close()
        if on:
            self._traces.enter_context(self.core.hooks.subscribe(SamplingTraced, self._events.append))

    def trace_drafts(self, on: bool) -> None:
        """From the next step on, records what becomes of each draft, or no longer."""
        self._drafts.close()
        if on:
            self._drafts.enter_context(self.core.hooks.subscribe(DRAFT_EVENTS, self._events.append))

    @property
    def _began(self) -> bool:
        return self.core.step_count > 0

    @property
    def busy(self) -> bool:
        """Whether anything is left to do, now or by a later arrival; a step that ran ahead is to be fetched too."""
        return bool(self._walk or self._arrivals or self.core.has_unfinished() or self.core.in_flight)

    @property
    def initial(self) -> Snapshot:
        """The state before the first step."""
        return (self._first or self._before()).result()

    # -- requests

    def check(self, request: SessionRequest) -> None:
        """Raises what adding the request would raise, and leaves no trace of it."""
        self.llm.check(
            self._prompt(request), request.sampling_params, request_id=request.request_id, priority=request.priority
        )

    def expect(self, request: SessionRequest) -> None:
        """Adds the request now, or when its step comes."""
        if request.arrive_at_step > len(self.steps) + 1:
            self._arrivals.append(request)
        else:
            self._add(request)

    def abort(self, request_id: str) -> None:
        """Ends a request at once; one that has not arrived never will."""
        self._arrivals = [r for r in self._arrivals if r.request_id != request_id]
        self.core.abort([request_id])
        self._last = None

    def _prompt(self, request: SessionRequest) -> str | dict[str, Any]:
        if request.chat and isinstance(request.prompt, str):
            return self.llm.chat_prompt([{"role": "user", "content": request.prompt}])
        return request.prompt

    def _add(self, request: SessionRequest) -> None:
        self.llm.add(
            self._prompt(request), request.sampling_params, request_id=request.request_id, priority=request.priority
        )
        self._last = None

    def _arrive(self, step: int) -> None:
        now = [r for r in self._arrivals if r.arrive_at_step <= step]
        self._arrivals = [r for r in self._arrivals if r.arrive_at_step > step]
        for request in now:
            self._add(request)

    # -- steps

    def run_to(self, target: int) -> None:
        """Runs until the log has `target` steps or nothing is left to do.

        An error or a Ctrl-C passes through once the log holds every step that was whole.
        """
        if self._walk:
            self._finish_walk()
        ran: list[_Ran] = []
        try:
            while len(self.steps) + len(ran) < target and self.busy:
                with deferred_interrupt():
                    ran.append(self._run_one(len(self.steps) + len(ran) + 1))
        finally:
            with deferred_interrupt():
                self._pause(ran)

    def step_phase(self) -> None:
        """Runs one phase of the next step, or of the open one, and pauses."""
        if not self.busy:
            return
        with deferred_interrupt():
            if self._walk is None:
                self._arrive(len(self.steps) + 1)
                before, pauses = self._before(), self._resume()
                self._walk = _Walk(self.core.phases(), before, time.perf_counter_ns(), pauses)
            else:
                self._walk.pauses += self._resume()
            try:
                phase = next(self._walk.phases, WHOLE)
            except Exception:
                self._give_up()
                raise
            if phase == WHOLE:
                self._finish_walk()
            else:
                self._pause([])
                self.open = self._open_step(phase)
                self._paused_since = time.perf_counter_ns()

    def idle_to(self, target: int) -> None:
        """Fills the log with steps in which this runner had nothing to do, while the other had."""
        while len(self.steps) < target:
            self.steps.append(self.idle_step(len(self.steps) + 1))

    def idle_step(self, number: int) -> RunnerStep:
        """A step in which nothing happened."""
        state = self.steps[-1].snapshot if self.steps else self.initial
        return RunnerStep(self.name, number, state, state, ())

    def _run_one(self, number: int) -> _Ran:
        self._arrive(number)
        before, pauses = self._before(), self._resume()
        mark, begin = len(self._events), time.perf_counter_ns()
        try:
            self.core.step()
        except Exception:
            del self._events[mark:]
            self._last = None
            raise
        return self._ran(before, begin, pauses)

    def _finish_walk(self) -> None:
        assert self._walk is not None
        walk = self._walk
        pauses = [*walk.pauses, *self._resume()]
        try:
            with deferred_interrupt():
                self.core.step()
        except Exception:
            self._give_up()
            raise
        self._walk = self.open = None
        self._pause([self._ran(walk.before, walk.begin_ns, pauses)])

    def _give_up(self) -> None:
        """A step failed while it was walked through; the engine has taken it back."""
        self._walk = self.open = self._last = None
        self._events.clear()
        self._pause([])

    def _ran(self, before: PendingSnapshot, begin: int, pauses: list[tuple[int, int]]) -> _Ran:
        end = time.perf_counter_ns()
        after = self._last = self._snapshot()
        return _Ran(before, after, self.core.step_count, len(self._events), begin, end, tuple(pauses))

    def _snapshot(self) -> PendingSnapshot:
        """Its cost is the observer's; it stands on the timeline under its own name."""
        begin = time.perf_counter_ns()
        pending = self.core.snapshot()
        end = time.perf_counter_ns()
        self._events.append(SpanEnded(self.core.step_count, self.name, end, "snapshot", "host", begin, end))
        return pending

    def _read(self, pending: PendingSnapshot) -> Snapshot:
        if self._state is None or self._state[0] is not pending:
            self._state = pending, shared(pending.result(), self._state[1] if self._state else None)
        return self._state[1]

    def _before(self) -> PendingSnapshot:
        if self._last is None:
            self._last = self.core.snapshot()
        self._first = self._first if self._began else self._last
        return self._last

    # -- pauses

    def _resume(self) -> list[tuple[int, int]]:
        since, self._paused_since = self._paused_since, None
        return [] if since is None else [(since, time.perf_counter_ns())]

    def _pause(self, ran: list[_Ran]) -> None:
        """Waits for the device, outside every step, and turns what was run into steps of the log."""
        self.core.drain()
        if ran:
            self._close_steps(ran)
        self._paused_since = time.perf_counter_ns()

    def _open_step(self, phase: str) -> RunnerStep:
        assert self._walk is not None
        walk, now, end = self._walk, self.core.snapshot().result(), time.perf_counter_ns()
        before = self._read(walk.before)
        return RunnerStep(
            self.name,
            len(self.steps) + 1,
            shared(now, before),
            before,
            tuple(self._events),
            phase,
            walk.begin_ns,
            end,
            tuple(walk.pauses),
        )

    def _close_steps(self, ran: list[_Ran]) -> None:
        parts: list[list[Event]] = [[] for _ in ran]
        places = {one.engine_step: place for place, one in enumerate(ran)}
        place = 0
        for index, event in enumerate(self._events):
            while place + 1 < len(ran) and index >= ran[place].num_events:
                place += 1
            # A device span is known only after its step; it belongs to the step that launched it.
            parts[places.get(event.step, place) if _on_device(event) else place].append(event)
        self._events.clear()
        for one, events in zip(ran, parts, strict=True):
            number, before, state = len(self.steps) + 1, self._read(one.before), self._read(one.after)
            self.steps.append(
                RunnerStep(self.name, number, state, before, tuple(events), WHOLE, one.begin_ns, one.end_ns, one.pauses)
            )


def _on_device(event: Event) -> bool:
    return isinstance(event, SpanBegun | SpanEnded) and event.lane != "host"
