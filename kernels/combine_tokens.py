"""Kernels 4 and 5: put sampled and draft tokens into the flat input, and map logits rows to requests."""

import torch

from kernels.dispatch import check_tensors, resolve_form, segment_of
from kernels.triton_support import launch, tl, triton


def combine_sampled_and_draft_tokens(
    # [T] i32, written in place
    input_ids: torch.Tensor,
    # [r] i32
    idx_mapping: torch.Tensor,
    # [R, 1] i64
    last_sampled_tokens: torch.Tensor,
    # [>= r + 1] i32
    query_start_loc: torch.Tensor,
    # [>= r] i32
    seq_lens: torch.Tensor,
    # [R] i32
    prefill_len: torch.Tensor,
    # [R, max(N, 1)] i64
    draft_tokens: torch.Tensor,
    # [r + 1] i32, ascending from 0
    cu_num_logits: torch.Tensor,
    num_logits: int,
    *,
    form: str = "auto",
) -> torch.Tensor:
    """Return which input slots need logits, and fill those slots of decoding requests.

    A request with k drafts has k + 1 logits rows: the last k + 1 slots of its query. Unless the step ends within its
    prompt (seq_len <= prefill_len), the slots become [last sampled token, draft 1 .. k]; the first is left alone while
    its position still lies in the prompt.

    Args:
        num_logits: `cu_num_logits[r]`, or more where the host only knows a bound of it.

    Returns:
        logits_indices: i64 [num_logits], indices into `input_ids`; 0 in rows of nobody.

    Raises:
        ValueError: a wrong dtype, rank, length or form.
    """
    num_reqs = idx_mapping.shape[0]
    check_tensors(torch.int32, 1, input_ids=input_ids, idx_mapping=idx_mapping, prefill_len=prefill_len)
    check_tensors(torch.int32, 1, num_reqs + 1, query_start_loc=query_start_loc, cu_num_logits=cu_num_logits)
    check_tensors(torch.int32, 1, num_reqs, seq_lens=seq_lens)
    check_tensors(torch.int64, 2, last_sampled_tokens=last_sampled_tokens, draft_tokens=draft_tokens)
    form = resolve_form(form, input_ids)
    # One row a request is exact; with drafts it may be a bound.
    make = torch.empty if num_logits == num_reqs else torch.zeros
    logits_indices = make(num_logits, dtype=torch.int64, device=input_ids.device)
    if num_reqs == 0:
        return logits_indices
    args = (
        input_ids,
        idx_mapping,
        last_sampled_tokens,
        query_start_loc,
        seq_lens,
        prefill_len,
        draft_tokens,
        cu_num_logits,
        logits_indices,
    )
    if form == "torch":
        _combine_torch(*args)
    elif form == "loop":
        _combine_loop(*args)
    else:
        launch(
            _combine_sampled_and_draft_tokens_kernel,
            (num_reqs,),
            *args,
            last_sampled_tokens.stride(0),
            draft_tokens.stride(0),
            form=form,
            num_warps=1,
            BLOCK=32,
        )
    return logits_indices


