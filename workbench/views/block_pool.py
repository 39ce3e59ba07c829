"""The model of the block pool: who holds each block, what the prefix cache keeps, what the step changed."""

from __future__ import annotations

from typing import Any

from engine.snapshot import BlockView

from ..recording import RunnerStep

NEXT_FREE = 5
"""How many blocks of the free list are named."""
FEW_BLOCKS = 128
"""Up to here each block shows its number."""


def pool_model(done: RunnerStep, every_title: bool = True) -> dict[str, Any]:
    """The pool's cells by block id, the head of its free list, and its sums, after the step.

    Without `every_title`, a cell of a large pool that the live view draws as a part of a group comes without its own.
    """
    pool, past = done.snapshot.pool, done.before.pool
    before = {block.block_id: block for block in past.blocks}
    place = {block_id: i for i, block_id in enumerate(pool.free)}
    small = len(pool.blocks) > FEW_BLOCKS
    brief = small and not every_title
    cells = [_cell(block, before.get(block.block_id), place.get(block.block_id), brief) for block in pool.blocks]
    used = [block for block in pool.blocks if block.ref_cnt > 0]
    cached = {block.block_id for block in pool.blocks if block.block_id and block.block_hash and not block.ref_cnt}
    shared = sum(block.ref_cnt > 1 for block in used)
    in_use = sum(block.block_id != 0 for block in used)
    return {
        "cells": cells,
        "columns": 20 if small else 10,
        "size": 10 if small else 20,
        "free_next": [[block_id, block_id in cached] for block_id in pool.free[:NEXT_FREE]],
        "num_free": len(pool.free),
        "title": f"pool: {len(cells)} blocks of {pool.block_size} tokens",
        "summary": f"{in_use} used, {shared} shared; {len(pool.free)} free, {len(cached)} cached",
        "cache": _cache_line(pool.prefix_hits, pool.prefix_queries, pool.prefix_hits - past.prefix_hits),
    }


def _cell(block: BlockView, old: BlockView | None, place: int | None, brief: bool) -> dict[str, Any]:
    """`state` is null, used, shared, cached (free, but still found by its hash) or free.

    `change` is there if something happened to it in the step: new, hit, evicted or freed. `brief` leaves out the title
    where nothing happened and nothing is shared.
    """
    if block.block_id == 0:
        return {
            "id": 0,
            "state": "null",
            "title": "block 0: the null block, never given out; unused entries point here",
        }
    state = "shared" if block.ref_cnt > 1 else "used" if block.ref_cnt else "cached" if block.block_hash else "free"
    if brief and state != "shared" and (block is old or not _change(block, old)[0]):
        cell: dict[str, Any] = {"id": block.block_id, "state": state}
        return cell | {"owners": list(block.owners)} if block.owners else cell
    held = f"{' and '.join(block.owners)}, ref_cnt {block.ref_cnt}" if block.ref_cnt else "free"
    parts = [f"block {block.block_id}: {held}"]
    if block.block_hash:
        parts.append(f"in the prefix cache (hash {block.block_hash})")
    if place is not None:
        parts.append(f"number {place + 1} of the free list")
    change, said = _change(block, old)
    if change:
        parts.append(said)
    cell = {"id": block.block_id, "state": state, "title": "; ".join(parts)}
    return cell | ({"owners": list(block.owners)} if block.owners else {}) | ({"change": change} if change else {})


def _change(block: BlockView, old: BlockView | None) -> tuple[str, str]:
    """What happened to the block in this step, as a word and as a sentence; empty where nothing did."""
    owners = set(block.owners)
    gained = owners - set(old.owners if old else ())
    if old is not None and old.ref_cnt and not block.ref_cnt:
        return "freed", "freed in this step"
    if not gained:
        return "", ""
    if old is not None and old.block_hash is not None:
        if old.block_hash == block.block_hash:
            return "hit", f"prefix hit of {' and '.join(sorted(gained))} in this step"
        return "evicted", "given out in this step: what it had cached is gone"
    return "new", "given out in this step"


def _cache_line(hits: int, queries: int, now: int) -> str:
    if not queries:
        return "prefix hits: not asked yet"
    gained = f", {now} now" if now else ""
    return f"prefix hits: {hits} of {queries} tokens{gained}"
