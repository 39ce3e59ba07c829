"""Kernels 2 and 3: prompt tokens, positions and sequence lengths of a step, gathered from the state table."""

import torch

from kernels.dispatch import check_tensors, resolve_form, segment_of
from kernels.triton_support import launch, tl, triton


def prepare_prefill_inputs(
    # [T] i32, written in place
    input_ids: torch.Tensor,
    # [R] i32, written in place
    next_prefill_tokens: torch.Tensor,
    # [r] i32, distinct rows
    idx_mapping: torch.Tensor,
    # [>= r + 1] i32
    query_start_loc: torch.Tensor,
    # [R, L] i32
    all_token_ids: torch.Tensor,
    # [R] i32
    prefill_len: torch.Tensor,
    # [R] i32
    num_computed_tokens: torch.Tensor,
    *,
    form: str = "auto",
) -> None:
    """Copy the scheduled tokens of every request that is still prefilling into the flat input.

    A request with c computed and q scheduled tokens prefills if c < prefill_len. It gets
    `all_token_ids[row, c : c + q]`, and where the prompt goes on after the chunk, its next token c + q goes to
    `next_prefill_tokens[row]` (drafters need it). All other cells keep their values. `input_ids` may be a view that
    ends after the tokens of this step.

    Raises:
        ValueError: a wrong dtype, rank, length or form.
    """
    num_reqs = idx_mapping.shape[0]
    check_tensors(
        torch.int32,
        1,
        input_ids=input_ids,
        next_prefill_tokens=next_prefill_tokens,
        idx_mapping=idx_mapping,
        prefill_len=prefill_len,
        num_computed_tokens=num_computed_tokens,
    )
    check_tensors(torch.int32, 1, num_reqs + 1, query_start_loc=query_start_loc)
    check_tensors(torch.int32, 2, all_token_ids=all_token_ids)
    form = resolve_form(form, input_ids)
    args = (
        input_ids,
        next_prefill_tokens,
        idx_mapping,
        query_start_loc,
        all_token_ids,
        prefill_len,
        num_computed_tokens,
    )
    if num_reqs == 0:
        return
    if form == "torch":
        _prefill_torch(*args)
    elif form == "loop":
        _prefill_loop(*args)
    else:
        launch(_prepare_prefill_inputs_kernel, (num_reqs,), *args, all_token_ids.stride(0), form=form, BLOCK=1024)


def prepare_pos_seq_lens(
    # [r] i32
    idx_mapping: torch.Tensor,
    # [>= r + 1] i32
    query_start_loc: torch.Tensor,
    # [R] i32
    num_computed_tokens: torch.Tensor,
    # [T] i64, written in place
    positions: torch.Tensor,
    # [R] i32, written in place
    seq_lens: torch.Tensor,
    *,
    form: str = "auto",
) -> None:
    """Write the positions c .. c + q - 1 of every request, its sequence length c + q, and 0 into `seq_lens[r:]`.

    The zeros make padded requests of a captured graph attend to nothing. Positions past the tokens of this step keep
    their values. `positions` may be a view that ends after the tokens of this step.

    Raises:
        ValueError: a wrong dtype, rank, length or form.
    """
    num_reqs = idx_mapping.shape[0]
    check_tensors(torch.int32, 1, idx_mapping=idx_mapping, num_computed_tokens=num_computed_tokens)
    check_tensors(torch.int32, 1, num_reqs + 1, query_start_loc=query_start_loc)
    check_tensors(torch.int32, 1, num_reqs, seq_lens=seq_lens)
    check_tensors(torch.int64, 1, positions=positions)
    form = resolve_form(form, positions)
    args = (idx_mapping, query_start_loc, num_computed_tokens, positions, seq_lens)
    if form == "torch":
        _pos_torch(*args)
    elif form == "loop":
        _pos_loop(*args)
    else:
        launch(_prepare_pos_seq_lens_kernel, (num_reqs + 1,), *args, num_reqs, seq_lens.shape[0], form=form, BLOCK=1024)


def _prefill_loop(
    input_ids: torch.Tensor,
    next_prefill_tokens: torch.Tensor,
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    all_token_ids: torch.Tensor,
    prefill_len: torch.Tensor,
    num_computed_tokens: torch.Tensor,
) -> None:
    for i in range(idx_mapping.shape[0]):
        row = int(idx_mapping[i])
        begin, end = int(query_start_loc[i]), int(query_start_loc[i + 1])
        computed, prompt = int(num_computed_tokens[row]), int(prefill_len[row])
        if computed >= prompt:
            continue
        following = computed + end - begin
        input_ids[begin:end] = all_token_ids[row, computed:following]
        if following < prompt:
            next_prefill_tokens[row] = all_token_ids[row, following]


