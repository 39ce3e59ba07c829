"""Kernel 31: the inputs of a smaller model that drafts, from what the step before it left.

Such a model runs over the tokens of the step and, one place more a request, the token that was just sampled; then over
its own drafts, a token a request. Its cache lies in the target's blocks. A place without a block of its request, or
past the longest length, writes nothing: what stands in the table there is another's.
"""

from typing import NamedTuple

import torch

from kernels.dispatch import check_tensors, resolve_form, segment_of
from kernels.slot_mappings import PAD_SLOT_ID
from kernels.triton_support import launch, tl, triton


class Blocks(NamedTuple):
    """The KV blocks of a step's r requests."""

    # [>= r, B] i32, as gathered for the step
    block_table: torch.Tensor
    # [R] i32, how many of them a request holds, by state row
    num_blocks: torch.Tensor
    block_size: int
    max_model_len: int

    @property
    def limit(self) -> int:
        """Positions that may be, and for which the table has columns."""
        return min(self.max_model_len, self.block_table.shape[1] * self.block_size)

    def slots(
        self, idx_mapping: torch.Tensor, request: torch.Tensor, positions: torch.Tensor, is_used: torch.Tensor
    ) -> torch.Tensor:
        """The slot of each place, i64 [n]; `request`, `positions` i64 [n], `is_used` bool [n]. No host wait."""
        block = (positions // self.block_size).clamp(max=self.block_table.shape[1] - 1)
        held = self.num_blocks[idx_mapping.clamp(min=0).long()][request]
        slot = self.block_table[request, block].long() * self.block_size + positions % self.block_size
        return torch.where(is_used & (positions < self.limit) & (block < held), slot, PAD_SLOT_ID)

    def slot(self, idx_mapping: torch.Tensor, request: int, position: int) -> int:
        """The slot of one place: the specification."""
        held = int(self.num_blocks[max(int(idx_mapping[request]), 0)])
        if position >= self.limit or position // self.block_size >= held:
            return PAD_SLOT_ID
        block = int(self.block_table[request, position // self.block_size])
        return block * self.block_size + position % self.block_size


class ExtendedInputs(NamedTuple):
    """t + r tokens: of each request the step's, then the new one. Places behind that, or behind the last token that was
    not rejected of a request inside its prompt, write nothing, and nothing reads them."""

    # [t + r] i32, i64, i64
    token_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    # [r] i64: the last place that counts, among the t + r; and where its token stands
    last_indices: torch.Tensor
    last_positions: torch.Tensor


def extend_inputs(
    # [r] i32, -1 for padding
    idx_mapping: torch.Tensor,
    # [>= r + 1] i32
    query_start_loc: torch.Tensor,
    # [>= t] i32, -1 for a draft that is none
    input_ids: torch.Tensor,
    # [>= t] i64
    positions: torch.Tensor,
    # [R, 1] i64, this step's token already in it
    last_sampled_tokens: torch.Tensor,
    # [r] i32, 0 while a request is still in its prompt
    num_sampled: torch.Tensor,
    # [r] i32
    num_rejected: torch.Tensor,
    blocks: Blocks,
    num_tokens: int,
    *,
    form: str = "auto",
) -> ExtendedInputs:
    """The step's tokens with one place more a request: request i has the places
    query_start_loc[i] + i : query_start_loc[i + 1] + i + 1, and at least one token in the step.

    Args:
        num_tokens: t, `query_start_loc[r]`, which the host knows.

    Raises:
        ValueError: a wrong dtype, rank, length or form.
    """
    num_reqs = idx_mapping.shape[0]
    check_tensors(torch.int32, 1, idx_mapping=idx_mapping)
    check_tensors(torch.int32, 1, num_reqs + 1, query_start_loc=query_start_loc)
    check_tensors(torch.int32, 1, num_tokens, input_ids=input_ids)
    check_tensors(torch.int64, 1, num_tokens, positions=positions)
    check_tensors(torch.int64, 2, last_sampled_tokens=last_sampled_tokens)
    check_tensors(torch.int32, 1, num_reqs, num_sampled=num_sampled, num_rejected=num_rejected)
    check_tensors(torch.int32, 2, num_reqs, block_table=blocks.block_table)
    form = resolve_form(form, idx_mapping)
    args = (idx_mapping, query_start_loc, input_ids, positions, last_sampled_tokens, num_sampled, num_rejected)
    if form == "torch" and num_reqs > 0:
        return _torch(*args, blocks, num_tokens)
    device, size = idx_mapping.device, num_tokens + num_reqs
    out = ExtendedInputs(
        torch.zeros(size, dtype=torch.int32, device=device),
        torch.zeros(size, dtype=torch.int64, device=device),
        torch.full((size,), PAD_SLOT_ID, dtype=torch.int64, device=device),
        *torch.empty(2, num_reqs, dtype=torch.int64, device=device),
    )
    if form == "loop":
        _loop(*args, blocks, out)
    elif form != "torch":
        launch(
            _extend_inputs_kernel, (num_reqs,), *args, last_sampled_tokens.stride(0), *blocks[:2],
            blocks.block_table.stride(0), blocks.limit, *out, form=form, num_warps=1, BLOCK_SIZE=blocks.block_size,
            PAD=PAD_SLOT_ID, BLOCK=128,
        )  # fmt: skip
    return out


def _loop(
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    last_sampled_tokens: torch.Tensor,
    num_sampled: torch.Tensor,
    num_rejected: torch.Tensor,
    blocks: Blocks,
    out: ExtendedInputs,
) -> None:
    for i in range(idx_mapping.shape[0]):
        begin, end = int(query_start_loc[i]), int(query_start_loc[i + 1])
        tokens = input_ids[begin : end - int(num_rejected[i])].tolist()
        if int(num_sampled[i]) > 0:
            tokens.append(int(last_sampled_tokens[max(int(idx_mapping[i]), 0), 0]))
        first = int(positions[begin])
        for j in range(end - begin + 1):
            out.positions[begin + i + j] = first + j
        for j, token in enumerate(tokens):
            out.token_ids[begin + i + j] = token
            out.slot_mapping[begin + i + j] = blocks.slot(idx_mapping, i, first + j)
        out.last_indices[i] = begin + i + len(tokens) - 1
        out.last_positions[i] = first + len(tokens) - 1


def _torch(
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    last_sampled_tokens: torch.Tensor,
    num_sampled: torch.Tensor,
    num_rejected: torch.Tensor,
    blocks: Blocks,
    num_tokens: int,
) -> ExtendedInputs:
    num_reqs = idx_mapping.shape[0]
    starts = query_start_loc[: num_reqs + 1]
    number = torch.arange(num_reqs + 1, dtype=torch.int32, device=starts.device)
    request, place, _ = segment_of(starts + number, num_reqs, num_tokens + num_reqs)
    num_valid, is_sampled = starts[1:] - starts[:-1] - num_rejected[:num_reqs], num_sampled[:num_reqs] > 0
    is_new = (place == num_valid[request]) & is_sampled[request]
    is_used = (place < num_valid[request]) | is_new
    new = last_sampled_tokens[idx_mapping.clamp(min=0).long(), 0].int()
    source = (starts[:-1][request] + place).clamp_(max=num_tokens - 1)
    token = torch.where(is_new, new[request], torch.where(is_used, input_ids[source], 0))
    first = positions[starts[:-1].clamp(max=num_tokens - 1)]
    position = first[request] + place
    last = num_valid - 1 + is_sampled
    return ExtendedInputs(
        token,
        position,
        blocks.slots(idx_mapping, request, position, is_used),
        (starts[:-1] + number[:-1] + last).long(),
        first + last,
    )


@triton.jit
def _extend_inputs_kernel(
    idx_mapping_ptr, query_start_loc_ptr, input_ids_ptr, positions_ptr, last_sampled_tokens_ptr, num_sampled_ptr,
    num_rejected_ptr, last_sampled_tokens_stride, block_table_ptr, num_blocks_ptr, block_table_stride, limit,
    token_ids_ptr, out_positions_ptr, slots_ptr, last_indices_ptr, last_positions_ptr,
    BLOCK_SIZE: tl.constexpr, PAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    req = tl.program_id(0).to(tl.int64)
    row = tl.maximum(tl.load(idx_mapping_ptr + req), 0).to(tl.int64)
    begin = tl.load(query_start_loc_ptr + req)
    length = tl.load(query_start_loc_ptr + req + 1) - begin
    num_valid = length - tl.load(num_rejected_ptr + req)
    num_used = num_valid + (tl.load(num_sampled_ptr + req) > 0).to(tl.int32)
    new = tl.load(last_sampled_tokens_ptr + row * last_sampled_tokens_stride).to(tl.int32)
    held = tl.load(num_blocks_ptr + row)
    first = tl.load(positions_ptr + begin)
    tl.store(last_indices_ptr + req, begin + req + num_used - 1)
    tl.store(last_positions_ptr + req, first + num_used - 1)
    for done in range(0, length + 1, BLOCK):
        place = done + tl.arange(0, BLOCK)
        out = begin + req + place
        position = first + place
        token = tl.load(input_ids_ptr + begin + place, mask=place < num_valid, other=0)
        token = tl.where((place == num_valid) & (place < num_used), new, token)
        block = position // BLOCK_SIZE
        has_slot = (place < num_used) & (position < limit) & (block < held)
        slot = tl.load(block_table_ptr + req * block_table_stride + block, mask=has_slot, other=0).to(tl.int64)
        slot = tl.where(has_slot, slot * BLOCK_SIZE + position % BLOCK_SIZE, PAD)
        tl.store(token_ids_ptr + out, token, mask=place <= length)
        tl.store(out_positions_ptr + out, position, mask=place <= length)
        tl.store(slots_ptr + out, slot, mask=place <= length)
