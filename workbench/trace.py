"""A recording as Chrome's trace events, which chrome://tracing and Perfetto open."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engine.hooks import HostWait, SpanEnded

if TYPE_CHECKING:
    from .recording import Recording

LANES = {"host": 1, "compute": 2, "copy": 3}


def chrome_trace(recording: Recording) -> dict[str, Any]:
    """One process a runner, one thread a lane; times in microseconds since the first span of the recording.

    Only what was measured is in it: the spans of the three lanes, and the host's waits in the host's lane.
    """
    steps = [done for record in recording.steps for done in record.runners.values()]
    found = [(done.runner, event) for done in steps for event in done.of(SpanEnded, HostWait)]
    zero = min((event.begin_ns for _, event in found), default=0)
    processes = {name: number for number, name in enumerate(recording.runners, start=1)}
    trace = [row for name, pid in processes.items() for row in _names(name, pid)]
    trace += [_complete(event, processes[runner], zero) for runner, event in found]
    other = {key: str(value) for key, value in recording.meta.items()}
    return {"traceEvents": trace, "displayTimeUnit": "ms", "otherData": other}


def _names(runner: str, pid: int) -> list[dict[str, Any]]:
    rows = [{"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": f"runner {runner.upper()}"}}]
    for lane, tid in LANES.items():
        rows.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": lane}})
        rows.append({"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid}})
    return rows


def _complete(event: SpanEnded | HostWait, pid: int, zero: int) -> dict[str, Any]:
    times = {"ts": (event.begin_ns - zero) / 1000, "dur": (event.end_ns - event.begin_ns) / 1000}
    if isinstance(event, HostWait):
        args = {"step": event.step, "reason": event.reason, "inside_step": event.inside_step}
        return {"ph": "X", "name": f"wait: {event.reason}", "cat": "wait", "pid": pid, "tid": 1, "args": args, **times}
    args = {"step": event.step}
    return {
        "ph": "X",
        "name": event.name,
        "cat": event.lane,
        "pid": pid,
        "tid": LANES[event.lane],
        "args": args,
        **times,
    }
