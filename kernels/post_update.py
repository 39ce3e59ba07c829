"""Kernels 9 and 10: count what was accepted and bring the state table up to date, on the device."""

import torch

from kernels.dispatch import check_tensors, resolve_form
from kernels.triton_support import launch, tl, triton


def get_num_sampled_and_rejected(
    # [r] i32, written in place
    num_sampled: torch.Tensor,
    # [>= r] i32
    seq_lens: torch.Tensor,
    # [r + 1] i32
    cu_num_logits: torch.Tensor,
    # [r] i32
    idx_mapping: torch.Tensor,
    # [R] i32
    prefill_len: torch.Tensor,
    *,
    form: str = "auto",
) -> torch.Tensor:
    """Void the samples of requests that are still prefilling, and count the rejected drafts of the others.

    A request whose step ended before the end of its prompt (seq_len < prefill_len) has sampled nothing and rejected
    nothing. Any other has rejected its logits rows that gave no token.

    Returns:
        num_rejected: i32 [r].

    Raises:
        ValueError: a wrong dtype, rank, length or form.
    """
    num_reqs = idx_mapping.shape[0]
    check_tensors(torch.int32, 1, idx_mapping=idx_mapping, prefill_len=prefill_len)
    check_tensors(torch.int32, 1, num_reqs, num_sampled=num_sampled, seq_lens=seq_lens)
    check_tensors(torch.int32, 1, num_reqs + 1, cu_num_logits=cu_num_logits)
    form = resolve_form(form, idx_mapping)
    num_rejected = torch.empty_like(idx_mapping)
    if form == "torch":
        decided = seq_lens[:num_reqs] >= prefill_len[idx_mapping.long()]
        num_sampled[:num_reqs].mul_(decided)
        num_logits = cu_num_logits[1 : num_reqs + 1] - cu_num_logits[:num_reqs]
        torch.mul(num_logits - num_sampled[:num_reqs], decided, out=num_rejected)
    elif form == "loop":
        for i in range(num_reqs):
            if int(seq_lens[i]) < int(prefill_len[int(idx_mapping[i])]):
                num_sampled[i] = 0
                num_rejected[i] = 0
            else:
                num_rejected[i] = int(cu_num_logits[i + 1]) - int(cu_num_logits[i]) - int(num_sampled[i])
    else:
        launch(
            _get_num_sampled_and_rejected_kernel,
            (-(-num_reqs // 128),),
            num_sampled,
            num_rejected,
            seq_lens,
            cu_num_logits,
            idx_mapping,
            prefill_len,
            num_reqs,
            form=form,
            BLOCK=128,
        )
    return num_rejected


def post_update(
    # [r] i32, -1 = skip the request
    idx_mapping: torch.Tensor,
    # [R] i32, written in place
    num_computed_tokens: torch.Tensor,
    # [R, 1] i64, written in place
    last_sampled_tokens: torch.Tensor,
    # [R] i32, written in place
    total_len: torch.Tensor,
    # [R, L] i32, written in place
    all_token_ids: torch.Tensor,
    # [r, N + 1] i64
    sampled_tokens: torch.Tensor,
    # [r] i32
    num_sampled: torch.Tensor,
    # [r] i32
    num_rejected: torch.Tensor,
    # [>= r + 1] i32
    query_start_loc: torch.Tensor,
    # [R, V] i32, written in place, or None where no request uses penalties
    output_bin_counts: torch.Tensor | None = None,
    *,
    form: str = "auto",
) -> None:
    """Append the sampled tokens to their requests and resolve rejection: computed += scheduled - rejected.

    Columns of `sampled_tokens` past `num_sampled` are never used. A token past column L - 1 is counted in `total_len`
    but stored nowhere, so that it cannot run into the next request's row.

    Raises:
        ValueError: a wrong dtype, rank, length or form.
    """
    num_reqs = idx_mapping.shape[0]
    check_tensors(torch.int32, 1, idx_mapping=idx_mapping, num_computed_tokens=num_computed_tokens, total_len=total_len)
    check_tensors(torch.int32, 1, num_reqs, num_sampled=num_sampled, num_rejected=num_rejected)
    check_tensors(torch.int32, 1, num_reqs + 1, query_start_loc=query_start_loc)
    check_tensors(torch.int32, 2, all_token_ids=all_token_ids)
    check_tensors(torch.int64, 2, last_sampled_tokens=last_sampled_tokens)
    check_tensors(torch.int64, 2, num_reqs, sampled_tokens=sampled_tokens)
    if output_bin_counts is not None:
        check_tensors(torch.int32, 2, output_bin_counts=output_bin_counts)
    form = resolve_form(form, idx_mapping)
    args = (
        idx_mapping,
        num_computed_tokens,
        last_sampled_tokens,
        total_len,
        all_token_ids,
        sampled_tokens,
        num_sampled,
        num_rejected,
        query_start_loc,
        output_bin_counts,
    )
    if form == "torch":
        _torch(*args)
    elif form == "loop":
        _loop(*args)
    else:
        launch(
            _post_update_kernel,
            (num_reqs,),
            *args,
            last_sampled_tokens.stride(0),
            all_token_ids.stride(0),
            sampled_tokens.stride(0),
            0 if output_bin_counts is None else output_bin_counts.stride(0),
            all_token_ids.shape[1],
            form=form,
            num_warps=1,
            BLOCK=1 << sampled_tokens.shape[1].bit_length(),
        )


def _loop(
    idx_mapping: torch.Tensor,
    num_computed_tokens: torch.Tensor,
    last_sampled_tokens: torch.Tensor,
    total_len: torch.Tensor,
    all_token_ids: torch.Tensor,
    sampled_tokens: torch.Tensor,
    num_sampled: torch.Tensor,
    num_rejected: torch.Tensor,
    query_start_loc: torch.Tensor,
    output_bin_counts: torch.Tensor | None,
) -> None:
    for i in range(idx_mapping.shape[0]):
        row = int(idx_mapping[i])
        if row == -1:
            continue
        length, count = int(total_len[row]), int(num_sampled[i])
        for k in range(count):
            token = int(sampled_tokens[i, k])
            last_sampled_tokens[row, 0] = token
            if length + k < all_token_ids.shape[1]:
                all_token_ids[row, length + k] = token
            if output_bin_counts is not None:
                output_bin_counts[row, token] += 1
        total_len[row] = length + count
        scheduled = int(query_start_loc[i + 1]) - int(query_start_loc[i])
        num_computed_tokens[row] += scheduled - int(num_rejected[i])


def _torch(
    idx_mapping: torch.Tensor,
    num_computed_tokens: torch.Tensor,
    last_sampled_tokens: torch.Tensor,
    total_len: torch.Tensor,
    all_token_ids: torch.Tensor,
    sampled_tokens: torch.Tensor,
    num_sampled: torch.Tensor,
    num_rejected: torch.Tensor,
    query_start_loc: torch.Tensor,
    output_bin_counts: torch.Tensor | None,
) -> None:
    # Requests to skip share a row with others once clamped, so every write is a sum: theirs adds zero.
    num_reqs, width = idx_mapping.shape[0], sampled_tokens.shape[1]
    active = idx_mapping >= 0
    rows = idx_mapping.clamp(min=0).long()
    count = num_sampled[:num_reqs] * active
    scheduled = query_start_loc[1 : num_reqs + 1] - query_start_loc[:num_reqs]

    last = sampled_tokens[:num_reqs].gather(1, (count.long() - 1).clamp_(min=0).unsqueeze(1))
    change = torch.where((count > 0).unsqueeze(1), last - last_sampled_tokens[rows, :1], 0)
    last_sampled_tokens[:, 0].index_add_(0, rows, change[:, 0])

    k = torch.arange(width, device=idx_mapping.device)
    used = k < count.unsqueeze(1)
    column = total_len[rows].unsqueeze(1) + k
    fits = used & (column < all_token_ids.shape[1])
    cells = (rows.unsqueeze(1).expand_as(column), column.clamp_(max=all_token_ids.shape[1] - 1))
    tokens = sampled_tokens[:num_reqs]
    change = torch.where(fits, tokens.to(torch.int32) - all_token_ids[cells], 0)
    all_token_ids.index_put_(cells, change, accumulate=True)
    if output_bin_counts is not None:
        token = torch.where(used, tokens, 0)
        output_bin_counts.index_put_((cells[0], token), used.to(torch.int32), accumulate=True)

    total_len.index_add_(0, rows, count)
    num_computed_tokens.index_add_(0, rows, (scheduled - num_rejected[:num_reqs]) * active)


@triton.jit(do_not_specialize=["num_reqs"])
def _get_num_sampled_and_rejected_kernel(
    num_sampled_ptr,
    num_rejected_ptr,
    seq_lens_ptr,
    cu_num_logits_ptr,
    idx_mapping_ptr,
    prefill_len_ptr,
    num_reqs,
    BLOCK: tl.constexpr,
):
    req = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = req < num_reqs
    row = tl.load(idx_mapping_ptr + req, mask=mask, other=0)
    decided = tl.load(seq_lens_ptr + req, mask=mask, other=0) >= tl.load(prefill_len_ptr + row, mask=mask, other=0)
    num_sampled = tl.where(decided, tl.load(num_sampled_ptr + req, mask=mask, other=0), 0)
    num_logits = tl.load(cu_num_logits_ptr + req + 1, mask=mask, other=0) - tl.load(
        cu_num_logits_ptr + req, mask=mask, other=0
    )
    tl.store(num_sampled_ptr + req, num_sampled, mask=mask)
    tl.store(num_rejected_ptr + req, tl.where(decided, num_logits - num_sampled, 0), mask=mask)


@triton.jit
def _post_update_kernel(
    idx_mapping_ptr,
    num_computed_tokens_ptr,
    last_sampled_tokens_ptr,
    total_len_ptr,
    all_token_ids_ptr,
    sampled_tokens_ptr,
    num_sampled_ptr,
    num_rejected_ptr,
    query_start_loc_ptr,
    output_bin_counts_ptr,
    last_sampled_tokens_stride,
    all_token_ids_stride,
    sampled_tokens_stride,
    output_bin_counts_stride,
    max_model_len,
    BLOCK: tl.constexpr,
):
    req = tl.program_id(0).to(tl.int64)
    row = tl.load(idx_mapping_ptr + req).to(tl.int64)
    if row == -1:
        return
    count = tl.load(num_sampled_ptr + req)
    k = tl.arange(0, BLOCK)
    token = tl.load(sampled_tokens_ptr + req * sampled_tokens_stride + k, mask=k < count, other=0)
    scheduled = tl.load(query_start_loc_ptr + req + 1) - tl.load(query_start_loc_ptr + req)
    append_tokens(
        row, k, token, count, scheduled - tl.load(num_rejected_ptr + req), num_computed_tokens_ptr,
        last_sampled_tokens_ptr, total_len_ptr, all_token_ids_ptr, output_bin_counts_ptr, last_sampled_tokens_stride,
        all_token_ids_stride, output_bin_counts_stride, max_model_len,
    )  # fmt: skip


@triton.jit
def append_tokens(
    row, k, token, count, num_computed, num_computed_tokens_ptr, last_sampled_tokens_ptr, total_len_ptr,
    all_token_ids_ptr, output_bin_counts_ptr, last_sampled_tokens_stride, all_token_ids_stride,
    output_bin_counts_stride, max_model_len,
):  # fmt: skip
    """The first `count` of token i64 [BLOCK] to the row's own, and `num_computed` tokens more that are computed."""
    length = tl.load(total_len_ptr + row)
    used = k < count
    tl.store(last_sampled_tokens_ptr + row * last_sampled_tokens_stride + k * 0, token, mask=k == count - 1)
    tl.store(
        all_token_ids_ptr + row * all_token_ids_stride + length + k,
        token.to(tl.int32),
        mask=used & (length + k < max_model_len),
    )
    if output_bin_counts_ptr is not None:
        # One request may sample a token twice in a step.
        tl.atomic_add(output_bin_counts_ptr + row * output_bin_counts_stride + token, 1, mask=used)
    tl.store(total_len_ptr + row, length + count)
    tl.store(num_computed_tokens_ptr + row, tl.load(num_computed_tokens_ptr + row) + num_computed)
