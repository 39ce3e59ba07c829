"""Kernels 2 to 7 in one launch: what a captured step does before its forward."""

from typing import NamedTuple

import torch

from kernels.combine_tokens import combine_sampled_and_draft_tokens, decoded_tokens, expand_idx_mapping
from kernels.dispatch import check_tensors, resolve_form, segment_of
from kernels.gather_block_tables import copy_blocks, gather_block_tables
from kernels.prepare_inputs import copy_prompt, prepare_pos_seq_lens, prepare_prefill_inputs
from kernels.slot_mappings import PAD_SLOT_ID, compute_slot_mappings, pad_slots, slots_of
from kernels.triton_support import launch, tl, triton


class StepIndex(NamedTuple):
    """Which requests a step has, and how much of them."""

    # [r] i32, distinct rows but for the padding's, which have no tokens
    idx_mapping: torch.Tensor
    # [>= r + 1] i32
    query_start_loc: torch.Tensor
    # [r + 1] i32, ascending from 0
    cu_num_logits: torch.Tensor


class RequestRows(NamedTuple):
    """What is read of the state table, by row."""

    # [R] i32
    num_computed_tokens: torch.Tensor
    # [R] i32
    prefill_len: torch.Tensor
    # [R, L] i32
    all_token_ids: torch.Tensor
    # [R, 1] i64
    last_sampled_tokens: torch.Tensor
    # [R, max(N, 1)] i64, -1 for none
    draft_tokens: torch.Tensor
    # [R, B] i32
    block_table: torch.Tensor
    # [R] i32
    num_blocks: torch.Tensor


class StepInputs(NamedTuple):
    """The inputs, written in place as the kernels 2, 3, 4, 6 and 7 do, and the next token of prompts, by row."""

    # [T] i32
    input_ids: torch.Tensor
    # [T] i64
    positions: torch.Tensor
    # [R] i32
    seq_lens: torch.Tensor
    # [T] i64
    slot_mapping: torch.Tensor
    # [R, B] i32, the table of request i in row i
    block_table: torch.Tensor
    # [R] i32
    next_prefill_tokens: torch.Tensor


class DraftedRows(NamedTuple):
    """The rows of logits of requests with drafts; in nobody's rows 0, -1 and 0."""

    # [l] i32: the input token, -1 for a draft that is none; 0 where it is a prompt's
    token_ids: torch.Tensor
    # [l] i32: state row
    idx_mapping: torch.Tensor
    # [l] i32: place among its request's rows
    local_pos: torch.Tensor


class LogitsRows(NamedTuple):
    """The rows of logits; 0 in nobody's rows."""

    # [l] i64, indices into the step's tokens
    indices: torch.Tensor
    # [l] i64: where the token stands that is drawn from the row
    positions: torch.Tensor
    # None without drafts
    drafted: DraftedRows | None = None


