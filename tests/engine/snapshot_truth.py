"""Holds a snapshot to what the scheduler knows: the device's tables and inputs, number by number."""

from __future__ import annotations

import numpy as np

from engine import LLM
from engine.request import Request
from engine.snapshot import Snapshot


def assert_truthful(llm: LLM) -> Snapshot:
    """Takes a snapshot between two steps and checks it. Returns it."""
    core, scheduler = llm.core, llm.core.scheduler
    snapshot = core.snapshot().result()
    assert snapshot.step == core.step_count and snapshot.runner == core.runner.name
    assert snapshot.waiting == tuple(r.request_id for r in scheduler.waiting)
    assert snapshot.running == tuple(r.request_id for r in scheduler.running)
    assert [view.step for view in snapshot.in_flight] == [s.scheduler_output.step for s in core.in_flight]
    _check_requests(snapshot, scheduler.requests)
    _check_pool(snapshot, llm)
    in_last_step = set(snapshot.inputs.req_ids) if snapshot.inputs else set()
    rows = {row.request_id: row for row in snapshot.rows if row.request_id is not None}
    assert len(rows) == sum(row.request_id is not None for row in snapshot.rows), "two rows of one request"
    for request in scheduler.running:
        # V1 takes the row of a request that sits a step out.
        if core.use_v2 or request.request_id in rows:
            row = rows[request.request_id]
            assert snapshot.block_tables.persistent[row.row] == tuple(scheduler.kv_cache.block_ids(request.request_id))
            _check_row(snapshot, request, row.cells)
        if request.request_id in in_last_step:
            _check_inputs(snapshot, request)
    return snapshot


def _check_requests(snapshot: Snapshot, requests: dict[str, Request]) -> None:
    views = {view.request_id: view for view in snapshot.requests if view.status != "finished"}
    assert views.keys() == requests.keys()
    for request_id, request in requests.items():
        view = views[request_id]
        assert view.status == request.status.value
        assert view.prompt_token_ids + view.output_token_ids == tuple(request.all_token_ids)
        assert view.num_computed_tokens == request.num_computed_tokens


def _check_pool(snapshot: Snapshot, llm: LLM) -> None:
    pool = snapshot.pool
    owners: dict[int, list[str]] = {}
    for view in snapshot.requests:
        for block_id in view.block_ids:
            owners.setdefault(block_id, []).append(view.request_id)
    assert [block.block_id for block in pool.blocks] == list(range(llm.config.num_gpu_blocks_override or 0))
    for block in pool.blocks[1:]:
        assert sorted(block.owners) == sorted(owners.get(block.block_id, []))
        assert block.ref_cnt == len(block.owners) and (block.block_id in pool.free) == (block.ref_cnt == 0)


def _check_row(snapshot: Snapshot, request: Request, cells: dict[str, int | float | None]) -> None:
    num_tokens = request.num_tokens + request.num_output_placeholders
    assert cells["temperature"] == float(np.float32(request.sampling_params.temperature))
    if snapshot.runner == "v2":
        # The device has executed all that was scheduled, so its truth has caught up with the host's bound.
        assert cells["num_computed_tokens"] == request.num_computed_tokens
        assert cells["total_len"] == num_tokens and cells["prompt_len"] == request.num_prompt_tokens
        if (
            not request.num_output_placeholders
            and request.num_output_tokens
            and cells["total_len"] > cells["prefill_len"]
        ):
            assert cells["last_sampled_token"] == request.output_token_ids[-1]
    else:
        assert cells["num_tokens"] == num_tokens and cells["num_prompt_tokens"] == request.num_prompt_tokens


def _check_inputs(snapshot: Snapshot, request: Request) -> None:
    """The slice of the last step's input that is this request's."""
    inputs, block_size = snapshot.inputs, snapshot.pool.block_size
    assert inputs is not None
    index = inputs.req_ids.index(request.request_id)
    begin, end = inputs.query_start_loc[index : index + 2]
    assert end - begin == inputs.num_scheduled_tokens[index]
    positions = inputs.positions[begin:end]
    assert positions == tuple(range(request.num_computed_tokens - len(positions), request.num_computed_tokens))
    assert inputs.seq_lens[index] == request.num_computed_tokens
    blocks = snapshot.block_tables.gathered[index]
    assert blocks == tuple(snapshot.block_tables.persistent[snapshot.block_tables.idx_mapping[index]])[: len(blocks)]
    assert inputs.slot_mapping[begin:end] == tuple(
        blocks[p // block_size] * block_size + p % block_size for p in positions
    )
    known = request.all_token_ids
    for position, token in zip(positions, inputs.input_ids[begin:end], strict=True):
        if position < len(known):
            assert token == known[position], (
                f"{request.request_id} at {position}: input {token}, right is {known[position]}"
            )
    assert inputs.logits_indices[index] == end - 1
