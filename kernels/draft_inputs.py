"""Kernel 32: the whole input of a parallel drafter, from what the step before it left on the device."""

from typing import NamedTuple

import torch

from kernels.dispatch import check_tensors, resolve_form, segment_of
from kernels.slot_mappings import PAD_SLOT_ID
from kernels.triton_support import begin_behind, can_launch_early, launch, tl, triton


class DraftInputs(NamedTuple):
    """A drafter's input, Q queries a request: [anchor, mask, ..., mask]. Request i owns rows i * Q : (i + 1) * Q."""

    # [>= r * Q] i32
    input_ids: torch.Tensor
    # [>= r * Q] i64
    positions: torch.Tensor
    # [>= r * Q] i64
    slot_mapping: torch.Tensor
    # [>= r] i32: tokens that the queries of a request attend to, themselves counted; 0 for a request without a block
    seq_lens: torch.Tensor
    # [T] i64: where the step's own tokens go as context
    context_slot_mapping: torch.Tensor


class VerifiedStep(NamedTuple):
    """The step whose tokens were just sampled."""

    # [r] i32
    idx_mapping: torch.Tensor
    # [>= r + 1] i32
    query_start_loc: torch.Tensor
    # [T] i64
    positions: torch.Tensor
    # [T] i64
    slot_mapping: torch.Tensor
    # [r] i32; 0 while a request is still in its prompt
    num_sampled: torch.Tensor
    # [r] i32
    num_rejected: torch.Tensor
    # [>= r, B] i32: gathered, the table of request i in row i
    block_table: torch.Tensor


class DraftRows(NamedTuple):
    """What the drafter reads of the state table, by row."""

    # [R, 1] i64, this step's token already in it
    last_sampled_tokens: torch.Tensor
    # [R] i32
    num_blocks: torch.Tensor


def prepare_draft_inputs(
    out: DraftInputs,
    step: VerifiedStep,
    rows: DraftRows,
    *,
    num_query: int,
    block_size: int,
    max_model_len: int,
    mask_token_id: int,
    num_reqs_padded: int,
    num_tokens_padded: int,
    form: str = "auto",
) -> None:
    """Write `out` in place: the queries behind each request's last valid token, and where the step's context goes.

    The last valid token of a request is its last one that was not rejected. Its block's anchor is the token that was
    sampled, at the position behind it. A query past the request's blocks or past `max_model_len` gets PAD_SLOT_ID and
    is not counted in `seq_lens`: its own key is never stored, so it must not be read, and nobody else's block is
    written. Requests without tokens in the step, those still in their prompt, and padding have no block.

    The context slots are the step's own, with PAD_SLOT_ID for rejected tokens and for padding: what is stored as
    context is always of accepted tokens.

    Raises:
        ValueError: a wrong dtype, rank, length or form.
    """
    num_reqs = step.idx_mapping.shape[0]
    cells = num_reqs_padded * num_query
    check_tensors(torch.int32, 1, idx_mapping=step.idx_mapping, num_blocks=rows.num_blocks)
    check_tensors(torch.int32, 1, num_reqs, num_sampled=step.num_sampled, num_rejected=step.num_rejected)
    check_tensors(torch.int32, 1, num_reqs + 1, query_start_loc=step.query_start_loc)
    check_tensors(torch.int32, 1, cells, input_ids=out.input_ids)
    check_tensors(torch.int32, 1, num_reqs_padded, seq_lens=out.seq_lens)
    check_tensors(torch.int32, 2, num_reqs, block_table=step.block_table)
    check_tensors(torch.int64, 2, last_sampled_tokens=rows.last_sampled_tokens)
    check_tensors(torch.int64, 1, cells, draft_positions=out.positions, draft_slot_mapping=out.slot_mapping)
    check_tensors(torch.int64, 1, num_tokens_padded, positions=step.positions, slot_mapping=step.slot_mapping)
    check_tensors(torch.int64, 1, num_tokens_padded, context_slot_mapping=out.context_slot_mapping)
    if num_reqs_padded < num_reqs:
        raise ValueError(f"num_reqs_padded {num_reqs_padded} is below the step's {num_reqs} requests")
    form = resolve_form(form, out.input_ids)
    sizes = (num_query, block_size, max_model_len, mask_token_id, num_reqs_padded, num_tokens_padded)
    if form == "torch":
        _torch(out, step, rows, *sizes)
    elif form == "loop":
        _loop(out, step, rows, *sizes)
    else:
        launch(
            _prepare_draft_inputs_kernel,
            (num_reqs_padded + 1,),
            *out,
            *step,
            step.block_table.stride(0),
            rows.last_sampled_tokens,
            rows.last_sampled_tokens.stride(0),
            rows.num_blocks,
            num_reqs,
            num_reqs_padded,
            num_tokens_padded,
            max_model_len,
            mask_token_id,
            form=form,
            num_warps=1,
            pdl=can_launch_early(form, out.input_ids),
            NUM_QUERY=num_query,
            BLOCK_SIZE=block_size,
            PAD=PAD_SLOT_ID,
            BLOCK_Q=1 << (num_query - 1).bit_length(),
            BLOCK=256,
        )


