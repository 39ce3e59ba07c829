"""Kernel 30: the input of a head that reads the target's hidden states, from what the step before it left.

Such a head has, behind token i, the target's hidden state of i and needs token i + 1. So its tokens are the step's,
shifted left by one; behind the last one that was not rejected stands the token that was just sampled, or, inside a
prompt, the prompt's next.
"""

from typing import NamedTuple

import torch

from kernels.dispatch import check_tensors, resolve_form, segment_of
from kernels.slot_mappings import PAD_SLOT_ID, pad_slots
from kernels.triton_support import launch, tl, triton


class ShiftedInputs(NamedTuple):
    """The head's input, flat as the step's own."""

    # [num_tokens_padded] i32; 0 behind a request's last valid token
    token_ids: torch.Tensor
    # [num_tokens_padded] i64; PAD_SLOT_ID for rejected tokens and for padding
    slot_mapping: torch.Tensor
    # [r] i64, index of each request's last valid token
    last_indices: torch.Tensor
    # [r] i64, where the token stands that the head says behind that one
    draft_positions: torch.Tensor


def shift_inputs(
    # [r] i32, -1 for padding
    idx_mapping: torch.Tensor,
    # [>= r + 1] i32
    query_start_loc: torch.Tensor,
    # [>= num_tokens_padded] i32, -1 for a draft that is none
    input_ids: torch.Tensor,
    # [>= num_tokens_padded] i64
    slot_mapping: torch.Tensor,
    # [>= num_tokens_padded] i64
    positions: torch.Tensor,
    # [R, 1] i64, this step's token already in it
    last_sampled_tokens: torch.Tensor,
    # [R] i32
    next_prefill_tokens: torch.Tensor,
    # [r] i32, 0 while a request is still in its prompt
    num_sampled: torch.Tensor,
    # [r] i32
    num_rejected: torch.Tensor,
    num_tokens_padded: int,
    *,
    form: str = "auto",
) -> ShiftedInputs:
    """Shift the step's tokens by one.

    A request without tokens in the step has no last one: its index and position are some token's.

    Raises:
        ValueError: a wrong dtype, rank, length or form.
    """
    num_reqs = idx_mapping.shape[0]
    check_tensors(torch.int32, 1, idx_mapping=idx_mapping, next_prefill_tokens=next_prefill_tokens)
    check_tensors(torch.int32, 1, num_reqs + 1, query_start_loc=query_start_loc)
    check_tensors(torch.int32, 1, num_tokens_padded, input_ids=input_ids)
    check_tensors(torch.int64, 1, num_tokens_padded, slot_mapping=slot_mapping, positions=positions)
    check_tensors(torch.int64, 2, last_sampled_tokens=last_sampled_tokens)
    check_tensors(torch.int32, 1, num_reqs, num_sampled=num_sampled, num_rejected=num_rejected)
    form = resolve_form(form, idx_mapping)
    tokens = (input_ids, slot_mapping, positions)
    rows = (last_sampled_tokens, next_prefill_tokens)
    args = (idx_mapping, query_start_loc, *tokens, *rows, num_sampled, num_rejected)
    if form == "torch" and num_reqs > 0:
        return _torch(*args, num_tokens_padded)
    device = idx_mapping.device
    out = ShiftedInputs(
        torch.empty(num_tokens_padded, dtype=torch.int32, device=device),
        torch.empty(num_tokens_padded, dtype=torch.int64, device=device),
        torch.empty(num_reqs, dtype=torch.int64, device=device),
        torch.empty(num_reqs, dtype=torch.int64, device=device),
    )
    if form in ("loop", "torch"):
        out.token_ids.zero_()
        out.slot_mapping.fill_(PAD_SLOT_ID)
    if form == "loop":
        _loop(*args, out)
    elif form != "torch":
        launch(
            _shift_inputs_kernel,
            (num_reqs + 1,),
            *args,
            *out,
            last_sampled_tokens.stride(0),
            num_reqs,
            num_tokens_padded,
            form=form,
            num_warps=1,
            PAD=PAD_SLOT_ID,
            BLOCK=128,
        )
    return out


