"""Whether a runner's rows agree with the scheduler's books, between two steps. Reads the host's side only."""

from __future__ import annotations

from collections.abc import Set

from .runner_v1 import ModelRunnerV1
from .runner_v2 import ModelRunnerV2
from .scheduler import Scheduler


def check_rows(runner: ModelRunnerV1 | ModelRunnerV2, scheduler: Scheduler) -> None:
    """Raises AssertionError naming the row or the request at fault. Call it when every scheduled step has been
    executed."""
    blocks = {request.request_id: scheduler.kv_cache.block_ids(request.request_id) for request in scheduler.running}
    if isinstance(runner, ModelRunnerV1):
        _check_v1(runner, scheduler.runner_request_ids, blocks)
    else:
        _check_v2(runner, scheduler.runner_request_ids, blocks)


def _check_v1(runner: ModelRunnerV1, held: Set[str], blocks: dict[str, list[int]]) -> None:
    """Dense rows 0..r-1, each with its request's backup, and the backups' blocks the scheduler's."""
    batch, requests = runner.input_batch, runner.states.requests
    assert requests.keys() == held, f"V1 keeps {sorted(requests)}, the scheduler knows of {sorted(held)}"
    assert batch.req_ids == [r for r in batch.req_ids if r is not None], f"V1's batch has holes: {batch.req_ids}"
    rows = {req_id: row for row, req_id in enumerate(batch.req_ids)}
    assert rows == batch.req_id_to_index, f"V1's rows are {batch.req_ids}, its index says {batch.req_id_to_index}"
    for mapping in (batch.params, batch.stop_ids):
        assert mapping.keys() == set(rows.values()), (
            f"V1 has parameters of rows {sorted(mapping)}, occupied are {len(rows)}"
        )
    assert batch.generators.keys() <= set(rows.values()), f"V1 has generators of empty rows: {sorted(batch.generators)}"
    for members in batch.row_sets():
        assert members <= rows.keys(), f"V1's sets name requests without a row: {members - rows.keys()}"
    assert batch.greedy_reqs | batch.random_reqs == rows.keys(), "each row of V1 is greedy or random"
    assert not batch.greedy_reqs & batch.random_reqs, "no row of V1 is both greedy and random"
    for req_id, block_ids in blocks.items():
        state = requests[req_id]
        assert state.block_ids == block_ids, (
            f"V1's backup of {req_id!r} has blocks {state.block_ids}, right is {block_ids}"
        )
        if req_id in rows:
            row = rows[req_id]
            in_row = batch.block_table.np[row, : batch.num_blocks[row]].tolist()
            assert in_row == block_ids, f"V1's row {row} ({req_id!r}) has blocks {in_row}, right is {block_ids}"
            assert batch.num_tokens[row] == state.num_tokens, f"V1's row {row} has {batch.num_tokens[row]} tokens"


def _check_v2(runner: ModelRunnerV2, held: Set[str], blocks: dict[str, list[int]]) -> None:
    """One row a request and one request a row; used and free rows are all rows."""
    states, tables = runner.req_states, runner.block_tables
    rows = states.req_id_to_index
    assert rows.keys() == held, f"V2 has rows of {sorted(rows)}, the scheduler knows of {sorted(held)}"
    assert {row: req_id for req_id, row in rows.items()} == states.index_to_req_id, "V2's two row maps disagree"
    all_rows = sorted([*rows.values(), *states.free_indices])
    assert all_rows == list(range(states.max_num_reqs)), f"V2's used and free rows are {all_rows}"
    for req_id, block_ids in blocks.items():
        num_blocks = int(tables.num_blocks.np[rows[req_id]])
        assert num_blocks == len(block_ids), (
            f"V2's row of {req_id!r} has {num_blocks} blocks, right are {len(block_ids)}"
        )