def _prefill_torch(
    input_ids: torch.Tensor,
    next_prefill_tokens: torch.Tensor,
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    all_token_ids: torch.Tensor,
    prefill_len: torch.Tensor,
    num_computed_tokens: torch.Tensor,
) -> None:
    num_reqs, last_column = idx_mapping.shape[0], all_token_ids.shape[1] - 1
    rows = idx_mapping.long()
    computed, prompt = num_computed_tokens[rows], prefill_len[rows]
    req, offset, inside = segment_of(query_start_loc, num_reqs, input_ids.shape[0])
    column = (computed[req] + offset).clamp_(0, last_column).long()
    prefilling = inside & (computed < prompt)[req]
    input_ids.copy_(torch.where(prefilling, all_token_ids[rows[req], column], input_ids))

    following = computed + query_start_loc[1 : num_reqs + 1] - query_start_loc[:num_reqs]
    token = all_token_ids[rows, following.clamp(0, last_column).long()]
    # Rows are distinct, so writing back what stood there is the way to skip a row without a host wait.
    next_prefill_tokens[rows] = torch.where(following < prompt, token, next_prefill_tokens[rows])


@triton.jit
def _prepare_prefill_inputs_kernel(
    input_ids_ptr,
    next_prefill_tokens_ptr,
    idx_mapping_ptr,
    query_start_loc_ptr,
    all_token_ids_ptr,
    prefill_len_ptr,
    num_computed_tokens_ptr,
    all_token_ids_stride,
    BLOCK: tl.constexpr,
):
    req = tl.program_id(0)
    row = tl.load(idx_mapping_ptr + req).to(tl.int64)
    computed = tl.load(num_computed_tokens_ptr + row)
    prompt = tl.load(prefill_len_ptr + row)
    if computed >= prompt:
        return
    begin = tl.load(query_start_loc_ptr + req)
    length = tl.load(query_start_loc_ptr + req + 1) - begin
    copy_prompt(
        row, begin, length, computed, prompt, input_ids_ptr, next_prefill_tokens_ptr, all_token_ids_ptr,
        all_token_ids_stride, BLOCK,
    )  # fmt: skip


@triton.jit
def copy_prompt(
    row, begin, length, computed, prompt, input_ids_ptr, next_prefill_tokens_ptr, all_token_ids_ptr,
    all_token_ids_stride, BLOCK: tl.constexpr,
):  # fmt: skip
    """The tokens of a request that is still prefilling, from slot `begin` on, and the one behind them."""
    source_ptr = all_token_ids_ptr + row * all_token_ids_stride + computed
    for done in range(0, length, BLOCK):
        offset = done + tl.arange(0, BLOCK)
        mask = offset < length
        tl.store(input_ids_ptr + begin + offset, tl.load(source_ptr + offset, mask=mask), mask=mask)
    if computed + length < prompt:
        tl.store(next_prefill_tokens_ptr + row, tl.load(source_ptr + length))


def _pos_loop(
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_computed_tokens: torch.Tensor,
    positions: torch.Tensor,
    seq_lens: torch.Tensor,
) -> None:
    num_reqs = idx_mapping.shape[0]
    for i in range(num_reqs):
        computed = int(num_computed_tokens[int(idx_mapping[i])])
        begin, end = int(query_start_loc[i]), int(query_start_loc[i + 1])
        for offset in range(end - begin):
            positions[begin + offset] = computed + offset
        seq_lens[i] = computed + end - begin
    for i in range(num_reqs, seq_lens.shape[0]):
        seq_lens[i] = 0


def _pos_torch(
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_computed_tokens: torch.Tensor,
    positions: torch.Tensor,
    seq_lens: torch.Tensor,
) -> None:
    num_reqs = idx_mapping.shape[0]
    seq_lens[num_reqs:].zero_()
    if num_reqs == 0:
        return
    computed = num_computed_tokens[idx_mapping.long()]
    query_len = query_start_loc[1 : num_reqs + 1] - query_start_loc[:num_reqs]
    torch.add(computed, query_len, out=seq_lens[:num_reqs])
    req, offset, inside = segment_of(query_start_loc, num_reqs, positions.shape[0])
    positions.copy_(torch.where(inside, computed[req] + offset, positions))


@triton.jit(do_not_specialize=["num_reqs"])
def _prepare_pos_seq_lens_kernel(
    idx_mapping_ptr,
    query_start_loc_ptr,
    num_computed_tokens_ptr,
    positions_ptr,
    seq_lens_ptr,
    num_reqs,
    max_num_reqs,
    BLOCK: tl.constexpr,
):
    req = tl.program_id(0)
    if req == num_reqs:
        for done in range(num_reqs, max_num_reqs, BLOCK):
            padded = done + tl.arange(0, BLOCK)
            tl.store(seq_lens_ptr + padded, tl.zeros([BLOCK], tl.int32), mask=padded < max_num_reqs)
        return
    computed = tl.load(num_computed_tokens_ptr + tl.load(idx_mapping_ptr + req))
    begin = tl.load(query_start_loc_ptr + req)
    length = tl.load(query_start_loc_ptr + req + 1) - begin
    tl.store(seq_lens_ptr + req, computed + length)
    for done in range(0, length, BLOCK):
        offset = done + tl.arange(0, BLOCK)
        tl.store(positions_ptr + begin + offset, (computed + offset).to(tl.int64), mask=offset < length)