def _loop(
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    input_ids: torch.Tensor,
    slot_mapping: torch.Tensor,
    positions: torch.Tensor,
    last_sampled_tokens: torch.Tensor,
    next_prefill_tokens: torch.Tensor,
    num_sampled: torch.Tensor,
    num_rejected: torch.Tensor,
    out: ShiftedInputs,
) -> None:
    for i in range(idx_mapping.shape[0]):
        row = max(int(idx_mapping[i]), 0)
        begin, last = int(query_start_loc[i]), int(query_start_loc[i + 1]) - 1 - int(num_rejected[i])
        out.last_indices[i] = max(last, 0)
        out.draft_positions[i] = positions[max(last, 0)] + 2
        for place in range(begin, last + 1):
            out.slot_mapping[place] = slot_mapping[place]
            if place < last:
                out.token_ids[place] = input_ids[place + 1]
            elif int(num_sampled[i]) > 0:
                out.token_ids[place] = last_sampled_tokens[row, 0]
            else:
                out.token_ids[place] = next_prefill_tokens[row]


def _torch(
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    input_ids: torch.Tensor,
    slot_mapping: torch.Tensor,
    positions: torch.Tensor,
    last_sampled_tokens: torch.Tensor,
    next_prefill_tokens: torch.Tensor,
    num_sampled: torch.Tensor,
    num_rejected: torch.Tensor,
    num_tokens: int,
) -> ShiftedInputs:
    num_reqs, rows = idx_mapping.shape[0], idx_mapping.clamp(min=0).long()
    request, _, inside = segment_of(query_start_loc, num_reqs, num_tokens)
    last = query_start_loc[1 : num_reqs + 1] - 1 - num_rejected[:num_reqs]
    new = torch.where(num_sampled[:num_reqs] > 0, last_sampled_tokens[rows, 0].int(), next_prefill_tokens[rows])
    place = torch.arange(num_tokens, dtype=torch.int32, device=idx_mapping.device)
    is_valid, is_last = inside & (place <= last[request]), place == last[request]
    following = torch.where(is_last, new[request], input_ids[:num_tokens].roll(-1))
    last_indices = last.clamp(min=0).long()
    return ShiftedInputs(
        torch.where(is_valid, following, 0),
        torch.where(is_valid, slot_mapping[:num_tokens], PAD_SLOT_ID),
        last_indices,
        positions[last_indices] + 2,
    )


@triton.jit(do_not_specialize=["num_reqs", "num_tokens_padded"])
def _shift_inputs_kernel(
    idx_mapping_ptr, query_start_loc_ptr, input_ids_ptr, slot_mapping_ptr, positions_ptr, last_sampled_tokens_ptr,
    next_prefill_tokens_ptr, num_sampled_ptr, num_rejected_ptr, token_ids_ptr, slots_ptr, last_indices_ptr,
    draft_positions_ptr, last_sampled_tokens_stride, num_reqs, num_tokens_padded,
    PAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    req = tl.program_id(0)
    begin = tl.load(query_start_loc_ptr + req)
    if req == num_reqs:
        pad_slots(slots_ptr, begin, num_tokens_padded, PAD, BLOCK)
        for first in range(begin, num_tokens_padded, BLOCK):
            place = first + tl.arange(0, BLOCK)
            tl.store(token_ids_ptr + place, tl.zeros([BLOCK], tl.int32), mask=place < num_tokens_padded)
        return
    row = tl.maximum(tl.load(idx_mapping_ptr + req), 0).to(tl.int64)
    end = tl.load(query_start_loc_ptr + req + 1)
    last = end - 1 - tl.load(num_rejected_ptr + req)
    tl.store(last_indices_ptr + req, tl.maximum(last, 0).to(tl.int64))
    tl.store(draft_positions_ptr + req, tl.load(positions_ptr + tl.maximum(last, 0)) + 2)
    sampled = tl.load(last_sampled_tokens_ptr + row * last_sampled_tokens_stride).to(tl.int32)
    new = tl.where(tl.load(num_sampled_ptr + req) > 0, sampled, tl.load(next_prefill_tokens_ptr + row))
    for first in range(begin, end, BLOCK):
        place = first + tl.arange(0, BLOCK)
        token = tl.load(input_ids_ptr + place + 1, mask=place < last, other=0)
        tl.store(token_ids_ptr + place, tl.where(place == last, new, token), mask=place < end)
        slot = tl.load(slot_mapping_ptr + place, mask=place <= last, other=PAD)
        tl.store(slots_ptr + place, slot, mask=place < end)
