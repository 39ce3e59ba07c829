"""One engine on one workload: single runs, timed or observed, each on prompts that nobody has seen."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass

from engine import LLM, SamplingParams
from engine.hooks import Event, Subscriber

from .step_costs import COST_EVENTS, StepCostObserver, StepCosts
from .workload import Workload
from .workloads import WorkloadSpec


@dataclass(frozen=True)
class Run:
    """Seconds on the wall and on the main thread's processor clock, and what else happened in one run.

    `waits`: the host's waits by reason, those inside a step first.
    """

    seconds: float
    cpu_seconds: float
    steps: int
    waits: tuple[dict[str, int], dict[str, int]]
    cached_tokens: int
    preemptions: int


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
        """One run, with `subscriber` on `types` if given; making the prompts is not timed."""
        llm, workload = self.llm, self.draw(spec)
        prompts = [{"prompt_token_ids": list(ask.prompt_token_ids)} for ask in workload.asks]
        params = sampling_params(spec, workload)
        waits, step = llm.core.device.waits, llm.core.step_count
        before = dict(waits.inside_step), dict(waits.outside_step)
        with llm.hooks.subscribe(types, subscriber) if subscriber else nullcontext():
            begin, cpu_begin = time.perf_counter(), time.thread_time()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            seconds, cpu_seconds = time.perf_counter() - begin, time.thread_time() - cpu_begin
            if subscriber:
                llm.core.drain()  # the last steps' device spans come with it
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
        )

    def step_costs(self, spec: WorkloadSpec) -> StepCosts:
        """Two runs, one of them observed. RuntimeError if the observer was dropped on the way."""
        host_us = self._host_us(spec)
        observer, hooks = StepCostObserver(), self.llm.hooks
        errors = len(hooks.errors)
        self.run(spec, COST_EVENTS, observer)
        if len(hooks.errors) > errors:
            raise RuntimeError(hooks.errors[-1])
        return observer.result(host_us)

    def _host_us(self, spec: WorkloadSpec) -> float:
        """Microseconds of a steady step on the host without its waits, the median of an unobserved run."""
        llm, workload = self.llm, self.draw(spec)
        core, waits, steady = llm.core, llm.core.device.waits, []
        for ask, params in zip(workload.asks, sampling_params(spec, workload), strict=True):
            llm.add({"prompt_token_ids": list(ask.prompt_token_ids)}, params, final_only=True)
        while core.has_unfinished() or core.in_flight:
            begin, waited = time.perf_counter_ns(), waits.total_ns
            llm.step()
            took = time.perf_counter_ns() - begin - (waits.total_ns - waited)
            launched = core.in_flight[-1].scheduler_output if core.in_flight else None
            if launched and launched.total_num_scheduled_tokens == len(launched.num_scheduled_tokens):
                steady.append(took)
        return statistics.median(steady) / 1e3 if steady else 0.0


def sampling_params(spec: WorkloadSpec, workload: Workload) -> list[SamplingParams]:
    """One a request: `spec`'s way of sampling, exactly as many tokens as asked for, no text."""
    return [
        SamplingParams(max_tokens=ask.max_tokens, ignore_eos=True, detokenize=False, **spec.sampling)
        for ask in workload.asks
    ]


def _less(after: Mapping[str, int], before: Mapping[str, int]) -> dict[str, int]:
    counts = {reason: count - before.get(reason, 0) for reason, count in after.items()}
    return {reason: count for reason, count in counts.items() if count}
