"""Steps of an engine as records for the terminal, read from its events and snapshots alone."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine import hooks
from engine.snapshot import PendingSnapshot, Snapshot

if TYPE_CHECKING:
    from engine.core import EngineCore


@dataclass(frozen=True)
class RequestLine:
    """One request in one step. `block_ids` are those that the step's input read; `sampled` is None until it arrived."""

    request_id: str
    row: int
    kind: str
    num_tokens: int
    num_computed_tokens: int
    block_ids: tuple[int, ...]
    partial_prefill: bool
    sampled: int | None
    arrived_in: int | None


@dataclass(frozen=True)
class StepTrace:
    """Times in ms: `spans[lane][name]`, and each wait as (reason, inside the step, ms)."""

    step: int
    milliseconds: float
    spans: dict[str, dict[str, float]]
    waits: tuple[tuple[str, bool, float], ...]
    requests: tuple[RequestLine, ...]


@dataclass
class _Seen:
    """What the events of one step said."""

    spans: dict[str, dict[str, float]] = field(default_factory=lambda: {"host": {}, "compute": {}, "copy": {}})
    waits: list[tuple[str, bool, float]] = field(default_factory=list)
    scheduled: dict[str, hooks.RequestScheduled] = field(default_factory=dict)
    begin_ns: int | None = None
    end_ns: int = 0


class _Collector:
    def __init__(self) -> None:
        self.steps: dict[int, _Seen] = defaultdict(_Seen)
        self.sampled: dict[tuple[int, str], hooks.Sampled] = {}

    def __call__(self, event: hooks.Event) -> None:
        seen = self.steps[event.step]
        if isinstance(event, hooks.SpanEnded):
            lane = seen.spans[event.lane]
            lane[event.name] = lane.get(event.name, 0.0) + (event.end_ns - event.begin_ns) / 1e6
            if event.lane == "host":
                seen.begin_ns = event.begin_ns if seen.begin_ns is None else min(seen.begin_ns, event.begin_ns)
                seen.end_ns = max(seen.end_ns, event.end_ns)
        elif isinstance(event, hooks.HostWait):
            seen.waits.append((event.reason, event.inside_step, (event.end_ns - event.begin_ns) / 1e6))
        elif isinstance(event, hooks.RequestScheduled):
            seen.scheduled[event.request_id] = event
        elif isinstance(event, hooks.Sampled):
            self.sampled[event.sampled_in_step, event.request_id] = event


def record_steps(core: EngineCore, steps: int) -> list[StepTrace]:
    """Runs up to `steps` steps of `core`; fewer if all requests end before.

    Snapshots are read after the last step, so taking them delays none. Further steps run, unseen, until the tokens of
    the shown ones have arrived.
    """
    collector = _Collector()
    pending: dict[int, PendingSnapshot] = {}
    with core.hooks.subscribe(hooks.Event, collector):
        while len(pending) < steps and core.has_unfinished():
            core.step()
            pending[core.step_count] = core.snapshot()
        while core.in_flight and core.in_flight[0].scheduler_output.step in pending:
            core.step()
        core.drain()
    return [_trace(step, collector, snapshot.result()) for step, snapshot in pending.items()]


def _trace(step: int, collector: _Collector, snapshot: Snapshot) -> StepTrace:
    seen = collector.steps[step]
    elapsed = (seen.end_ns - seen.begin_ns) / 1e6 if seen.begin_ns is not None else 0.0
    return StepTrace(step, elapsed, seen.spans, tuple(seen.waits), _requests(step, collector, snapshot))


def _requests(step: int, collector: _Collector, snapshot: Snapshot) -> tuple[RequestLine, ...]:
    scheduled, inputs, tables = collector.steps[step].scheduled, snapshot.inputs, snapshot.block_tables
    if not scheduled or inputs is None:
        return ()
    prompt_lengths = {view.request_id: len(view.prompt_token_ids) for view in snapshot.requests}
    lines = []
    for i, request_id in enumerate(inputs.req_ids):
        event = scheduled[request_id]
        sampled = collector.sampled.get((step, request_id))
        end = event.num_computed_tokens + event.num_tokens
        partial = sampled is None and end < prompt_lengths.get(request_id, 0)
        lines.append(
            RequestLine(
                request_id, tables.idx_mapping[i], event.kind, event.num_tokens, event.num_computed_tokens,
                tables.gathered[i], partial, sampled.token_id if sampled else None, sampled.step if sampled else None,
            )
        )  # fmt: skip
    return tuple(lines)
