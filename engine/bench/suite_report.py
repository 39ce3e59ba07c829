"""What the suite's measurements come to: one flat set of figures for each side, the same for the table and for JSON."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import Any

from .measure import Timing
from .suite import Inside, Observed, Side, SuiteReport, WorkloadResult


def to_dict(report: SuiteReport) -> dict[str, Any]:
    """A JSON-ready form. Bytes and bytes/s, seconds for starts and runs, µs for what one step costs."""
    return {
        "about": report.about,
        "ceilings": {**asdict(report.ceilings), "limit": report.ceilings.limit},
        "start_up": {name: {**asdict(start), "total": start.total} for name, start in report.starts.items()},
        "peer_start_up": report.peer_starts,
        "repeats": report.repeats,
        "workloads": [
            {
                "name": result.spec.name,
                "what": str(result.spec),
                "tokens_in": sum(n_in for n_in, _ in result.spec.lengths),
                "tokens_out": result.spec.output_tokens,
                "steps": result.spec.steps,
                "weight_bytes_per_step": result.weight_bytes,
                "kv_bytes_per_step": result.kv_bytes,
                "limit_ms_per_step": result.bytes_per_step / report.ceilings.limit * 1e3,
                "sides": [figures(side, result, report.ceilings.limit) for side in result.sides],
            }
            for result in report.workloads
        ],
    }


def figures(side: Side, result: WorkloadResult, limit: float) -> dict[str, Any]:
    """Of one side: the rate with its spread, ms a step, what of `limit` (bytes/s) it reached, and, of our own engine,
    what a step cost."""
    timing = side.timing
    bandwidth = result.bytes_per_step * timing.steps / timing.median
    ms = [seconds / timing.steps * 1e3 for seconds in timing.seconds]
    return {
        "side": side.name,
        "tokens_per_second": _rate(timing),
        "ms_per_step": {"median": timing.ms_per_step, "min": min(ms), "max": max(ms)},
        "bandwidth": bandwidth,
        "share_of_limit": bandwidth / limit,
        "seconds": list(timing.seconds),
        "warm_up": timing.warm_up,
        **(_inside(side.inside) if side.inside else {}),
    }


def _rate(timing: Timing) -> dict[str, float]:
    low, high = timing.spread
    return {"median": timing.tokens_per_second, "min": low, "max": high}


def _inside(inside: Inside) -> dict[str, Any]:
    runs, costs, profile = inside.runs, inside.costs, inside.profile
    steps = sum(run.steps for run in runs)
    waits: list[Counter[str]] = [Counter(), Counter()]
    for run in runs:
        for total, counts in zip(waits, run.waits, strict=True):
            total.update(counts)
    found: dict[str, Any] = {
        "host_us_per_step": costs.host.host_us,
        "host_mean_us_per_step": costs.host.mean,
        "host_parts_us_per_step": costs.host.wall,
        "host_waits_us_per_step": costs.host.waits,
        "host_processor_us_per_step": costs.host.processor,
        "observed_host_us_per_step": costs.observed_host_us,
        "main_thread_cpu_us_per_step": sum(run.cpu_seconds for run in runs) / steps * 1e6,
        "device_span_us_per_step": costs.device_us,
        "hooks_launches_per_step": costs.launches,
        "waits_per_step": {
            where: {reason: count / steps for reason, count in counts.items()}
            for where, counts in zip(("inside", "outside"), waits, strict=True)
        },
        "cached_tokens": sum(run.cached_tokens for run in runs),
        "preemptions": sum(run.preemptions for run in runs),
    }
    if profile is not None:
        found["profiled"] = {
            "steps": profile.steps,
            "launches_per_step": profile.launches,
            "kernels_per_step": profile.kernels,
            "busy_us_per_step": profile.busy_us,
            "trace": str(inside.saved) if inside.saved else None,
        }
    if inside.observed:
        found["observed"] = {level: _observed(observed) for level, observed in inside.observed.items()}
    return found


def _observed(observed: Observed) -> dict[str, Any]:
    """Of the rate: the loss in the middle pair, and in the best and worst one."""
    losses = observed.paired.losses
    return {
        "pairs": len(losses),
        "loss": observed.paired.loss,
        "loss_min": min(losses),
        "loss_max": max(losses),
        "events_read": sum(run.num_read for _, run in observed.runs),
        "read_us_per_step": observed.read_us_per_step,
    }
