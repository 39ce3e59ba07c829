"""Where the host's time of a steady step goes while nobody observes: by phase, without waits, and on the processor.

A phase is timed at the places where `EngineCore` yields, so there is nothing in the step that would not be there
otherwise. `Device.wait` is the engine's only wait and measures itself; what it took is taken off its phase. Time in
which a call of the driver blocks or spins is not a wait in that sense: it stays in its phase, and the processor's time
beside it tells blocking (less than the clock's) from working or spinning.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.core import EngineCore
from engine.hooks import WaitCounter

REST = "rest"
"""The end of a step, behind its last phase: taking its outputs."""
_Clock = Callable[[], int]


@dataclass(frozen=True)
class HostParts:
    """µs of one steady step: means over the middle half of the steps, so that what is rare is left out and the parts
    add up.

    `wall`: by phase, without waits. `waits`: the waits. `processor`: by phase, the thread's processor time in as many
    other steps, waits included where they keep the processor. `mean`: without waits too, of all the steps, so of those
    as well in which many requests at once need a block.
    """

    steps: int
    wall: dict[str, float]
    waits: float
    processor: dict[str, float]
    mean: float

    @property
    def host_us(self) -> float:
        """The host's work in a step: everything but its waits."""
        return sum(self.wall.values())


@dataclass(frozen=True)
class StepTime:
    """Of one step, in ns and by phase; without waits where they were taken off."""

    parts: dict[str, int]
    waited: int

    @property
    def total(self) -> int:
        return sum(self.parts.values())


def time_step(core: EngineCore, clock: _Clock, waits: WaitCounter | None) -> StepTime:
    """One step, as `EngineCore.step` makes it for who holds back interrupts himself. With `waits`, on whose clock
    `clock` has to be, they are taken off."""
    parts: dict[str, int] = {}
    all_waited, last = 0, clock()
    before = waits.total_ns if waits else 0

    def note(phase: str) -> None:
        nonlocal all_waited, last, before
        now, after = clock(), waits.total_ns if waits else 0
        parts[phase] = parts.get(phase, 0) + now - last - (after - before)
        all_waited, last, before = all_waited + after - before, now, after

    for phase in core._advance():
        note(phase)
    core.take_outputs()
    note(REST)
    return StepTime(parts, all_waited)


def time_steps(core: EngineCore, check: Callable[[], None]) -> HostParts:
    """Runs `core` until it has nothing to do, and times the steps in which every request decoded one token; `check()`
    may raise between two steps. Called inside `deferred_interrupt` and `core.device.scope`.

    Every other step is measured on the processor's clock, so that reading that clock is in none of `wall`.
    """
    waits = core.device.waits
    wall: list[StepTime] = []
    processor: list[StepTime] = []
    while core.has_unfinished() or core.in_flight:
        on_wall = core.step_count % 2 == 0
        took = time_step(core, time.perf_counter_ns, waits) if on_wall else time_step(core, time.thread_time_ns, None)
        launched = core.in_flight[-1].scheduler_output if core.in_flight else None
        if launched and launched.total_num_scheduled_tokens == len(launched.num_scheduled_tokens):
            (wall if on_wall else processor).append(took)
        check()
    return summarize(wall, processor)


def summarize(wall: Sequence[StepTime], processor: Sequence[StepTime]) -> HostParts:
    """The parts from the middle half of each."""
    middle = _middle(wall)
    waits = statistics.fmean(step.waited for step in middle) / 1e3 if middle else 0.0
    mean = statistics.fmean(step.total for step in wall) / 1e3 if wall else 0.0
    return HostParts(len(middle), _means(middle), waits, _means(_middle(processor)), mean)


def _middle(steps: Sequence[StepTime]) -> list[StepTime]:
    quarter = len(steps) // 4
    return sorted(steps, key=lambda step: step.total)[quarter : len(steps) - quarter]


def _means(steps: Sequence[StepTime]) -> dict[str, float]:
    phases = dict.fromkeys(phase for step in steps for phase in step.parts)
    ordered = [phase for phase in phases if phase != REST] + [REST] * (REST in phases)
    return {phase: statistics.fmean(step.parts.get(phase, 0) for step in steps) / 1e3 for phase in ordered}
