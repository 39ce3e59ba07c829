"""A fixed number of clients on one engine: each sends its next request when its last one has ended."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from engine import LLM, SamplingParams
from engine.interrupts import deferred_interrupt
from engine.prompts import Prompt
from engine.request import RequestOutput


@dataclass(frozen=True)
class LoopRun:
    """`outputs` in the prompts' order; `waits_inside`: how often the host waited inside a step, by reason."""

    seconds: float
    steps: int
    outputs: tuple[RequestOutput, ...]
    waits_inside: Counter[str]

    @property
    def tokens_per_second(self) -> float:
        """Output tokens over the whole run, prompts and the last wave's tail included."""
        return sum(len(output.outputs[0].token_ids) for output in self.outputs) / self.seconds

    @property
    def tpot(self) -> list[float]:
        """Seconds of each output token after the first (vLLM's TPOT), one for each request that has at least two."""
        found = []
        for output in self.outputs:
            metrics, tokens = output.metrics, len(output.outputs[0].token_ids)
            if tokens > 1:
                assert metrics.first_token_time is not None and metrics.last_token_time is not None
                found.append((metrics.last_token_time - metrics.first_token_time) / (tokens - 1))
        return found


def run_closed_loop(llm: LLM, prompts: Sequence[Prompt], params: Sequence[SamplingParams], concurrency: int) -> LoopRun:
    """Answers all `prompts` with `concurrency` of them under way, until no more are left to send.

    The engine has to be empty. It is left empty, also by an exception or a Ctrl-C.
    """
    asks = iter(list(zip(prompts, params, strict=True)))
    ids: list[str] = []
    results: dict[str, RequestOutput] = {}

    def send() -> None:
        for prompt, one in asks:
            ids.append(llm.add(prompt, one, final_only=True))
            return

    core = llm.core
    waits, steps = Counter(core.device.waits.inside_step), core.step_count
    try:
        with deferred_interrupt() as interrupt, core.device.scope():
            begin = time.perf_counter()
            for _ in range(concurrency):
                send()
            while len(results) < len(prompts):
                for output in llm.step():
                    results[output.request_id] = output
                    send()
                interrupt.raise_if_received()
            seconds = time.perf_counter() - begin
    finally:
        llm.abort([request_id for request_id in ids if request_id not in results])
    while core.in_flight or core.scheduler.has_requests():
        llm.step()
    inside = Counter(core.device.waits.inside_step) - waits
    return LoopRun(seconds, core.step_count - steps, tuple(results[request_id] for request_id in ids), inside)


def count_rounds(names: Sequence[str], outputs: Sequence[RequestOutput]) -> dict[str, tuple[int, int]]:
    """By name: accepted drafts, and passes of the model that decoded.

    A pass without drafts counts, as V2's host counts it too: of a request's tokens after its first, each that no round
    with drafts made has a pass of its own.
    """
    accepted: Counter[str] = Counter()
    passes: Counter[str] = Counter()
    for name, output in zip(names, outputs, strict=True):
        metrics = output.metrics
        made = metrics.num_drafts + metrics.num_accepted_tokens
        accepted[name] += metrics.num_accepted_tokens
        passes[name] += metrics.num_drafts + max(0, len(output.outputs[0].token_ids) - 1 - made)
    return {name: (accepted[name], passes[name]) for name in dict.fromkeys(names)}


def accepted_length(rounds: Sequence[tuple[int, int]]) -> float | None:
    """Tokens of a pass, the bonus or corrected one counted; None without a pass."""
    passes = sum(count for _, count in rounds)
    return 1 + sum(accepted for accepted, _ in rounds) / passes if passes else None


def tpot(runs: Sequence[LoopRun]) -> tuple[float, float] | None:
    """Mean and median over a run's requests, in seconds, each of the middle run; None if no request had two tokens."""
    found = [times for times in (run.tpot for run in runs) if times]
    if not found:
        return None
    return statistics.median(map(statistics.fmean, found)), statistics.median(map(statistics.median, found))
