"""A step's rows of logits, given to the drafts that will most likely be accepted: its lengths, made on the device."""

import torch

from kernels.dispatch import check_tensors, resolve_form
from kernels.triton_support import launch, tl, triton


def allot_verification(
    # [R, N] f32 in 0 .. 1, by state row: the chance of each draft behind those before it
    confidences: torch.Tensor,
    # [r] i32
    idx_mapping: torch.Tensor,
    # [>= r + 1] i32: where the tokens would begin if every draft were verified
    query_start_loc: torch.Tensor,
    budget: int,
    # [>= r + 1] i32, entries 1 .. r written in place
    allotted_start_loc: torch.Tensor,
    # [>= r + 1] i32, entries 1 .. r written in place
    cu_num_logits: torch.Tensor,
    *,
    form: str = "auto",
) -> None:
    """Give each request one token and the drafts that are among the `budget` likeliest of all, if it has that many.

    A draft's likelihood is the product of its confidence and those before it; of several that are equal the lower
    request's comes first, then the lower position's. A request without tokens keeps one row of logits.

    Raises:
        ValueError: a wrong dtype, rank, length or form.
    """
    num_reqs, num_drafts = idx_mapping.shape[0], confidences.shape[1]
    check_tensors(torch.float32, 2, confidences=confidences)
    check_tensors(torch.int32, 1, idx_mapping=idx_mapping)
    check_tensors(torch.int32, 1, num_reqs + 1, query_start_loc=query_start_loc, cu_num_logits=cu_num_logits)
    check_tensors(torch.int32, 1, num_reqs + 1, allotted_start_loc=allotted_start_loc)
    form = resolve_form(form, confidences)
    if num_reqs == 0:
        return
    if form == "loop":
        _loop(confidences, idx_mapping, query_start_loc, budget, allotted_start_loc, cu_num_logits)
    elif form == "torch":
        budget_on_device = torch.full((), budget, dtype=torch.int32, device=idx_mapping.device)
        lengths = likeliest_lengths(confidences[idx_mapping.long()], budget_on_device)
        most = query_start_loc[1 : num_reqs + 1] - query_start_loc[:num_reqs]
        tokens = torch.minimum(lengths + 1, most)
        torch.cumsum(tokens, 0, dtype=torch.int32, out=allotted_start_loc[1 : num_reqs + 1])
        torch.cumsum(tokens.clamp(min=1), 0, dtype=torch.int32, out=cu_num_logits[1 : num_reqs + 1])
    else:
        block_r, block_n = (1 << (n - 1).bit_length() for n in (num_reqs, num_drafts))
        launch(
            _allot_verification_kernel,
            (1,),
            confidences,
            confidences.stride(0),
            idx_mapping,
            query_start_loc,
            budget,
            allotted_start_loc,
            cu_num_logits,
            num_reqs,
            form=form,
            num_warps=min(max(block_r * block_n // 256, 1), 8),
            NUM_DRAFTS=num_drafts,
            BLOCK_R=block_r,
            BLOCK_N=block_n,
        )


def likeliest_lengths(confidences: torch.Tensor, budget: torch.Tensor) -> torch.Tensor:
    """How many of each request's drafts are among the likeliest, i32 [r], of f32 [r, N] and i32 or i64 [] or [1]."""
    r, n = confidences.shape
    order = confidences.cumprod(1).flatten().sort(descending=True, stable=True).indices
    admitted = (torch.arange(r * n, device=order.device) < budget).to(torch.int32)
    # A prefix of each row, as likelihoods never rise along it.
    return torch.zeros_like(admitted).scatter_(0, order, admitted).view(r, n).sum(1, dtype=torch.int32)


def _loop(
    confidences: torch.Tensor, idx_mapping: torch.Tensor, query_start_loc: torch.Tensor, budget: int,
    allotted_start_loc: torch.Tensor, cu_num_logits: torch.Tensor,
) -> None:  # fmt: skip
    items = []
    for i, row in enumerate(idx_mapping.tolist()):
        likelihood = 1.0
        for j, confidence in enumerate(confidences[row].tolist()):
            likelihood *= confidence
            items.append((-likelihood, i, j))
    chosen = [i for _, i, _ in sorted(items)[:budget]]
    token, logits_row = 0, 0
    for i in range(idx_mapping.shape[0]):
        tokens = min(chosen.count(i) + 1, int(query_start_loc[i + 1]) - int(query_start_loc[i]))
        token, logits_row = token + tokens, logits_row + max(tokens, 1)
        allotted_start_loc[i + 1], cu_num_logits[i + 1] = token, logits_row


@triton.jit(do_not_specialize=["budget", "num_reqs"])
def _allot_verification_kernel(
    confidences_ptr,
    confidences_stride,
    idx_mapping_ptr,
    query_start_loc_ptr,
    budget,
    allotted_start_loc_ptr,
    cu_num_logits_ptr,
    num_reqs,
    NUM_DRAFTS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program: a batch has few drafts, and they are compared with all others by counting alone."""
    req = tl.arange(0, BLOCK_R)
    is_there = req < num_reqs
    n = tl.arange(0, BLOCK_N)[None, :]
    row = tl.load(idx_mapping_ptr + req, mask=is_there, other=0).to(tl.int64)
    likelihood = tl.full([BLOCK_R], 1.0, tl.float32)
    # Of what is not negative the order is that of its bits.
    key = tl.full([BLOCK_R, BLOCK_N], -1, tl.int32)
    for j in tl.static_range(NUM_DRAFTS):
        likelihood *= tl.load(confidences_ptr + row * confidences_stride + j, mask=is_there, other=0.0)
        bits = tl.where(is_there, likelihood.to(tl.int32, bitcast=True), -1)
        key = tl.where(n == j, bits[:, None], key)
    # The highest key that `budget` drafts reach; that of 1 is below 2^30.
    least = 0
    for i in range(30):
        higher = least + (1 << (29 - i))
        reached = tl.sum(tl.sum((key >= higher).to(tl.int32), axis=1), axis=0)
        least = tl.where(reached >= budget, higher, least)
    is_more = (key > least).to(tl.int32)
    is_equal = (key == least).to(tl.int32)
    left = budget - tl.sum(tl.sum(is_more, axis=1), axis=0)
    equals = tl.sum(is_equal, axis=1)
    rank = (tl.cumsum(equals, axis=0) - equals)[:, None] + tl.cumsum(is_equal, axis=1)
    lengths = tl.sum(is_more + tl.where(rank <= left, is_equal, 0), axis=1)
    end = tl.load(query_start_loc_ptr + 1 + req, mask=is_there, other=0)
    most = end - tl.load(query_start_loc_ptr + req, mask=is_there, other=0)
    tokens = tl.minimum(lengths + 1, most)
    tl.store(allotted_start_loc_ptr + 1 + req, tl.cumsum(tokens, axis=0), mask=is_there)
    tl.store(cu_num_logits_ptr + 1 + req, tl.cumsum(tl.maximum(tokens, 1), axis=0), mask=is_there)
