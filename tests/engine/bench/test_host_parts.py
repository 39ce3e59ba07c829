"""Parts of the host's step: they add up, waits are in none of them, and only steps that decode count."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from engine.bench.host_parts import REST, HostParts, StepTime, summarize, time_step, time_steps
from engine.bench.measure import Paired
from engine.bench.runs import EngineRuns, sampling_params
from engine.bench.workloads import STANDARD
from engine.hooks import WaitCounter
from engine.interrupts import deferred_interrupt

SPEC = STANDARD["A"].resized(3, 8, 41)


def test_a_wait_is_taken_off_the_phase_it_was_in() -> None:
    waits, now = WaitCounter(), [0]

    def advance() -> Iterator[str]:
        now[0] += 10
        yield "schedule"
        now[0] += 70
        waits.add("output", False, 50)
        yield "output"
        now[0] += 3

    core: Any = SimpleNamespace(_advance=advance, take_outputs=lambda: now.__setitem__(0, now[0] + 4))
    took = time_step(core, lambda: now[0], waits)
    assert took == StepTime({"schedule": 10, "output": 20, REST: 7}, 50) and took.total == 37
    assert time_step(core, lambda: now[0], None).parts == {"schedule": 10, "output": 70, REST: 7}


def test_the_middle_half_counts_and_its_parts_add_up() -> None:
    steps = [StepTime({"schedule": 1000 * n, REST: 500, "output": 2000}, 100 * n) for n in (9, 2, 4, 1000)]
    parts = summarize(steps, steps[:1])
    assert (parts.steps, parts.waits) == (2, 0.65)
    assert list(parts.wall.items()) == [("schedule", 6.5), ("output", 2.0), (REST, 0.5)]
    assert parts.host_us == 9.0 and parts.mean == pytest.approx(1015 / 4 + 2.5)
    assert parts.processor == {"schedule": 9.0, "output": 2.0, REST: 0.5}
    assert summarize([], []) == HostParts(0, {}, 0.0, {}, 0.0)


@pytest.mark.slow
def test_the_parts_of_an_engine(engine: EngineRuns) -> None:
    core, workload = engine.llm.core, engine.draw(SPEC)
    for ask, params in zip(workload.asks, sampling_params(SPEC, workload), strict=True):
        engine.llm.add({"prompt_token_ids": list(ask.prompt_token_ids)}, params, final_only=True)
    begin, calls = time.perf_counter(), []
    with deferred_interrupt(), core.device.scope():
        parts = time_steps(core, lambda: calls.append(core.step_count))
    elapsed = (time.perf_counter() - begin) * 1e6
    assert list(parts.wall) == ["schedule", "update states", "prepare inputs", "forward", "sample", "output", REST]
    assert parts.processor.keys() == parts.wall.keys() and min(parts.wall.values()) > 0
    # 40 steps decode, half of them on each clock, and the middle half of those is left.
    assert parts.steps in (10, 12) and 0 < (parts.host_us + parts.waits) * parts.steps < elapsed
    assert len(calls) == core.step_count and not core.has_unfinished() and not core.in_flight


def test_of_pairs_the_middle_loss_counts() -> None:
    paired = Paired(((1.0, 1.0), (10.0, 12.5), (4.0, 3.2)))
    assert paired.losses == pytest.approx([0.0, 0.2, -0.25]) and paired.loss == 0.0
