"""Drafts from the request's own tokens: where its last tokens stood before, what followed them then.

The rule is vLLM's prompt lookup: of all earlier places the one that agrees with the end of the tokens over the longest
n-gram, min_ngram <= n <= max_ngram; of several the earliest; what followed there is the draft.
"""

import torch

from kernels.dispatch import check_tensors, resolve_form
from kernels.triton_support import launch, tl, triton

_BLOCK = 1024


def propose_ngram(
    # [r] i32, -1 for padding
    idx_mapping: torch.Tensor,
    # [R, L] i32
    all_token_ids: torch.Tensor,
    # [R] i32, how many tokens each request has
    total_len: torch.Tensor,
    *,
    num_drafts: int,
    min_ngram: int,
    max_ngram: int,
    max_total_len: int | None = None,
    form: str = "auto",
) -> torch.Tensor:
    """Look up each request's drafts. There are fewer than `num_drafts` where its tokens end, or L is reached.

    Args:
        max_total_len: columns behind it are not read; a request that has more tokens gets no drafts. What the host
            knows of those that are to have some (None: L).

    Returns:
        i64 [r, num_drafts]: drafts, then -1.

    Raises:
        ValueError: a wrong dtype, rank, length or form; sizes that are not 1 <= min_ngram <= max_ngram and
            num_drafts >= 1.
    """
    num_reqs = idx_mapping.shape[0]
    check_tensors(torch.int32, 1, idx_mapping=idx_mapping, total_len=total_len)
    check_tensors(torch.int32, 2, total_len.shape[0], all_token_ids=all_token_ids)
    if not 1 <= min_ngram <= max_ngram or num_drafts < 1:
        raise ValueError(
            f"min_ngram={min_ngram}, max_ngram={max_ngram}, num_drafts={num_drafts}: "
            "1 <= min_ngram <= max_ngram and num_drafts >= 1 are possible"
        )
    form = resolve_form(form, idx_mapping)
    width = all_token_ids.shape[1] if max_total_len is None else min(max_total_len, all_token_ids.shape[1])
    if form == "torch":
        return _torch(idx_mapping, all_token_ids, total_len, num_drafts, min_ngram, max_ngram, width)
    drafts = torch.full((num_reqs, num_drafts), -1, dtype=torch.int64, device=idx_mapping.device)
    if form == "loop":
        for i in range(num_reqs):
            row = int(idx_mapping[i])
            if row >= 0 and int(total_len[row]) <= width:
                tokens = all_token_ids[row, : int(total_len[row])].tolist()
                found = _lookup(tokens, min_ngram, max_ngram)[: min(num_drafts, all_token_ids.shape[1] - len(tokens))]
                drafts[i, : len(found)] = torch.tensor(found, dtype=torch.int64)
    else:
        launch(
            _propose_ngram_kernel,
            (num_reqs,),
            idx_mapping,
            all_token_ids,
            all_token_ids.stride(0),
            all_token_ids.shape[1],
            total_len,
            width,
            drafts,
            num_drafts,
            form=form,
            MIN_NGRAM=min_ngram,
            MAX_NGRAM=max_ngram,
            DRAFTS=1 << (num_drafts - 1).bit_length(),
            BLOCK=_BLOCK,
        )
    return drafts


def _lookup(tokens: list[int], min_ngram: int, max_ngram: int) -> list[int]:
    """All that followed the place found: the specification."""
    for n in range(max_ngram, min_ngram - 1, -1):
        for end in range(n, len(tokens)):
            if tokens[end - n : end] == tokens[len(tokens) - n :]:
                return tokens[end:]
    return []


def _torch(
    idx_mapping: torch.Tensor,
    all_token_ids: torch.Tensor,
    total_len: torch.Tensor,
    num_drafts: int,
    min_ngram: int,
    max_ngram: int,
    width: int,
) -> torch.Tensor:
    rows = idx_mapping.clamp(min=0).long()
    tokens, length = all_token_ids[rows, :width], total_len[rows].unsqueeze(1)
    # Column e: the place between token e - 1 and token e, which has followed it.
    end = torch.arange(width, device=tokens.device)
    matched = torch.zeros_like(tokens)
    agrees = (end >= 1) & (end < length)
    for n in range(1, max_ngram + 1):
        own = tokens.gather(1, (length - n).clamp(0, width - 1).long())
        agrees = agrees & (end >= n) & (tokens.roll(n, dims=1) == own)
        matched += agrees
    # The first of the longest: argmax would not say which of several it takes.
    best = matched.amax(dim=1, keepdim=True)
    start = torch.where(matched == best, end, width).amin(dim=1, keepdim=True)
    k = torch.arange(num_drafts, device=tokens.device)
    exists = (best >= min_ngram) & (start + k < length) & (length + k < all_token_ids.shape[1])
    exists &= (idx_mapping >= 0).unsqueeze(1) & (length <= width)
    return torch.where(exists, tokens.gather(1, (start + k).clamp(max=width - 1)).long(), -1)


@triton.jit
def _propose_ngram_kernel(
    idx_mapping_ptr, all_token_ids_ptr, all_token_ids_stride, max_model_len, total_len_ptr, width, drafts_ptr,
    num_drafts, MIN_NGRAM: tl.constexpr, MAX_NGRAM: tl.constexpr, DRAFTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    req = tl.program_id(0).to(tl.int64)
    row = tl.load(idx_mapping_ptr + req).to(tl.int64)
    if row < 0:
        return
    length = tl.load(total_len_ptr + row)
    if length > width:
        return
    row_ptr = all_token_ids_ptr + row * all_token_ids_stride
    # The longest match first, then the earliest place: one number to maximise in each lane.
    best = tl.full([BLOCK], 0, tl.int64)
    for first in range(0, length, BLOCK):
        end = first + tl.arange(0, BLOCK)
        agrees = (end >= 1) & (end < length)
        matched = tl.full([BLOCK], 0, tl.int32)
        for n in tl.static_range(1, MAX_NGRAM + 1):
            own = tl.load(row_ptr + tl.maximum(length - n, 0))
            agrees = agrees & (end >= n)
            token = tl.load(row_ptr + end - n, mask=agrees, other=0)
            agrees = agrees & (token == own)
            matched += agrees.to(tl.int32)
        best = tl.maximum(best, (matched.to(tl.int64) << 32) - end)
    found = tl.max(best, axis=0)
    matched = (found + 4294967295) >> 32
    start = (matched << 32) - found
    k = tl.arange(0, DRAFTS)
    wanted = tl.where(matched >= MIN_NGRAM, num_drafts, 0)
    exists = (k < wanted) & (start + k < length) & (length + k < max_model_len)
    draft = tl.load(row_ptr + start + k, mask=exists, other=0)
    tl.store(drafts_ptr + req * num_drafts + k, draft.to(tl.int64), mask=exists)
