"""What a snapshot shows of a toy engine."""

from __future__ import annotations

from typing import Any

from engine.snapshot import BlockTablesView, BlockView, InFlightView, PoolView, RequestView, RowView, Snapshot
from tests.workbench.toy_engine import ToyEngine, ToyRequest


def snapshot(engine: ToyEngine) -> Snapshot:
    """As it is between two steps."""
    views = tuple(_request_view(r) for r in engine.arrived)
    blocks = tuple(BlockView(i, len(o), tuple(o), engine.hashes[i]) for i, o in enumerate(engine.owners))
    persistent = tuple(tuple(r.blocks) if r else () for r in engine.rows)
    rows = tuple(RowView(i, r.name if r else None, _cells(r, engine.runner)) for i, r in enumerate(engine.rows))
    running = tuple(r.name for r in engine.requests if r.scheduled_once and not r.reason)
    return Snapshot(
        engine.step_number,
        engine.runner,
        engine.loop,
        engine.now,
        views,
        tuple(r.name for r in engine.arrived if not r.scheduled_once),
        running,
        rows,
        BlockTablesView(persistent, tuple(engine.idx), engine.gathered),
        engine.inputs,
        PoolView(
            engine.block_size,
            blocks,
            tuple(engine.free),
            sum(len(r.prompt) for r in engine.requests if r.scheduled_once),
            engine.hits,
        ),
        (InFlightView(engine.step_number, running),) if engine.loop == "overlapped" and engine.step_number else (),
    )


def _request_view(r: ToyRequest) -> RequestView:
    status: Any = "finished" if r.reason else "running" if r.scheduled_once else "waiting"
    return RequestView(r.name, status, r.prompt, tuple(r.out), r.computed, r.cached, 0, 0, 0, tuple(r.blocks), r.reason)


def _cells(r: ToyRequest | None, runner: str) -> dict[str, int | float | None]:
    if r is None:
        return {}
    last = r.out[-1] if r.out else None
    sampling: dict[str, int | float | None] = {"temperature": 0.0, "top_p": 1.0, "top_k": 0}
    if runner == "v1":
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
