"""What a snapshot shows of runner V2."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from ..snapshot import BlockTablesView, InputsView, RowView
from ..spec_decode import NO_DRAFT
from .runner import MADE_BY, ModelRunnerV2

Views = tuple[tuple[RowView, ...], BlockTablesView, InputsView | None]


def pending_views(runner: ModelRunnerV2) -> Callable[[], Views]:
    """Copies the host's side now, enqueues copies of the device's; the result waits for them."""
    states, tables, sampling, buffers = (
        runner.req_states,
        runner.block_tables,
        runner.sampling_states,
        runner.input_buffers,
    )
    owners = dict(states.index_to_req_id)
    batch, work = runner.last_batch, runner.last_work
    host = {
        "prompt_len": states.prompt_len.np.copy(),
        "prefill_len": states.prefill_len.np.copy(),
        "num_computed_tokens_np": states.num_computed_tokens_np.copy(),
        "temperature": sampling.temperature.np.copy(),
        "top_p": sampling.top_p.np.copy(),
        "top_k": sampling.top_k.np.copy(),
        "seed": sampling.seeds.np.copy(),
        "num_blocks": tables.num_blocks.np.copy(),
    }
    confidences = runner.decoder.confidences if runner.decoder is not None else None

    def device_tensors() -> dict[str, torch.Tensor]:
        tensors = {
            "total_len": states.total_len.gpu,
            "num_computed_tokens": states.num_computed_tokens.gpu,
            "last_sampled_token": states.last_sampled_tokens[:, 0],
            "block_table": tables.block_table.gpu,
        }
        if runner.num_drafts:
            tensors["draft_tokens"] = states.draft_tokens
        if confidences is not None:
            tensors["confidences"] = confidences
        if batch is not None and work is not None and work.logits_indices is not None:
            padded = work.num_tokens_padded
            tensors |= {
                "input_ids": buffers.input_ids[:padded],
                "positions": buffers.positions[:padded],
                # Under a budget of drafts the device makes the lengths.
                "query_start_loc": work.metadata.query_start_loc[: batch.num_reqs + 1],
                "cu_num_logits": work.cu_num_logits[: batch.num_reqs + 1],
                "seq_lens": buffers.seq_lens[: work.num_reqs_padded],
                "slot_mapping": tables.slot_mapping[:padded],
                "gathered": tables.input_block_table[: work.num_reqs_padded],
                "logits_indices": work.logits_indices,
            }
        return tensors

    fetch = runner.device.fetch(device_tensors)

    def result() -> Views:
        device = fetch.result()
        rows = tuple(_row(row, owners.get(row), {**host, **device}) for row in range(runner.max_num_reqs))
        persistent = tuple(
            tuple(device["block_table"][row, : host["num_blocks"][row]].tolist()) if row in owners else ()
            for row in range(runner.max_num_reqs)
        )
        if batch is None or "input_ids" not in device:
            return rows, BlockTablesView(persistent, (), ()), None
        idx_mapping = tuple(batch.idx_mapping_np.tolist())
        gathered = tuple(
            tuple(device["gathered"][i, : -(-int(device["seq_lens"][i]) // tables.block_size)].tolist())
            for i in range(batch.num_reqs)
        )
        names = ("input_ids", "positions", "query_start_loc", "seq_lens", "slot_mapping")
        start_loc, logits_indices = device["query_start_loc"], device["logits_indices"]
        inputs = InputsView(
            req_ids=batch.req_ids,
            num_scheduled_tokens=tuple(np.diff(start_loc).tolist()),
            num_tokens=int(start_loc[-1]),
            num_tokens_padded=len(device["input_ids"]),
            logits_indices=tuple(logits_indices[: int(device["cu_num_logits"][-1])].tolist()),
            made_by=MADE_BY,
            **{name: tuple(device[name].tolist()) for name in names},
        )
        return rows, BlockTablesView(persistent, idx_mapping, gathered), inputs

    return result


COLUMNS = (
    "total_len", "prompt_len", "prefill_len", "num_computed_tokens", "num_computed_tokens_np", "last_sampled_token",
    "temperature", "top_p", "top_k", "seed",
)  # fmt: skip


def _row(row: int, req_id: str | None, columns: dict) -> RowView:
    if req_id is None:
        return RowView(row, None, {})
    drafts = columns["draft_tokens"][row].tolist() if "draft_tokens" in columns else []
    # The first that is none ends them.
    count = drafts.index(NO_DRAFT) if NO_DRAFT in drafts else len(drafts)
    confidences = tuple(columns["confidences"][row, :count].tolist()) if "confidences" in columns else None
    return RowView(
        row, req_id, {name: columns[name][row].item() for name in COLUMNS}, tuple(drafts[:count]), confidences
    )