def prepare_step(
    index: StepIndex,
    rows: RequestRows,
    out: StepInputs,
    *,
    block_size: int,
    num_tokens_padded: int,
    num_logits: int,
    with_prompts: bool,
    with_drafts: bool,
    form: str = "auto",
) -> LogitsRows:
    """Write the step's inputs; what stands for no draft is 0 there, so that the model can take it.

    Args:
        num_tokens_padded: slots of tokens beyond the step's own become PAD_SLOT_ID up to here.
        num_logits: l, `cu_num_logits[r]` or more.
        with_prompts: without, no request may be inside its prompt, and kernel 2 is left out.

    Raises:
        ValueError: a wrong dtype, rank, length or form.
    """
    form = resolve_form(form, index.idx_mapping)
    if form in ("torch", "loop"):
        return _in_parts(index, rows, out, block_size, num_tokens_padded, num_logits, with_prompts, with_drafts, form)
    num_reqs = index.idx_mapping.shape[0]
    check_tensors(torch.int32, 1, idx_mapping=index.idx_mapping, num_computed_tokens=rows.num_computed_tokens)
    check_tensors(torch.int32, 1, prefill_len=rows.prefill_len, num_blocks=rows.num_blocks)
    check_tensors(torch.int32, 1, num_reqs + 1, query_start_loc=index.query_start_loc)
    check_tensors(torch.int32, 1, num_reqs + 1, cu_num_logits=index.cu_num_logits)
    check_tensors(torch.int32, 2, all_token_ids=rows.all_token_ids, block_table=rows.block_table)
    check_tensors(torch.int64, 2, last_sampled_tokens=rows.last_sampled_tokens, draft_tokens=rows.draft_tokens)
    check_tensors(torch.int32, 1, num_tokens_padded, input_ids=out.input_ids)
    check_tensors(torch.int64, 1, num_tokens_padded, positions=out.positions, slot_mapping=out.slot_mapping)
    check_tensors(torch.int32, 1, num_reqs, seq_lens=out.seq_lens)
    check_tensors(torch.int32, 2, num_reqs, gathered_block_table=out.block_table)
    check_tensors(torch.int32, 1, next_prefill_tokens=out.next_prefill_tokens)
    device = index.idx_mapping.device
    indices, positions = (torch.empty(num_logits, dtype=torch.int64, device=device) for _ in range(2))
    drafted = None
    if with_drafts:
        drafted = DraftedRows(*(torch.empty(num_logits, dtype=torch.int32, device=device) for _ in range(3)))
    launch(
        _prepare_step_kernel,
        (num_reqs + 1,),
        *index,
        *rows,
        rows.all_token_ids.stride(0),
        rows.last_sampled_tokens.stride(0),
        rows.draft_tokens.stride(0),
        rows.block_table.stride(0),
        *out,
        out.block_table.stride(0),
        indices,
        positions,
        *(drafted or (None, None, None)),
        num_reqs,
        out.seq_lens.shape[0],
        num_tokens_padded,
        num_logits,
        form=form,
        WITH_PROMPTS=with_prompts,
        BLOCK_SIZE=block_size,
        PAD=PAD_SLOT_ID,
        BLOCK_T=1024 if with_prompts else 128,
        BLOCK_B=1024,
        BLOCK_L=32,
    )
    return LogitsRows(indices, positions, drafted)


def _in_parts(
    index: StepIndex, rows: RequestRows, out: StepInputs, block_size: int, num_tokens_padded: int, num_logits: int,
    with_prompts: bool, with_drafts: bool, form: str,
) -> LogitsRows:  # fmt: skip
    """Kernel by kernel: the specification."""
    idx_mapping, query_start_loc, cu_num_logits = index
    num_reqs = idx_mapping.shape[0]
    if with_prompts:
        prepare_prefill_inputs(
            out.input_ids, out.next_prefill_tokens, idx_mapping, query_start_loc, rows.all_token_ids, rows.prefill_len,
            rows.num_computed_tokens, form=form,
        )  # fmt: skip
    prepare_pos_seq_lens(
        idx_mapping, query_start_loc, rows.num_computed_tokens, out.positions, out.seq_lens, form=form
    )  # fmt: skip
    indices = combine_sampled_and_draft_tokens(
        out.input_ids, idx_mapping, rows.last_sampled_tokens, query_start_loc, out.seq_lens, rows.prefill_len,
        rows.draft_tokens, cu_num_logits, num_logits, form=form,
    )  # fmt: skip
    gather_block_tables(idx_mapping, rows.block_table, rows.num_blocks, out.block_table, num_reqs, form=form)
    compute_slot_mappings(
        idx_mapping, query_start_loc, out.positions, rows.block_table, block_size, out.slot_mapping, num_tokens_padded,
        form=form,
    )  # fmt: skip
    own, local_pos = expand_idx_mapping(idx_mapping, num_logits, cu_num_logits, form=form)
    request, place, inside = segment_of(cu_num_logits, num_reqs, num_logits)
    begin = out.seq_lens[request] - (cu_num_logits[request + 1] - cu_num_logits[request])
    positions = torch.where(inside, begin + place + 1, 0).long()
    if not with_drafts:
        return LogitsRows(indices, positions)
    is_known = inside & (positions > rows.prefill_len[own.clamp(min=0).long()])
    token_ids = torch.where(is_known, out.input_ids[indices], 0)
    out.input_ids[:num_tokens_padded].clamp_(min=0)
    return LogitsRows(indices, positions, DraftedRows(token_ids, own, local_pos))


