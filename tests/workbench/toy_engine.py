"""A small model of the engine's bookkeeping, without an engine: rows, blocks, inputs, and events at plausible times.

Prompts are chunked, finished requests leave their rows (V1 condenses, V2 frees a row), and blocks are shared through a
prefix cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from engine import hooks as ev
from engine.snapshot import InputsView
from tests.workbench.vocabulary import PIECES

MS = 1_000_000
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


@dataclass
class ToyRequest:
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


class ToyEngine:
    """One runner's bookkeeping: rows, blocks, inputs, events with plausible times."""

    def __init__(
        self,
        runner: Any,
        requests: Sequence[ToyRequest],
        blocks: int,
        block_size: int,
        budget: int,
        rows: int,
        loop: Any,
    ) -> None:
        self.runner, self.requests, self.loop = runner, list(requests), loop
        self.block_size, self.budget = block_size, budget
        self.owners: list[list[str]] = [[] for _ in range(blocks)]
        self.hashes: list[str | None] = [None] * blocks
        self.free = list(range(1, blocks))
        self.rows: list[ToyRequest | None] = [None] * rows
        self.step_number = 0
        self.idx: list[int] = []
        self.gathered: tuple[tuple[int, ...], ...] = ()
        self.inputs: InputsView | None = None
        self.events: list[ev.Event] = []
        self.now = 1000 * MS if runner == "v1" else 9000 * MS
        self.hits = 0

    @property
    def arrived(self) -> list[ToyRequest]:
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

    def _schedule(self) -> list[tuple[ToyRequest, int]]:
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

    def _reuse_prefix(self, request: ToyRequest) -> None:
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

    def _place(self, plan: list[tuple[ToyRequest, int]]) -> None:
        for request, _ in plan:
            if request.row is None:
                request.row = self.rows.index(None)
                self.rows[request.row] = request
                self.emit(ev.RowWritten, request.name, request.row)
            request.scheduled_once = True

    def _inputs(self, plan: list[tuple[ToyRequest, int]]) -> None:
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

    def _sample(self, plan: list[tuple[ToyRequest, int]]) -> None:
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
