"""Kernel 14: which tokens a new request's prompt has, and how often each one occurs in what it generated before."""

import torch

from kernels.dispatch import check_tensors, resolve_form
from kernels.triton_support import launch, tl, triton


def bincount(
    # [n] i32, state rows of new requests, distinct
    idx_mapping: torch.Tensor,
    # [R, L] i32
    all_token_ids: torch.Tensor,
    # [R] i32
    prompt_len: torch.Tensor,
    # [R] i32, >= prompt_len: what follows the prompt was generated before a preemption
    prefill_len: torch.Tensor,
    # [R, ceil(V / 32)] i32, the rows are written anew
    prompt_bin_mask: torch.Tensor,
    # [R, V] i32, the rows are written anew
    output_bin_counts: torch.Tensor,
    max_prefill_len: int,
    *,
    form: str = "auto",
) -> None:
    """Set bit t % 32 of word t // 32 for each token t of the prompt, and count the tokens behind the prompt.

    Args:
        max_prefill_len: the largest of these rows' prefill_len, which the host knows.

    Raises:
        ValueError: a wrong dtype, rank or form.
    """
    check_tensors(torch.int32, 1, idx_mapping=idx_mapping, prompt_len=prompt_len, prefill_len=prefill_len)
    check_tensors(torch.int32, 2, all_token_ids=all_token_ids)
    check_tensors(torch.int32, 2, prompt_bin_mask=prompt_bin_mask, output_bin_counts=output_bin_counts)
    form = resolve_form(form, idx_mapping)
    args = (idx_mapping, all_token_ids, prompt_len, prefill_len, prompt_bin_mask, output_bin_counts)
    if form == "loop":
        _loop(*args)
        return
    # index_fill_ and not x[rows] = 0, which makes the host wait.
    prompt_bin_mask.index_fill_(0, idx_mapping.long(), 0)
    output_bin_counts.index_fill_(0, idx_mapping.long(), 0)
    if form == "torch":
        _torch(*args, max_prefill_len)
    else:
        block = 1024
        launch(
            _bincount_kernel,
            (idx_mapping.shape[0], -(-max_prefill_len // block)),
            *args,
            all_token_ids.stride(0),
            prompt_bin_mask.stride(0),
            output_bin_counts.stride(0),
            form=form,
            BLOCK=block,
        )


def _loop(
    idx_mapping: torch.Tensor,
    all_token_ids: torch.Tensor,
    prompt_len: torch.Tensor,
    prefill_len: torch.Tensor,
    prompt_bin_mask: torch.Tensor,
    output_bin_counts: torch.Tensor,
) -> None:
    for row in idx_mapping.tolist():
        words = [0] * prompt_bin_mask.shape[1]
        for token in all_token_ids[row, : int(prompt_len[row])].tolist():
            words[token // 32] |= 1 << token % 32
        prompt_bin_mask[row] = torch.tensor(words).to(torch.int32)
        output_bin_counts[row] = 0
        for token in all_token_ids[row, int(prompt_len[row]) : int(prefill_len[row])].tolist():
            output_bin_counts[row, token] += 1


def _torch(
    idx_mapping: torch.Tensor,
    all_token_ids: torch.Tensor,
    prompt_len: torch.Tensor,
    prefill_len: torch.Tensor,
    prompt_bin_mask: torch.Tensor,
    output_bin_counts: torch.Tensor,
    max_prefill_len: int,
) -> None:
    rows = idx_mapping.long()
    tokens = all_token_ids[rows, :max_prefill_len].long()
    column = torch.arange(max_prefill_len, device=tokens.device)
    in_prompt = column < prompt_len[rows].unsqueeze(1)
    generated = ~in_prompt & (column < prefill_len[rows].unsqueeze(1))

    num_rows, num_words = rows.shape[0], prompt_bin_mask.shape[1]
    # Columns past the row's tokens hold anything: they set a bit that belongs to no token.
    present = torch.zeros(num_rows, num_words * 32 + 1, dtype=torch.int32, device=tokens.device)
    present.scatter_(1, torch.where(in_prompt, tokens, num_words * 32), 1)
    bit = torch.arange(32, dtype=torch.int32, device=tokens.device)
    words = (present[:, :-1].view(num_rows, num_words, 32) << bit).sum(-1, dtype=torch.int32)
    prompt_bin_mask.index_copy_(0, rows, words)
    counted = (rows.unsqueeze(1).expand_as(tokens), torch.where(generated, tokens, 0))
    output_bin_counts.index_put_(counted, generated.to(torch.int32), accumulate=True)


@triton.jit
def _bincount_kernel(
    idx_mapping_ptr, all_token_ids_ptr, prompt_len_ptr, prefill_len_ptr, prompt_bin_mask_ptr, output_bin_counts_ptr,
    all_token_ids_stride, prompt_bin_mask_stride, output_bin_counts_stride,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.load(idx_mapping_ptr + tl.program_id(0)).to(tl.int64)
    prompt_len, prefill_len = tl.load(prompt_len_ptr + row), tl.load(prefill_len_ptr + row)
    first = tl.program_id(1) * BLOCK
    if first >= prefill_len:
        return
    column = first + tl.arange(0, BLOCK)
    token = tl.load(all_token_ids_ptr + row * all_token_ids_stride + column, mask=column < prefill_len, other=0)
    one = tl.full([BLOCK], 1, tl.int32)
    word_ptr = prompt_bin_mask_ptr + row * prompt_bin_mask_stride + token // 32
    tl.atomic_or(word_ptr, one << (token % 32), mask=column < prompt_len)
    count_ptr = output_bin_counts_ptr + row * output_bin_counts_stride + token
    tl.atomic_add(count_ptr, one, mask=(column >= prompt_len) & (column < prefill_len))