@triton.jit(do_not_specialize=["num_reqs", "num_tokens_padded", "num_logits"])
def _prepare_step_kernel(
    idx_mapping_ptr,
    query_start_loc_ptr,
    cu_num_logits_ptr,
    num_computed_tokens_ptr,
    prefill_len_ptr,
    all_token_ids_ptr,
    last_sampled_tokens_ptr,
    draft_tokens_ptr,
    block_table_ptr,
    num_blocks_ptr,
    all_token_ids_stride,
    last_sampled_tokens_stride,
    draft_tokens_stride,
    block_table_stride,
    input_ids_ptr,
    positions_ptr,
    seq_lens_ptr,
    slot_mapping_ptr,
    gathered_ptr,
    next_prefill_tokens_ptr,
    gathered_stride,
    logits_indices_ptr,
    logits_positions_ptr,
    token_ids_ptr,
    expanded_idx_mapping_ptr,
    expanded_local_pos_ptr,
    num_reqs,
    max_num_reqs,
    num_tokens_padded,
    num_logits,
    WITH_PROMPTS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PAD: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_L: tl.constexpr,
):
    """A program a request, and one for what is nobody's."""
    req = tl.program_id(0)
    begin = tl.load(query_start_loc_ptr + req)
    first_row = tl.load(cu_num_logits_ptr + req)
    if req == num_reqs:
        pad_slots(slot_mapping_ptr, begin, num_tokens_padded, PAD, BLOCK_T)
        for done in range(num_reqs, max_num_reqs, BLOCK_T):
            padded = done + tl.arange(0, BLOCK_T)
            tl.store(seq_lens_ptr + padded, tl.zeros([BLOCK_T], tl.int32), mask=padded < max_num_reqs)
        for done in range(first_row, num_logits, BLOCK_L):
            place = done + tl.arange(0, BLOCK_L)
            zero = tl.zeros([BLOCK_L], tl.int32)
            mask = place < num_logits
            tl.store(logits_indices_ptr + place, zero.to(tl.int64), mask=mask)
            tl.store(logits_positions_ptr + place, zero.to(tl.int64), mask=mask)
            if token_ids_ptr is not None:
                tl.store(token_ids_ptr + place, zero, mask=mask)
                tl.store(expanded_idx_mapping_ptr + place, zero - 1, mask=mask)
                tl.store(expanded_local_pos_ptr + place, zero, mask=mask)
        return
    row = tl.load(idx_mapping_ptr + req).to(tl.int64)
    end = tl.load(query_start_loc_ptr + req + 1)
    num_rows = tl.load(cu_num_logits_ptr + req + 1) - first_row
    computed = tl.load(num_computed_tokens_ptr + row)
    prompt = tl.load(prefill_len_ptr + row)
    blocks_ptr = block_table_ptr + row * block_table_stride
    seq_len = computed + end - begin
    tl.store(seq_lens_ptr + req, seq_len)
    copy_blocks(blocks_ptr, tl.load(num_blocks_ptr + row), gathered_ptr + req.to(tl.int64) * gathered_stride, BLOCK_B)
    for done in range(begin, end, BLOCK_T):
        token = done + tl.arange(0, BLOCK_T)
        position = (computed + token - begin).to(tl.int64)
        tl.store(positions_ptr + token, position, mask=token < end)
        slot = slots_of(position, token < end, blocks_ptr, BLOCK_SIZE)
        tl.store(slot_mapping_ptr + token, slot, mask=token < end)
    if WITH_PROMPTS:
        if computed < prompt:
            copy_prompt(
                row, begin, end - begin, computed, prompt, input_ids_ptr, next_prefill_tokens_ptr, all_token_ids_ptr,
                all_token_ids_stride, BLOCK_T,
            )  # fmt: skip
        # A draft behind a prompt goes where another thread has copied something else.
        tl.debug_barrier()
    for done in range(0, num_rows, BLOCK_L):
        k = done + tl.arange(0, BLOCK_L)
        mask = k < num_rows
        behind = num_rows - k
        token, is_known = decoded_tokens(
            k, row, seq_len, num_rows, prompt, last_sampled_tokens_ptr, last_sampled_tokens_stride, draft_tokens_ptr,
            draft_tokens_stride,
        )  # fmt: skip
        tl.store(input_ids_ptr + end - behind, tl.maximum(token, 0), mask=is_known)
        tl.store(logits_indices_ptr + first_row + k, (end - behind).to(tl.int64), mask=mask)
        tl.store(logits_positions_ptr + first_row + k, (seq_len - behind + 1).to(tl.int64), mask=mask)
        if token_ids_ptr is not None:
            tl.store(token_ids_ptr + first_row + k, tl.where(is_known, token, 0), mask=mask)
            tl.store(expanded_idx_mapping_ptr + first_row + k, (row + k * 0).to(tl.int32), mask=mask)
            tl.store(expanded_local_pos_ptr + first_row + k, k, mask=mask)
