"""The end of a parallel drafter's round: what stands where no draft can be, and the confidences of the rest."""

from typing import NamedTuple

import torch

from kernels.dispatch import check_tensors, resolve_form
from kernels.triton_support import begin_behind, can_launch_early, launch, tl, triton

NO_DRAFT = -1


class Confidences(NamedTuple):
    """What the confidence head said, and where it is kept."""

    # [r, N] f32, before the sigmoid
    logits: torch.Tensor
    # [N] f32, the calibration's temperatures; None: as they are
    divisors: torch.Tensor | None
    # [R, N] f32, by state row, changed in place
    kept: torch.Tensor


def mask_drafts(
    # [r, N] i64, changed in place
    tokens: torch.Tensor,
    # [r] i32
    idx_mapping: torch.Tensor,
    # [r * Q] i64, Q >= N: of a block's queries (see DraftInputs)
    slot_mapping: torch.Tensor,
    # [r * Q] i64
    positions: torch.Tensor,
    max_model_len: int,
    confidences: Confidences | None = None,
    # [R, N] i64, by state row, changed in place: where the drafts go too; None: nowhere else
    kept_tokens: torch.Tensor | None = None,
    *,
    form: str = "auto",
) -> None:
    """Put NO_DRAFT where a query has no slot or its draft would stand at `max_model_len` or past it.

    Without a slot a query saw a block that ends before it; a draft stands one position behind its query. Confidences
    are kept as sigmoid(logits / divisors), 0 where there is no draft.

    Raises:
        ValueError: a wrong dtype, rank, length or form.
    """
    num_reqs, num_drafts = tokens.shape
    check_tensors(torch.int64, 2, tokens=tokens)
    check_tensors(torch.int32, 1, num_reqs, idx_mapping=idx_mapping)
    check_tensors(torch.int64, 1, num_reqs * num_drafts, slot_mapping=slot_mapping, positions=positions)
    if confidences is not None:
        check_tensors(torch.float32, 2, num_reqs, confidence_logits=confidences.logits)
        check_tensors(torch.float32, 2, kept=confidences.kept)
        if confidences.divisors is not None:
            check_tensors(torch.float32, 1, num_drafts, divisors=confidences.divisors)
        if not confidences.logits.is_contiguous() or confidences.kept.shape[1] != num_drafts:
            raise ValueError(f"confidences must be contiguous [r, {num_drafts}] and kept as [R, {num_drafts}]")
    if kept_tokens is not None:
        check_tensors(torch.int64, 2, kept_tokens=kept_tokens)
        if kept_tokens.shape[1] != num_drafts:
            raise ValueError(f"kept_tokens must be [R, {num_drafts}], got {tuple(kept_tokens.shape)}")
    if not tokens.is_contiguous() or (num_reqs and slot_mapping.shape[0] % num_reqs):
        raise ValueError(f"tokens must be contiguous, and the block's queries Q for each of the {num_reqs} requests")
    form = resolve_form(form, tokens)
    if form == "torch":
        _torch(tokens, idx_mapping, slot_mapping, positions, max_model_len, confidences, kept_tokens)
    elif form == "loop":
        _loop(tokens, idx_mapping, slot_mapping, positions, max_model_len, confidences, kept_tokens)
    elif num_reqs:
        launch(
            _mask_drafts_kernel,
            (num_reqs,),
            tokens,
            idx_mapping,
            slot_mapping,
            positions,
            slot_mapping.shape[0] // num_reqs,
            max_model_len,
            *(confidences or (None, None, None)),
            confidences.kept.stride(0) if confidences else 0,
            kept_tokens,
            0 if kept_tokens is None else kept_tokens.stride(0),
            form=form,
            pdl=can_launch_early(form, tokens),
            num_warps=1,
            NUM_DRAFTS=num_drafts,
            NONE=NO_DRAFT,
            BLOCK=1 << (num_drafts - 1).bit_length(),
        )


