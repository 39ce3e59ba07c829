"""What whole steps of runner V2 cost, measured when an engine is made: some schedules of verification go by it."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch

from .step_graphs import GREEDY, StepSize
from .work_making import padding_work

if TYPE_CHECKING:
    from .runner import ModelRunnerV2

MEASURED_EAGERLY = 8
"""Requests of the largest step that is measured where none is captured."""
_REPLAYS = 5


def measure_steps(runner: ModelRunnerV2) -> None:
    """Lets the verification, if there is one, measure the sizes that it will run. Waits for the device."""
    if runner.speculation is None:
        return
    captured = runner.graphs.decodes
    sizes: dict[int, list[int]] = {}
    for size in captured or _eager_sizes(runner):
        sizes.setdefault(size.num_reqs, []).append(size.num_tokens)
    runner.speculation.verification.measure(sizes, partial(seconds_of, runner), is_captured=bool(captured))


def _eager_sizes(runner: ModelRunnerV2) -> list[StepSize]:
    """A few sizes of which the others follow: a step that is launched piece by piece has no sizes of its own."""
    most = min(runner.max_num_reqs, MEASURED_EAGERLY)
    drafts = runner.num_drafts
    return [
        StepSize(num_reqs, num_reqs * (1 + n))
        for num_reqs in {1, most}
        for n in sorted({0, 1, 3, drafts})
        if n <= drafts and num_reqs * (1 + n) <= runner.max_num_tokens
    ]


def seconds_of(runner: ModelRunnerV2, num_reqs: int, num_tokens: int) -> float:
    """What one step of that size takes, with empty contexts. Waits for the device."""
    size = StepSize(num_reqs, num_tokens)
    run: Callable[[], object]
    if runner.graphs.decodes:
        repeats, run = _REPLAYS, partial(runner.graphs.replay, size, GREEDY)
    else:
        eager = padding_work(runner, size)
        repeats, run = 1, partial(eager.whole_step, GREEDY, False, eager.output_turns())

    def work() -> None:
        for _ in range(repeats):
            run()

    if not runner.device.is_cuda:  # where an engine is made is its stream: see cpu_stream.py
        begin = time.perf_counter()
        with torch.inference_mode():
            work()
        return (time.perf_counter() - begin) / repeats
    runner.device.catch_up()
    runner.device.drain()
    begin = time.perf_counter()
    runner.device.compute.submit("measure a step", work)
    runner.device.drain()
    return (time.perf_counter() - begin) / repeats
