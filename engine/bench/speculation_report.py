"""What the measurements of speculation come to: one flat set of figures for each side, for the table and for JSON."""

from __future__ import annotations

import statistics
from collections import Counter
from typing import Any

from .closed_loop import accepted_length, tpot
from .speculation import ConcurrencyResult, Side, SpeculationReport
from .speculation_plan import NONE


def to_dict(report: SpeculationReport) -> dict[str, Any]:
    """A JSON-ready form. Times in seconds, TPOT in ms."""
    return {
        "about": report.about,
        "methods": {method.label: method.config for method in report.methods},
        "starts": [
            {"runner": runner, "method": label, "engine": seconds, "capture": capture}
            for (runner, label), (seconds, capture) in report.starts.items()
        ],
        "left_out": list(report.left_out),
        "repeats": report.repeats,
        "concurrencies": [
            {
                "concurrency": result.concurrency,
                "requests": result.requests,
                "sides": [figures(side, result) for side in result.sides],
                "tpot_v2_over_v1": tpot_of_v2_over_v1(result),
            }
            for result in report.results
        ],
        "accepted_length": accepted_by_set(report),
    }


def figures(side: Side, result: ConcurrencyResult) -> dict[str, Any]:
    """Of one side; `ratio` is of its tokens/s over those of no speculation on the same runner."""
    rates = [run.tokens_per_second for run in side.runs]
    base = next(s for s in result.sides if (s.runner, s.method) == (side.runner, NONE))
    rate = statistics.median(rates)
    times = tpot(side.runs)
    outputs = [output for run in side.runs for output in run.outputs]
    waits = sum((run.waits_inside for run in side.runs), Counter())
    return {
        "runner": side.runner,
        "method": side.method.label,
        "accepted_length": accepted_length(list(side.rounds.values())),
        "accepted_length_by_set": {name: accepted_length([rounds]) for name, rounds in side.rounds.items()},
        "tpot_ms": None if times is None else {"mean": times[0] * 1e3, "median": times[1] * 1e3},
        "tokens_per_second": {"median": rate, "min": min(rates), "max": max(rates)},
        "ratio": rate / statistics.median(run.tokens_per_second for run in base.runs),
        "waits_inside_steps": dict(waits),
        "steps": sum(run.steps for run in side.runs),
        "output_tokens": sum(len(output.outputs[0].token_ids) for output in outputs),
        "same_tokens": side.same_tokens
        and {"before_first_difference": side.same_tokens[0], "all": side.same_tokens[1]},
        "cached_tokens": sum(output.num_cached_tokens for output in outputs),
        "preemptions": sum(output.metrics.num_preemptions for output in outputs),
        "seconds": [run.seconds for run in side.runs],
        "warm_up": side.warm_up,
    }


def tpot_of_v2_over_v1(result: ConcurrencyResult) -> dict[str, float]:
    """Mean TPOT of V2 over V1's, by label, of the methods that both ran."""
    found: dict[str, dict[str, float]] = {}
    for side in result.sides:
        if (times := tpot(side.runs)) is not None:
            found.setdefault(side.method.label, {})[side.runner] = times[0]
    return {label: each["v2"] / each["v1"] for label, each in found.items() if {"v1", "v2"} <= each.keys()}


def waits_inside_v2(report: SpeculationReport) -> tuple[int, int]:
    """Host waits inside all of V2's timed steps, which must be 0, and the steps."""
    runs = [run for result in report.results for side in result.sides if side.runner == "v2" for run in side.runs]
    return sum(run.waits_inside.total() for run in runs), sum(run.steps for run in runs)


def accepted_by_set(report: SpeculationReport) -> list[dict[str, Any]]:
    """Accepted length by set of prompts, of each runner and method, over all its timed runs."""
    pooled: dict[tuple[str, str], dict[str, list[tuple[int, int]]]] = {}
    for result in report.results:
        for side in result.sides:
            sets = pooled.setdefault((side.runner, side.method.label), {})
            for name, rounds in side.rounds.items():
                sets.setdefault(name, []).append(rounds)
    return [
        {"runner": runner, "method": label, "sets": {name: accepted_length(rounds) for name, rounds in sets.items()}}
        for (runner, label), sets in pooled.items()
    ]
