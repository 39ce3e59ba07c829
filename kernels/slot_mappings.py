"""Kernel 7: the KV-cache slot of every token of a step."""

import torch

from kernels.dispatch import check_tensors, resolve_form, segment_of
from kernels.triton_support import launch, tl, triton

PAD_SLOT_ID = -1  # a token with this slot writes no KV


def compute_slot_mappings(
    # [r] i32
    idx_mapping: torch.Tensor,
    # [>= r + 1] i32
    query_start_loc: torch.Tensor,
    # [T] i64
    positions: torch.Tensor,
    # [R, B] i32
    block_table: torch.Tensor,
    block_size: int,
    # [T] i64, written in place
    slot_mapping: torch.Tensor,
    num_tokens_padded: int,
    *,
    form: str = "auto",
) -> None:
    """Write `block_table[row, pos // block_size] * block_size + pos % block_size` for every token of the step.

    The table is the persistent one, read through `idx_mapping`. Slots t .. num_tokens_padded - 1 become PAD_SLOT_ID,
    where t is `query_start_loc[r]` on the device: a stale slot would let graph padding overwrite someone's KV. Slots
    past `num_tokens_padded` keep their values.

    Raises:
        ValueError: a wrong dtype, rank, length or form.
    """
    num_reqs = idx_mapping.shape[0]
    check_tensors(torch.int32, 1, idx_mapping=idx_mapping)
    check_tensors(torch.int32, 1, num_reqs + 1, query_start_loc=query_start_loc)
    check_tensors(torch.int32, 2, block_table=block_table)
    check_tensors(torch.int64, 1, num_tokens_padded, positions=positions, slot_mapping=slot_mapping)
    form = resolve_form(form, slot_mapping)
    args = (idx_mapping, query_start_loc, positions, block_table, block_size, slot_mapping, num_tokens_padded)
    if form == "torch":
        _torch(*args)
    elif form == "loop":
        _loop(*args)
    else:
        launch(
            _compute_slot_mappings_kernel,
            (num_reqs + 1,),
            idx_mapping,
            query_start_loc,
            positions,
            block_table,
            block_table.stride(0),
            slot_mapping,
            num_reqs,
            num_tokens_padded,
            form=form,
            BLOCK_SIZE=block_size,
            PAD=PAD_SLOT_ID,
            BLOCK=1024,
        )


def _loop(
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    positions: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    slot_mapping: torch.Tensor,
    num_tokens_padded: int,
) -> None:
    num_reqs = idx_mapping.shape[0]
    for i in range(num_reqs):
        row = int(idx_mapping[i])
        for token in range(int(query_start_loc[i]), int(query_start_loc[i + 1])):
            block, offset = divmod(int(positions[token]), block_size)
            slot_mapping[token] = int(block_table[row, block]) * block_size + offset
    for token in range(int(query_start_loc[num_reqs]), num_tokens_padded):
        slot_mapping[token] = PAD_SLOT_ID


def _torch(
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    positions: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    slot_mapping: torch.Tensor,
    num_tokens_padded: int,
) -> None:
    num_reqs, out = idx_mapping.shape[0], slot_mapping[:num_tokens_padded]
    if num_reqs == 0:
        out.fill_(PAD_SLOT_ID)
        return
    req, _, inside = segment_of(query_start_loc, num_reqs, num_tokens_padded)
    position = positions[:num_tokens_padded]
    # Positions of padding are left over from earlier steps: clamp them, their slots are overwritten below.
    block = (position // block_size).clamp_(0, block_table.shape[1] - 1)
    slot = block_table[idx_mapping[req].long(), block].long() * block_size + position % block_size
    out.copy_(slot.masked_fill_(~inside, PAD_SLOT_ID))


@triton.jit(do_not_specialize=["num_reqs", "num_tokens_padded"])
def _compute_slot_mappings_kernel(
    idx_mapping_ptr,
    query_start_loc_ptr,
    positions_ptr,
    block_table_ptr,
    block_table_stride,
    slot_mapping_ptr,
    num_reqs,
    num_tokens_padded,
    BLOCK_SIZE: tl.constexpr,
    PAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    req = tl.program_id(0)
    begin = tl.load(query_start_loc_ptr + req)
    if req == num_reqs:
        pad_slots(slot_mapping_ptr, begin, num_tokens_padded, PAD, BLOCK)
        return
    end = tl.load(query_start_loc_ptr + req + 1)
    row = tl.load(idx_mapping_ptr + req).to(tl.int64)
    for done in range(begin, end, BLOCK):
        token = done + tl.arange(0, BLOCK)
        mask = token < end
        position = tl.load(positions_ptr + token, mask=mask, other=0)
        slot = slots_of(position, mask, block_table_ptr + row * block_table_stride, BLOCK_SIZE)
        tl.store(slot_mapping_ptr + token, slot, mask=mask)


@triton.jit
def slots_of(position, mask, blocks_ptr, BLOCK_SIZE: tl.constexpr):
    """Slots i64 of positions of a request with these blocks."""
    block = tl.load(blocks_ptr + position // BLOCK_SIZE, mask=mask, other=0)
    return block.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE


@triton.jit
def pad_slots(slot_mapping_ptr, begin, end, PAD: tl.constexpr, BLOCK: tl.constexpr):
    """PAD in the slots `begin` .. `end` - 1."""
    for done in range(begin, end, BLOCK):
        token = done + tl.arange(0, BLOCK)
        tl.store(slot_mapping_ptr + token, tl.full([BLOCK], PAD, tl.int64), mask=token < end)