def _loop(
    out: DraftInputs,
    step: VerifiedStep,
    rows: DraftRows,
    num_query: int,
    block_size: int,
    max_model_len: int,
    mask_token_id: int,
    num_reqs_padded: int,
    num_tokens_padded: int,
) -> None:
    num_reqs = step.idx_mapping.shape[0]
    for i in range(num_reqs_padded):
        begin = end = sampled = 0
        if i < num_reqs:
            begin, end = int(step.query_start_loc[i]), int(step.query_start_loc[i + 1])
            sampled = int(step.num_sampled[i])
            last_valid = end - 1 - int(step.num_rejected[i])
            for token in range(begin, end):
                slot = int(step.slot_mapping[token])
                out.context_slot_mapping[token] = slot if token <= last_valid else PAD_SLOT_ID
        has_block = end > begin and sampled > 0
        start = capacity = row = 0
        if has_block:
            row = int(step.idx_mapping[i])
            start = int(step.positions[last_valid]) + 1
            capacity = min(int(rows.num_blocks[row]) * block_size, max_model_len)
        out.seq_lens[i] = min(start + num_query, capacity)
        for k in range(num_query):
            cell, position = i * num_query + k, start + k
            anchored = has_block and k == 0
            out.input_ids[cell] = int(rows.last_sampled_tokens[row, 0]) if anchored else mask_token_id
            out.positions[cell] = min(position, max_model_len - 1) if has_block else 0
            out.slot_mapping[cell] = PAD_SLOT_ID
            if position < capacity:
                block = int(step.block_table[i, position // block_size])
                out.slot_mapping[cell] = block * block_size + position % block_size
    for token in range(int(step.query_start_loc[num_reqs]), num_tokens_padded):
        out.context_slot_mapping[token] = PAD_SLOT_ID


def _torch(
    out: DraftInputs,
    step: VerifiedStep,
    rows: DraftRows,
    num_query: int,
    block_size: int,
    max_model_len: int,
    mask_token_id: int,
    num_reqs_padded: int,
    num_tokens_padded: int,
) -> None:
    num_reqs = step.idx_mapping.shape[0]
    cells = num_reqs_padded * num_query
    ids = out.input_ids[:cells].view(num_reqs_padded, num_query)
    positions = out.positions[:cells].view(num_reqs_padded, num_query)
    slots = out.slot_mapping[:cells].view(num_reqs_padded, num_query)
    context = out.context_slot_mapping[:num_tokens_padded]
    ids.fill_(mask_token_id)
    positions.zero_()
    slots.fill_(PAD_SLOT_ID)
    out.seq_lens[:num_reqs_padded].zero_()
    if num_reqs == 0 or num_tokens_padded == 0:
        context.fill_(PAD_SLOT_ID)
        return
    starts = step.query_start_loc[: num_reqs + 1]
    last_valid = starts[1:] - 1 - step.num_rejected[:num_reqs]
    req, _, inside = segment_of(starts, num_reqs, num_tokens_padded)
    token = torch.arange(num_tokens_padded, dtype=torch.int32, device=context.device)
    accepted = inside & (token <= last_valid[req])
    context.copy_(step.slot_mapping[:num_tokens_padded].masked_fill(~accepted, PAD_SLOT_ID))

    row = step.idx_mapping.long()
    has_block = (starts[1:] > starts[:-1]) & (step.num_sampled[:num_reqs] > 0)
    start = step.positions[last_valid.clamp(min=0).long()] + 1
    capacity = (rows.num_blocks[row] * block_size).clamp(max=max_model_len).mul(has_block)
    position = start.unsqueeze(1) + torch.arange(num_query, device=start.device)
    stored = position < capacity.unsqueeze(1)
    block = (position // block_size).clamp_(0, step.block_table.shape[1] - 1)
    slot = step.block_table[:num_reqs].gather(1, block).long() * block_size + position % block_size
    slots[:num_reqs] = slot.masked_fill(~stored, PAD_SLOT_ID)
    positions[:num_reqs] = position.clamp(max=max_model_len - 1).mul(has_block.unsqueeze(1))
    anchor = rows.last_sampled_tokens[row, 0].to(torch.int32)
    ids[:num_reqs, 0] = anchor.masked_fill(~has_block, mask_token_id)
    out.seq_lens[:num_reqs] = torch.minimum(start + num_query, capacity).to(torch.int32)


@triton.jit(do_not_specialize=["num_reqs", "num_reqs_padded", "num_tokens_padded", "max_model_len", "mask_token_id"])
def _prepare_draft_inputs_kernel(
    input_ids_ptr,
    draft_positions_ptr,
    draft_slot_mapping_ptr,
    draft_seq_lens_ptr,
    context_slot_mapping_ptr,
    idx_mapping_ptr,
    query_start_loc_ptr,
    positions_ptr,
    slot_mapping_ptr,
    num_sampled_ptr,
    num_rejected_ptr,
    block_table_ptr,
    block_table_stride,
    last_sampled_ptr,
    last_sampled_stride,
    num_blocks_ptr,
    num_reqs,
    num_reqs_padded,
    num_tokens_padded,
    max_model_len,
    mask_token_id,
    PDL: tl.constexpr,
    NUM_QUERY: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PAD: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK: tl.constexpr,
):
    begin_behind(PDL)
    req = tl.program_id(0)
    if req == num_reqs_padded:
        for done in range(tl.load(query_start_loc_ptr + num_reqs), num_tokens_padded, BLOCK):
            token = done + tl.arange(0, BLOCK)
            pad = tl.full([BLOCK], PAD, tl.int64)
            tl.store(context_slot_mapping_ptr + token, pad, mask=token < num_tokens_padded)
        return
    start, capacity, row = tl.full([], 0, tl.int64), tl.full([], 0, tl.int64), tl.full([], 0, tl.int64)
    if req < num_reqs:
        begin = tl.load(query_start_loc_ptr + req)
        end = tl.load(query_start_loc_ptr + req + 1)
        last_valid = end - 1 - tl.load(num_rejected_ptr + req)
        for done in range(begin, end, BLOCK):
            token = done + tl.arange(0, BLOCK)
            slot = tl.load(slot_mapping_ptr + token, mask=token < end, other=0)
            kept = tl.where(token <= last_valid, slot, PAD)
            tl.store(context_slot_mapping_ptr + token, kept, mask=token < end)
        if (end > begin) & (tl.load(num_sampled_ptr + req) > 0):
            row = tl.load(idx_mapping_ptr + req).to(tl.int64)
            start = tl.load(positions_ptr + last_valid) + 1
            capacity = tl.minimum(tl.load(num_blocks_ptr + row).to(tl.int64) * BLOCK_SIZE, max_model_len)
    # A block is never at position 0: behind at least one token of its prompt.
    has_block = start > 0
    k = tl.arange(0, BLOCK_Q)
    cell, inside = req * NUM_QUERY + k, k < NUM_QUERY
    position = start + k
    anchor = tl.load(last_sampled_ptr + row * last_sampled_stride)
    # A full block: the interpreter cannot spread a boolean scalar over one.
    is_anchor = (k == 0) & (start + k > 0)
    tl.store(input_ids_ptr + cell, tl.where(is_anchor, anchor, mask_token_id).to(tl.int32), mask=inside)
    shown = tl.where(has_block, tl.minimum(position, max_model_len - 1), 0)
    tl.store(draft_positions_ptr + cell, shown, mask=inside)
    stored = inside & (position < capacity)
    block = tl.load(
        block_table_ptr + req.to(tl.int64) * block_table_stride + position // BLOCK_SIZE, mask=stored, other=0
    )
    slot = block.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE
    tl.store(draft_slot_mapping_ptr + cell, tl.where(stored, slot, PAD), mask=inside)
    seq_len = tl.where(has_block, tl.minimum(start + NUM_QUERY, capacity), 0)
    tl.store(draft_seq_lens_ptr + req, seq_len.to(tl.int32))
