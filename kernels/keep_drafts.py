"""The end of a round of drafts that no kernel of their own ends: what can't be is taken out, the rest is kept."""

import torch

from kernels.dispatch import check_tensors, resolve_form
from kernels.mask_drafts import NO_DRAFT
from kernels.triton_support import launch, tl, triton


def keep_drafts(
    # [r, N] i64, changed in place
    tokens: torch.Tensor,
    # [r] i32, distinct rows but for the padding's
    idx_mapping: torch.Tensor,
    # [r] i32, 0 while a request is still in its prompt
    num_sampled: torch.Tensor,
    # [r] i64: where the first draft stands; None: none is too far
    positions: torch.Tensor | None,
    max_model_len: int,
    # [R, N] i64, by state row, changed in place; None: nobody keeps them
    kept: torch.Tensor | None = None,
    *,
    form: str = "auto",
) -> None:
    """Put NO_DRAFT behind a prompt that goes on and at `max_model_len` or past it, and the drafts into their rows.

    Raises:
        ValueError: a wrong dtype, rank, length or form.
    """
    num_reqs, num_drafts = tokens.shape
    check_tensors(torch.int64, 2, tokens=tokens)
    check_tensors(torch.int32, 1, num_reqs, idx_mapping=idx_mapping, num_sampled=num_sampled)
    if positions is not None:
        check_tensors(torch.int64, 1, num_reqs, positions=positions)
    if kept is not None:
        check_tensors(torch.int64, 2, kept=kept)
    if not tokens.is_contiguous() or (kept is not None and kept.shape[1] != num_drafts):
        raise ValueError(f"tokens must be contiguous, and kept [R, {num_drafts}]")
    form = resolve_form(form, tokens)
    if form == "torch":
        tokens.masked_fill_((num_sampled[:num_reqs] == 0).unsqueeze(1), NO_DRAFT)
        if positions is not None:
            places = positions[:num_reqs].unsqueeze(1) + torch.arange(num_drafts, device=tokens.device)
            tokens.masked_fill_(places >= max_model_len, NO_DRAFT)
        if kept is not None:
            kept.index_copy_(0, idx_mapping[:num_reqs].long(), tokens)
    elif form == "loop":
        for i in range(num_reqs):
            room = num_drafts if positions is None else max(max_model_len - int(positions[i]), 0)
            tokens[i, room if int(num_sampled[i]) > 0 else 0 :] = NO_DRAFT
            if kept is not None:
                kept[int(idx_mapping[i])] = tokens[i]
    else:
        launch(
            _keep_drafts_kernel,
            (num_reqs,),
            tokens,
            idx_mapping,
            num_sampled,
            positions,
            max_model_len,
            kept,
            0 if kept is None else kept.stride(0),
            form=form,
            num_warps=1,
            NUM_DRAFTS=num_drafts,
            NONE=NO_DRAFT,
            BLOCK=1 << (num_drafts - 1).bit_length(),
        )


@triton.jit(do_not_specialize=["max_model_len", "kept_stride"])
def _keep_drafts_kernel(
    tokens_ptr,
    idx_mapping_ptr,
    num_sampled_ptr,
    positions_ptr,
    max_model_len,
    kept_ptr,
    kept_stride,
    NUM_DRAFTS: tl.constexpr,
    NONE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    req = tl.program_id(0)
    n = tl.arange(0, BLOCK)
    room = NUM_DRAFTS if positions_ptr is None else max_model_len - tl.load(positions_ptr + req)
    room = tl.where(tl.load(num_sampled_ptr + req) > 0, room, 0)
    token = tl.load(tokens_ptr + req * NUM_DRAFTS + n, mask=n < NUM_DRAFTS, other=NONE)
    token = tl.where(n < room, token, NONE)
    tl.store(tokens_ptr + req * NUM_DRAFTS + n, token, mask=n < NUM_DRAFTS)
    if kept_ptr is not None:
        row = tl.load(idx_mapping_ptr + req).to(tl.int64)
        tl.store(kept_ptr + row * kept_stride + n, token, mask=n < NUM_DRAFTS)
