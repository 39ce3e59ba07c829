"""One engine on one workload: single runs, timed or observed, each on prompts that nobody has seen."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from engine import LLM, SamplingParams
from engine.hooks import Event, Subscriber
from engine.interrupts import deferred_interrupt

from .host_parts import HostParts, time_steps
from .step_costs import COST_EVENTS, StepCostObserver, StepCosts
from .workload import Workload
from .workloads import WorkloadSpec


@dataclass(frozen=True)
class Run:
    """Seconds on the wall and on the main thread's processor clock, and what else happened in one run.

    `waits`: the host's waits by reason, those inside a step first. `num_read` events of a log were read afterwards.
    """

    seconds: float
    cpu_seconds: float
    steps: int
    waits: tuple[dict[str, int], dict[str, int]]
    cached_tokens: int
    preemptions: int
    num_read: int = 0
    read_seconds: float = 0.0


class EngineRuns:
    """Runs of one engine. The order of the runs decides their prompts, so engines in the same order get the same."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self._runs: dict[str, itertools.count] = {}

    def draw(self, spec: WorkloadSpec) -> Workload:
        """The prompts of this engine's next run of `spec`."""
        number = next(self._runs.setdefault(spec.name, itertools.count()))
        return spec.draw(number, self.llm.loaded.config.vocab_size)

    def run(self, spec: WorkloadSpec, types: tuple[type[Event], ...] = (), subscriber: Subscriber | None = None) -> Run:
        """One run; making the prompts is not timed. `subscriber` is called for each event of `types`; without one a log
        of them is kept, and read when the run is over.

        RuntimeError if the run has other tokens than asked for, or the subscriber was dropped on the way.
        """
        llm, workload = self.llm, self.draw(spec)
        prompts = [{"prompt_token_ids": list(ask.prompt_token_ids)} for ask in workload.asks]
        params = sampling_params(spec, workload)
        waits, step, errors = llm.core.device.waits, llm.core.step_count, len(llm.hooks.errors)
        before = dict(waits.inside_step), dict(waits.outside_step)
        observing: AbstractContextManager[Any] = nullcontext()
        if types:
            observing = llm.hooks.subscribe(types, subscriber) if subscriber else llm.hooks.record(types)
        with observing as log:
            begin, cpu_begin = time.perf_counter(), time.thread_time()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            seconds, cpu_seconds = time.perf_counter() - begin, time.thread_time() - cpu_begin
            if types:
                llm.core.drain()  # the last steps' device spans come with it
        read_begin = time.perf_counter()
        num_read = len(log.take()) if log is not None else 0
        read_seconds = time.perf_counter() - read_begin
        if len(llm.hooks.errors) > errors:
            raise RuntimeError(llm.hooks.errors[-1])
        made = sum(len(output.outputs[0].token_ids) for output in outputs)
        if made != spec.output_tokens:
            raise RuntimeError(f"{spec.name}: {made} tokens came out of a run that must make {spec.output_tokens}")
        return Run(
            seconds=seconds,
            cpu_seconds=cpu_seconds,
            steps=llm.core.step_count - step,
            waits=(_less(waits.inside_step, before[0]), _less(waits.outside_step, before[1])),
            cached_tokens=sum(output.num_cached_tokens for output in outputs),
            preemptions=sum(output.metrics.num_preemptions for output in outputs),
            num_read=num_read,
            read_seconds=read_seconds,
        )

    def step_costs(self, spec: WorkloadSpec) -> StepCosts:
        """Two runs, one of them observed. RuntimeError if the observer was dropped on the way."""
        host = self._host_parts(spec)
        observer = StepCostObserver()
        self.run(spec, COST_EVENTS, observer)
        return observer.result(host)

    def _host_parts(self, spec: WorkloadSpec) -> HostParts:
        """An unobserved run, stepped as `LLM.generate` steps."""
        llm, workload = self.llm, self.draw(spec)
        ids = [
            llm.add({"prompt_token_ids": list(ask.prompt_token_ids)}, params, final_only=True)
            for ask, params in zip(workload.asks, sampling_params(spec, workload), strict=True)
        ]
        try:
            with deferred_interrupt() as interrupt, llm.core.device.scope():
                parts = time_steps(llm.core, interrupt.raise_if_received)
        finally:
            llm.abort(ids)
        while llm.core.scheduler.has_requests():  # the runner's rows of those that have ended
            llm.step()
        return parts


def sampling_params(spec: WorkloadSpec, workload: Workload) -> list[SamplingParams]:
    """One a request: `spec`'s way of sampling, exactly as many tokens as asked for, no text."""
    return [
        SamplingParams(max_tokens=ask.max_tokens, ignore_eos=True, detokenize=False, **spec.sampling)
        for ask in workload.asks
    ]


def _less(after: Mapping[str, int], before: Mapping[str, int]) -> dict[str, int]:
    counts = {reason: count - before.get(reason, 0) for reason, count in after.items()}
    return {reason: count for reason, count in counts.items() if count}
