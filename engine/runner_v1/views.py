"""What a snapshot shows of runner V1."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from ..snapshot import BlockTablesView, InputsView, RowView
from .input_buffers import MADE_BY, MADE_BY_ASYNC
from .runner import ModelRunnerV1

Views = tuple[tuple[RowView, ...], BlockTablesView, InputsView | None]


def pending_views(runner: ModelRunnerV1, drafts: Mapping[str, tuple[int, ...]]) -> Callable[[], Views]:
    """Copies the host's side now, enqueues copies of the device's; the result waits for them.

    Args:
        drafts: by request, those that the scheduler has for the next step.
    """
    batch, buffers, inputs = runner.input_batch, runner.input_buffers, runner.last_inputs
    rows = tuple(_row(runner, row, drafts) for row in range(runner.max_num_reqs))
    persistent = tuple(
        tuple(batch.block_table.np[row, : batch.num_blocks[row]].tolist()) if row < batch.num_reqs else ()
        for row in range(runner.max_num_reqs)
    )

    def device_tensors() -> dict[str, torch.Tensor]:
        if inputs is None:
            return {}
        r, t = len(inputs.req_ids), inputs.num_tokens
        return {
            "input_ids": buffers.input_ids.gpu[:t],
            "positions": buffers.positions[:t],
            "query_start_loc": buffers.query_start_loc.gpu[: r + 1],
            "seq_lens": buffers.seq_lens[:r],
            "slot_mapping": buffers.slot_mapping[:t],
            "gathered": batch.block_table.gpu[:r],
        }

    fetch = runner.device.fetch(device_tensors)

    def result() -> Views:
        device = fetch.result()
        if inputs is None:
            return rows, BlockTablesView(persistent, (), ()), None
        block_size = runner.config.block_size
        gathered = tuple(
            tuple(device["gathered"][i, : -(-int(length) // block_size)].tolist())
            for i, length in enumerate(device["seq_lens"])
        )
        names = ("input_ids", "positions", "query_start_loc", "seq_lens", "slot_mapping")
        view = InputsView(
            req_ids=inputs.req_ids,
            num_scheduled_tokens=tuple(inputs.num_scheduled_tokens.tolist()),
            num_tokens=inputs.num_tokens,
            num_tokens_padded=inputs.num_tokens,
            logits_indices=tuple(
                row
                for end, drafts in zip(device["query_start_loc"][1:].tolist(), inputs.num_drafts, strict=True)
                for row in range(end - 1 - drafts, end)
            ),
            made_by=MADE_BY_ASYNC if runner.use_async_scheduling else MADE_BY,
            **{name: tuple(device[name].tolist()) for name in names},
        )
        return rows, BlockTablesView(persistent, tuple(range(len(inputs.req_ids))), gathered), view

    return result


def _row(runner: ModelRunnerV1, row: int, drafts: Mapping[str, tuple[int, ...]]) -> RowView:
    batch = runner.input_batch
    if row >= batch.num_reqs:
        return RowView(row, None, {})
    num_tokens = int(batch.num_tokens[row])
    return RowView(
        row,
        batch.req_ids[row],
        {
            "num_tokens": num_tokens,
            "num_prompt_tokens": int(batch.num_prompt_tokens[row]),
            "num_computed_tokens": int(batch.num_computed_tokens_cpu[row]),
            "last_token": int(batch.token_ids_cpu[row, num_tokens - 1]),
            "temperature": float(batch.temperature.np[row]),
            "top_p": float(batch.top_p.np[row]),
            "top_k": int(batch.top_k.np[row]),
        },
        drafts.get(batch.req_ids[row] or "", ()),
    )