def _loop(
    tokens: torch.Tensor, idx_mapping: torch.Tensor, slot_mapping: torch.Tensor, positions: torch.Tensor,
    max_model_len: int, confidences: Confidences | None, kept_tokens: torch.Tensor | None,
) -> None:  # fmt: skip
    num_reqs, num_drafts = tokens.shape
    for i in range(num_reqs):
        for n in range(num_drafts):
            query = i * (slot_mapping.shape[0] // num_reqs) + n
            absent = int(slot_mapping[query]) < 0 or int(positions[query]) + 1 >= max_model_len
            if absent:
                tokens[i, n] = NO_DRAFT
            if confidences is not None:
                divisor = 1.0 if confidences.divisors is None else float(confidences.divisors[n])
                chance = 0.0 if absent else torch.sigmoid(confidences.logits[i, n] / divisor)
                confidences.kept[int(idx_mapping[i]), n] = chance
        if kept_tokens is not None:
            kept_tokens[int(idx_mapping[i])] = tokens[i]


def _torch(
    tokens: torch.Tensor, idx_mapping: torch.Tensor, slot_mapping: torch.Tensor, positions: torch.Tensor,
    max_model_len: int, confidences: Confidences | None, kept_tokens: torch.Tensor | None,
) -> None:  # fmt: skip
    num_reqs, num_drafts = tokens.shape
    if not num_reqs:
        return
    slots, places = (x.view(num_reqs, -1)[:, :num_drafts] for x in (slot_mapping, positions))
    absent = (slots < 0) | (places + 1 >= max_model_len)
    tokens.masked_fill_(absent, NO_DRAFT)
    if confidences is not None:
        logits = confidences.logits if confidences.divisors is None else confidences.logits / confidences.divisors
        chances = torch.sigmoid(logits).masked_fill_(absent, 0.0)
        confidences.kept.index_copy_(0, idx_mapping[:num_reqs].long(), chances)
    if kept_tokens is not None:
        kept_tokens.index_copy_(0, idx_mapping[:num_reqs].long(), tokens)


@triton.jit(do_not_specialize=["num_queries", "max_model_len", "kept_stride", "kept_tokens_stride"])
def _mask_drafts_kernel(
    tokens_ptr,
    idx_mapping_ptr,
    slot_mapping_ptr,
    positions_ptr,
    num_queries,
    max_model_len,
    logits_ptr,
    divisors_ptr,
    kept_ptr,
    kept_stride,
    kept_tokens_ptr,
    kept_tokens_stride,
    PDL: tl.constexpr,
    NUM_DRAFTS: tl.constexpr,
    NONE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    begin_behind(PDL)
    req = tl.program_id(0)
    n = tl.arange(0, BLOCK)
    mask = n < NUM_DRAFTS
    slot = tl.load(slot_mapping_ptr + req * num_queries + n, mask=mask, other=-1)
    place = tl.load(positions_ptr + req * num_queries + n, mask=mask, other=0)
    absent = (slot < 0) | (place + 1 >= max_model_len)
    tl.store(tokens_ptr + req * NUM_DRAFTS + n, tl.full([BLOCK], NONE, tl.int64), mask=mask & absent)
    row = tl.load(idx_mapping_ptr + req).to(tl.int64)
    if kept_tokens_ptr is not None:
        token = tl.load(tokens_ptr + req * NUM_DRAFTS + n, mask=mask & (absent == 0), other=NONE)
        tl.store(kept_tokens_ptr + row * kept_tokens_stride + n, token, mask=mask)
    if logits_ptr is not None:
        z = tl.load(logits_ptr + req * NUM_DRAFTS + n, mask=mask, other=0.0)
        if divisors_ptr is not None:
            z /= tl.load(divisors_ptr + n, mask=mask, other=1.0)
        chance = tl.where(absent, 0.0, 1.0 / (1.0 + tl.exp(-z)))
        tl.store(kept_ptr + row * kept_stride + n, chance, mask=mask)