def expand_idx_mapping(
    # [r] i32
    idx_mapping: torch.Tensor,
    num_logits: int,
    # [r + 1] i32, ascending from 0
    cu_num_logits: torch.Tensor,
    *,
    form: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Repeat the state row of every request for each of its logits rows.

    Args:
        num_logits: `cu_num_logits[r]`, or more where the host only knows a bound of it.

    Returns:
        expanded_idx_mapping: i32 [num_logits], the state row of each logits row; -1 in rows of nobody.
        expanded_local_pos: i32 [num_logits], 0 .. k within each request; 0 in rows of nobody.

    Raises:
        ValueError: a wrong dtype, rank, length or form.
    """
    num_reqs = idx_mapping.shape[0]
    check_tensors(torch.int32, 1, idx_mapping=idx_mapping)
    check_tensors(torch.int32, 1, num_reqs + 1, cu_num_logits=cu_num_logits)
    form = resolve_form(form, idx_mapping)
    if form == "torch" and num_reqs > 0:
        req, local_pos, inside = segment_of(cu_num_logits, num_reqs, num_logits)
        return torch.where(inside, idx_mapping[req], -1), torch.where(inside, local_pos, 0)
    expanded_idx_mapping = torch.full((num_logits,), -1, dtype=torch.int32, device=idx_mapping.device)
    expanded_local_pos = torch.zeros_like(expanded_idx_mapping)
    if form == "loop":
        for i in range(num_reqs):
            begin, end = int(cu_num_logits[i]), int(cu_num_logits[i + 1])
            for k in range(end - begin):
                expanded_idx_mapping[begin + k] = idx_mapping[i]
                expanded_local_pos[begin + k] = k
    elif num_reqs > 0:
        launch(
            _expand_idx_mapping_kernel,
            (num_reqs,),
            idx_mapping,
            cu_num_logits,
            expanded_idx_mapping,
            expanded_local_pos,
            form=form,
            num_warps=1,
            BLOCK=32,
        )
    return expanded_idx_mapping, expanded_local_pos


def _combine_loop(
    input_ids: torch.Tensor,
    idx_mapping: torch.Tensor,
    last_sampled_tokens: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    prefill_len: torch.Tensor,
    draft_tokens: torch.Tensor,
    cu_num_logits: torch.Tensor,
    logits_indices: torch.Tensor,
) -> None:
    for i in range(idx_mapping.shape[0]):
        row = int(idx_mapping[i])
        begin, end = int(cu_num_logits[i]), int(cu_num_logits[i + 1])
        first_slot = int(query_start_loc[i + 1]) - (end - begin)
        for k in range(end - begin):
            logits_indices[begin + k] = first_slot + k
        seq_len, prompt = int(seq_lens[i]), int(prefill_len[row])
        if seq_len <= prompt:
            continue
        for k in range(end - begin):
            if k > 0:
                input_ids[first_slot + k] = draft_tokens[row, k - 1]
            elif seq_len - (end - begin) >= prompt:
                input_ids[first_slot] = last_sampled_tokens[row, 0]


def _combine_torch(
    input_ids: torch.Tensor,
    idx_mapping: torch.Tensor,
    last_sampled_tokens: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    prefill_len: torch.Tensor,
    draft_tokens: torch.Tensor,
    cu_num_logits: torch.Tensor,
    logits_indices: torch.Tensor,
) -> None:
    num_reqs = idx_mapping.shape[0]
    req, k, inside = segment_of(cu_num_logits, num_reqs, logits_indices.shape[0])
    rows = idx_mapping.long()
    logits_of_req = cu_num_logits[1 : num_reqs + 1] - cu_num_logits[:num_reqs]
    first_slot = query_start_loc[1 : num_reqs + 1] - logits_of_req
    seq_len, prompt = seq_lens[:num_reqs], prefill_len[rows]
    decoding, past_prompt = seq_len > prompt, seq_len - logits_of_req >= prompt

    torch.mul(first_slot[req] + k, inside, out=logits_indices)
    is_draft = k > 0
    draft = draft_tokens[rows[req], (k - 1).clamp_(0, draft_tokens.shape[1] - 1).long()]
    token = torch.where(is_draft, draft, last_sampled_tokens[rows[req], 0]).to(torch.int32)
    write = inside & decoding[req] & (is_draft | past_prompt[req])
    # One slot more for what is not written: the row of a request without tokens, in a padded batch, names another's.
    num_slots = input_ids.shape[0]
    slots = torch.cat([input_ids, input_ids.new_empty(1)])
    slots[torch.where(write, logits_indices, num_slots)] = token
    input_ids.copy_(slots[:num_slots])


@triton.jit
def _combine_sampled_and_draft_tokens_kernel(
    input_ids_ptr,
    idx_mapping_ptr,
    last_sampled_tokens_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    prefill_len_ptr,
    draft_tokens_ptr,
    cu_num_logits_ptr,
    logits_indices_ptr,
    last_sampled_tokens_stride,
    draft_tokens_stride,
    BLOCK: tl.constexpr,
):
    req = tl.program_id(0)
    row = tl.load(idx_mapping_ptr + req).to(tl.int64)
    begin = tl.load(cu_num_logits_ptr + req)
    num_logits = tl.load(cu_num_logits_ptr + req + 1) - begin
    first_slot = tl.load(query_start_loc_ptr + req + 1) - num_logits
    seq_len = tl.load(seq_lens_ptr + req)
    prompt = tl.load(prefill_len_ptr + row)
    for done in range(0, num_logits, BLOCK):
        k = done + tl.arange(0, BLOCK)
        mask = k < num_logits
        tl.store(logits_indices_ptr + begin + k, (first_slot + k).to(tl.int64), mask=mask)
        token, is_known = decoded_tokens(
            k, row, seq_len, num_logits, prompt, last_sampled_tokens_ptr, last_sampled_tokens_stride, draft_tokens_ptr,
            draft_tokens_stride,
        )  # fmt: skip
        tl.store(input_ids_ptr + first_slot + k, token, mask=is_known)


@triton.jit
def decoded_tokens(
    k, row, seq_len, num_logits, prompt, last_sampled_tokens_ptr, last_sampled_tokens_stride, draft_tokens_ptr,
    draft_tokens_stride,
):  # fmt: skip
    """The input tokens i32 of a request's rows k of logits, and which of them are no tokens of its prompt."""
    first = tl.where(seq_len > prompt, tl.where(seq_len - num_logits >= prompt, 0, 1), num_logits)
    is_known = (k >= first) & (k < num_logits)
    last_sampled = tl.load(last_sampled_tokens_ptr + row * last_sampled_tokens_stride)
    # First column of a draft is that of logits row 1.
    drafts_ptr = draft_tokens_ptr + row * draft_tokens_stride - 1
    draft = tl.load(drafts_ptr + k, mask=is_known & (k > 0), other=0)
    return tl.where(k == 0, last_sampled, draft).to(tl.int32), is_known


@triton.jit
def _expand_idx_mapping_kernel(
    idx_mapping_ptr, cu_num_logits_ptr, expanded_idx_mapping_ptr, expanded_local_pos_ptr, BLOCK: tl.constexpr
):
    req = tl.program_id(0)
    row = tl.load(idx_mapping_ptr + req)
    begin = tl.load(cu_num_logits_ptr + req)
    num_logits = tl.load(cu_num_logits_ptr + req + 1) - begin
    for done in range(0, num_logits, BLOCK):
        k = done + tl.arange(0, BLOCK)
        mask = k < num_logits
        tl.store(expanded_idx_mapping_ptr + begin + k, tl.zeros([BLOCK], tl.int32) + row, mask=mask)
        tl.store(expanded_local_pos_ptr + begin + k, k, mask=mask)
