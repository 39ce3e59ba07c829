"""Records made by hand for the tests of the views: a small model of the engine's bookkeeping, without an engine.

`make_record()` gives the last step of a run in which prompts are chunked, a request finishes (V1 condenses, V2 frees a
row), blocks are shared through the prefix cache, and one request's text holds markup.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from engine import hooks as ev
from engine.snapshot import (
    BlockTablesView,
    BlockView,
    InFlightView,
    InputsView,
    PoolView,
    RequestView,
    RowView,
    Snapshot,
)
from workbench.recording import COLORS, Recording, RunnerStep, StepRecord

EVIL = "<img src=x onerror=alert(1)>"
MS = 1_000_000
PIECES = (
    "Why",
    " is",
    " V2",
    " fast",
    "?",
    " Because",
    " the",
    " GPU",
    " reads",
    "\n",
    " own",
    EVIL,
    "  ",
    " ü",
    "é",
    ".",
)
V1_MADE_BY = {
    "input_ids": "host loop, then one copy",
    "positions": "numpy, then copy",
    "query_start_loc": "numpy, then copy",
    "seq_lens": "host, then copy",
    "slot_mapping": "kernel 7",
}
V2_MADE_BY = {
    "input_ids": "kernels 2 and 4",
    "positions": "kernel 3",
    "query_start_loc": "numpy, fresh pinned copy",
    "seq_lens": "kernel 3",
    "slot_mapping": "kernel 7",
}


def request_name(index: int) -> str:
    """A, B, … Z, A2, B2, …"""
    return chr(ord("A") + index % 26) + ("" if index < 26 else str(index // 26 + 1))


@dataclass
class _Request:
    name: str
    prompt: tuple[int, ...]
    max_tokens: int
    arrives: int = 1
    out: list[int] = field(default_factory=list)
    computed: int = 0
    cached: int = 0
    blocks: list[int] = field(default_factory=list)
    row: int | None = None
    scheduled_once: bool = False
    reason: str | None = None

    @property
    def tokens(self) -> list[int]:
        return [*self.prompt, *self.out]


class _Engine:
    """One runner's bookkeeping: rows, blocks, inputs, events with plausible times."""

    def __init__(
        self, runner: Any, requests: Sequence[_Request], blocks: int, block_size: int, budget: int, rows: int, loop: Any
    ) -> None:
        self.runner, self.requests, self.block_size, self.budget, self.loop = (
            runner,
            list(requests),
            block_size,
            budget,
            loop,
        )
        self.owners: list[list[str]] = [[] for _ in range(blocks)]
        self.hashes: list[str | None] = [None] * blocks
        self.free = list(range(1, blocks))
        self.rows: list[_Request | None] = [None] * rows
        self.step_number = 0
        self.idx: list[int] = []
        self.gathered: tuple[tuple[int, ...], ...] = ()
        self.inputs: InputsView | None = None
        self.events: list[ev.Event] = []
        self.now = 1000 * MS if runner == "v1" else 9000 * MS
        self.hits = 0

    @property
    def arrived(self) -> list[_Request]:
        return [r for r in self.requests if r.arrives <= max(1, self.step_number)]

    def emit(self, kind: type[ev.Event], *values: object) -> None:
        self.events.append(kind(self.step_number, self.runner, self.now, *values))

    def span(self, name: str, lane: Any, begin: float, end: float) -> None:
        b, e = self.now + int(begin * MS), self.now + int(end * MS)
        self.events.append(ev.SpanEnded(self.step_number, self.runner, e, name, lane, b, e))

    def step(self) -> tuple[tuple[ev.Event, ...], int, int]:
        self.events = []
        self.step_number += 1
        begin = self.now
        self._drop_finished()
        plan = self._schedule()
        self._place(plan)
        self._inputs(plan)
        self._times(len(plan))
        self._sample(plan)
        return tuple(self.events), begin, self.now

    def _drop_finished(self) -> None:
        for request in [r for r in self.rows if r is not None and r.reason]:
            self.emit(ev.RowFreed, request.name, request.row)
            self.rows[request.row or 0] = None
            request.row = None
        if self.runner == "v1":
            self._condense()

    def _condense(self) -> None:
        while None in self.rows:
            hole = self.rows.index(None)
            last = max((i for i, r in enumerate(self.rows) if r is not None), default=-1)
            if last <= hole:
                return
            moved = self.rows[last]
            assert moved is not None
            self.rows[hole], self.rows[last], moved.row = moved, None, hole
            self.emit(ev.RowMoved, moved.name, last, hole, "condense")

    def _schedule(self) -> list[tuple[_Request, int]]:
        plan, budget = [], self.budget
        live = [r for r in self.arrived if not r.reason]
        for request in sorted(live, key=lambda r: not r.scheduled_once):
            if budget == 0 or (not request.scheduled_once and None not in self.rows):
                continue
            kind = "running" if request.scheduled_once else "new"
            if kind == "new":
                self._reuse_prefix(request)
            count = min(budget, len(request.tokens) - request.computed)
            need = -(-(request.computed + count) // self.block_size) - len(request.blocks)
            if need > len(self.free):
                continue
            for _ in range(need):
                block = self.free.pop(0)
                self.hashes[block] = None
                self.owners[block].append(request.name)
                request.blocks.append(block)
            self.emit(ev.RequestScheduled, request.name, count, request.computed, kind, request.cached)
            plan.append((request, count))
            budget -= count
        return plan

    def _reuse_prefix(self, request: _Request) -> None:
        for other in self.requests:
            shared = 0
            while (
                other is not request
                and other.blocks
                and (shared + 1) * self.block_size < len(request.prompt)
                and (shared + 1) * self.block_size <= min(other.computed, len(other.prompt))
                and other.prompt[: (shared + 1) * self.block_size] == request.prompt[: (shared + 1) * self.block_size]
            ):
                shared += 1
            if shared and not other.reason:
                for block in other.blocks[:shared]:
                    self.owners[block].append(request.name)
                    request.blocks.append(block)
                request.computed = request.cached = shared * self.block_size
                self.hits += request.cached
                return

    def _place(self, plan: list[tuple[_Request, int]]) -> None:
        for request, _ in plan:
            if request.row is None:
                request.row = self.rows.index(None)
                self.rows[request.row] = request
                self.emit(ev.RowWritten, request.name, request.row)
            request.scheduled_once = True

    def _inputs(self, plan: list[tuple[_Request, int]]) -> None:
        if self.runner == "v1":
            plan.sort(key=lambda item: item[0].row or 0)
        else:
            plan.sort(key=lambda item: item[1])
        self.idx = list(range(len(plan))) if self.runner == "v1" else [r.row or 0 for r, _ in plan]
        self.gathered = tuple(tuple(r.blocks) for r, _ in plan)
        if self.runner == "v2":
            self.emit(ev.BlockTableGathered, tuple(self.idx))
        ids, positions, starts, lens, slots = [], [], [0], [], []
        for request, count in plan:
            for position in range(request.computed, request.computed + count):
                ids.append(request.tokens[position])
                positions.append(position)
                slots.append(request.blocks[position // self.block_size] * self.block_size + position % self.block_size)
            starts.append(len(ids))
            lens.append(request.computed + count)
        made_by = V1_MADE_BY if self.runner == "v1" else V2_MADE_BY
        padded = len(ids) if any(n > 1 for _, n in plan) else -(-len(ids) // 4) * 4
        gap = padded - len(ids)
        self.inputs = InputsView(
            tuple(r.name for r, _ in plan),
            tuple(n for _, n in plan),
            len(ids),
            padded,
            (*ids, *[0] * gap),
            (*positions, *[0] * gap),
            tuple(starts),
            tuple(lens),
            (*slots, *[-1] * gap),
            tuple(s - 1 for s in starts[1:]),
            made_by,
        )
        self.emit(ev.InputsPrepared, len(plan), len(ids), padded, made_by)

    def _times(self, count: int) -> None:
        forward = 3.0 + 0.15 * count
        if self.runner == "v1":
            self.span("schedule", "host", 0, 0.5)
            self.span("update states", "host", 0.5, 1.2)
            self.span("prepare inputs", "host", 1.2, 2.4)
            self.span("forward", "compute", 2.0, 2.0 + forward)
            self.span("sample", "compute", 2.0 + forward, 2.3 + forward)
            self.span("sampled ids", "copy", 2.3 + forward, 2.4 + forward)
            self.emit(
                ev.HostWait, "sampled token ids", self.now + int(2.4 * MS), self.now + int((2.4 + forward) * MS), True
            )
            self.span("output", "host", 2.4 + forward, 3.3 + forward)
            self.now += int((3.4 + forward) * MS)
        else:
            self.span("schedule", "host", 0, 0.4)
            self.span("update states", "host", 0.4, 0.8)
            self.span("prepare inputs", "compute", 0.6, 0.9)
            self.span("forward", "compute", 0.9, 0.9 + forward)
            self.span("sample", "compute", 0.9 + forward, 1.1 + forward)
            self.span("output", "copy", 1.1 + forward, 1.5 + forward)
            self.emit(
                ev.HostWait, "output of the step before", self.now + int(0.9 * MS), self.now + int(forward * MS), False
            )
            self.now += int((0.9 + forward) * MS)

    def _sample(self, plan: list[tuple[_Request, int]]) -> None:
        for request, count in plan:
            request.computed += count
            for index in range(request.computed // self.block_size):
                if self.hashes[request.blocks[index]] is None:
                    self.hashes[request.blocks[index]] = f"{hash((request.prompt, index)) & 0xFFFFFFFF:08x}"
            if request.computed < len(request.tokens):
                continue
            token = (sum(request.tokens) * 7 + len(request.tokens)) % len(PIECES)
            self.emit(ev.Sampled, request.name, token, len(request.tokens), self.step_number)
            request.out.append(token)
            if len(request.out) == request.max_tokens:
                request.reason = "length"
                for block in reversed(request.blocks):
                    self.owners[block].remove(request.name)
                    if not self.owners[block]:
                        self.free.append(block)
                request.blocks = []
                self.emit(ev.RequestFinished, request.name, "length")
            self.emit(ev.OutputDelivered, request.name, (token,), PIECES[token], request.reason)

    def snapshot(self) -> Snapshot:
        views = tuple(self._request_view(r) for r in self.arrived)
        blocks = tuple(BlockView(i, len(o), tuple(o), self.hashes[i]) for i, o in enumerate(self.owners))
        persistent = tuple(tuple(r.blocks) if r else () for r in self.rows)
        rows = tuple(RowView(i, r.name if r else None, self._cells(r)) for i, r in enumerate(self.rows))
        running = tuple(r.name for r in self.requests if r.scheduled_once and not r.reason)
        return Snapshot(
            self.step_number,
            self.runner,
            self.loop,
            self.now,
            views,
            tuple(r.name for r in self.arrived if not r.scheduled_once),
            running,
            rows,
            BlockTablesView(persistent, tuple(self.idx), self.gathered),
            self.inputs,
            PoolView(
                self.block_size,
                blocks,
                tuple(self.free),
                sum(len(r.prompt) for r in self.requests if r.scheduled_once),
                self.hits,
            ),
            (InFlightView(self.step_number, running),) if self.loop == "overlapped" and self.step_number else (),
        )

    def _request_view(self, r: _Request) -> RequestView:
        status: Any = "finished" if r.reason else "running" if r.scheduled_once else "waiting"
        return RequestView(
            r.name, status, r.prompt, tuple(r.out), r.computed, r.cached, 0, 0, 0, tuple(r.blocks), r.reason
        )

    def _cells(self, r: _Request | None) -> dict[str, int | float | None]:
        if r is None:
            return {}
        last = r.out[-1] if r.out else None
        sampling: dict[str, int | float | None] = {"temperature": 0.0, "top_p": 1.0, "top_k": 0}
        if self.runner == "v1":
            return {
                "num_tokens": len(r.tokens),
                "num_prompt_tokens": len(r.prompt),
                "num_computed_tokens": r.computed,
                "last_token": last,
                **sampling,
            }
        return {
            "total_len": len(r.tokens),
            "prompt_len": len(r.prompt),
            "prefill_len": len(r.prompt),
            "num_computed_tokens": r.computed,
            "num_computed_tokens_np": r.computed,
            "last_sampled_token": last,
            **sampling,
            "seed": 0,
        }


def make_recording(
    runners: Sequence[Any] = ("v1", "v2"),
    requests: int = 4,
    blocks: int = 64,
    steps: int = 6,
    block_size: int = 4,
    budget: int | None = None,
    rows: int | None = None,
    loop: Any = "plain",
    prompt_len: int = 6,
    max_tokens: int = 6,
) -> Recording:
    """A run of `steps` steps.

    Requests 0 and 2 share their prompt's beginning, 2 comes in step 3; 1 finishes in step 2; a pause before step 4.
    """
    recording = Recording(
        {
            "model": "made by hand",
            "device": "cpu",
            "kernel_backend": "torch",
            "commit": "0" * 12,
            "date": "2026-01-01",
            "config": {},
        },
        token_text=dict(enumerate(PIECES)),
    )
    engines: dict[Any, _Engine] = {}
    for runner in runners:
        made = []
        for i in range(requests):
            start = 0 if i in (0, 2) else i
            prompt = tuple((start * 3 + k) % len(PIECES) for k in range(prompt_len + i % 3))
            made.append(_Request(request_name(i), prompt, 2 if i == 1 else max_tokens + i, arrives=3 if i == 2 else 1))
        engines[runner] = _Engine(runner, made, blocks, block_size, budget or 4 * requests, rows or requests + 2, loop)
        for i, request in enumerate(made):
            recording.prompts[request.name] = "".join(PIECES[t] for t in request.prompt)
            recording.colors[request.name] = COLORS[i % len(COLORS)]
    before = {name: engine.snapshot() for name, engine in engines.items()}
    ends: dict[str, int] = {}
    for number in range(1, steps + 1):
        done = {}
        for name, engine in engines.items():
            if number == 4:
                engine.now += 40 * MS  # the session paused here
            events, begin, end = engine.step()
            after = engine.snapshot()
            pauses = ((ends[name], begin),) if number == 4 else ()
            done[name] = RunnerStep(name, number, after, before[name], events, "output", begin, end, pauses)
            before[name], ends[name] = after, end
        recording.append(done)
    return recording


def make_record(
    runners: Sequence[Any] = ("v1", "v2"), requests: int = 4, blocks: int = 64, steps: int = 6, **kwargs: Any
) -> StepRecord:
    """The last step of `make_recording(...)`; with `steps=0` the state before the first step."""
    if steps == 0:
        recording = make_recording(runners, requests, blocks, 1, **kwargs)
        return recording.start({name: done.before for name, done in recording.steps[0].runners.items()})
    return make_recording(runners, requests, blocks, steps, **kwargs).steps[-1]


def with_events(record: StepRecord, runner: str, *events: ev.Event) -> StepRecord:
    """`record` with `events` added to what `runner` did in it."""
    done = record.runners[runner]
    return replace(record, runners={**record.runners, runner: replace(done, events=(*done.events, *events))})
