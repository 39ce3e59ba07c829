"""Kernel 6: gather the block rows of a step from the persistent table into a buffer with a fixed address."""

import torch

from kernels.dispatch import check_tensors, resolve_form
from kernels.triton_support import launch, tl, triton


def gather_block_tables(
    # [r] i32
    idx_mapping: torch.Tensor,
    # [R, B] i32
    block_table: torch.Tensor,
    # [R] i32
    num_blocks: torch.Tensor,
    # [R, B] i32, written in place
    input_block_table: torch.Tensor,
    num_reqs_padded: int,
    *,
    form: str = "auto",
) -> None:
    """Copy the used prefix of every request's block row, and zero the rows r .. num_reqs_padded - 1.

    Columns past the used prefix keep whatever stood there: attention never reads them. Rows past `num_reqs_padded`
    keep their values.

    Args:
        num_reqs_padded: rows that the captured graph will read; r where nothing is padded.

    Raises:
        ValueError: a wrong dtype, rank, length or form, or num_reqs_padded below r.
    """
    num_reqs = idx_mapping.shape[0]
    check_tensors(torch.int32, 1, idx_mapping=idx_mapping, num_blocks=num_blocks)
    check_tensors(torch.int32, 2, block_table=block_table)
    check_tensors(torch.int32, 2, num_reqs_padded, input_block_table=input_block_table)
    if num_reqs_padded < num_reqs:
        raise ValueError(f"num_reqs_padded must be at least {num_reqs}, the size of the batch, got {num_reqs_padded}")
    if input_block_table.shape[1] != block_table.shape[1]:
        raise ValueError(
            f"input_block_table must have the {block_table.shape[1]} columns of block_table, "
            f"got {input_block_table.shape[1]}"
        )
    form = resolve_form(form, block_table)
    if form == "torch":
        _torch(idx_mapping, block_table, num_blocks, input_block_table, num_reqs_padded)
    elif form == "loop":
        _loop(idx_mapping, block_table, num_blocks, input_block_table, num_reqs_padded)
    else:
        launch(
            _gather_block_tables_kernel,
            (num_reqs_padded,),
            idx_mapping,
            block_table,
            num_blocks,
            input_block_table,
            block_table.stride(0),
            input_block_table.stride(0),
            block_table.shape[1],
            num_reqs,
            form=form,
            BLOCK=1024,
        )


def _loop(
    idx_mapping: torch.Tensor,
    block_table: torch.Tensor,
    num_blocks: torch.Tensor,
    input_block_table: torch.Tensor,
    num_reqs_padded: int,
) -> None:
    num_reqs = idx_mapping.shape[0]
    for i in range(num_reqs):
        row = int(idx_mapping[i])
        used = int(num_blocks[row])
        input_block_table[i, :used] = block_table[row, :used]
    for i in range(num_reqs, num_reqs_padded):
        input_block_table[i, :] = 0


def _torch(
    idx_mapping: torch.Tensor,
    block_table: torch.Tensor,
    num_blocks: torch.Tensor,
    input_block_table: torch.Tensor,
    num_reqs_padded: int,
) -> None:
    num_reqs, rows = idx_mapping.shape[0], idx_mapping.long()
    column = torch.arange(block_table.shape[1], dtype=torch.int32, device=block_table.device)
    gathered = input_block_table[:num_reqs]
    gathered.copy_(torch.where(column < num_blocks[rows].unsqueeze(1), block_table[rows], gathered))
    input_block_table[num_reqs:num_reqs_padded].zero_()


@triton.jit(do_not_specialize=["num_reqs"])
def _gather_block_tables_kernel(
    idx_mapping_ptr,
    block_table_ptr,
    num_blocks_ptr,
    input_block_table_ptr,
    block_table_stride,
    input_block_table_stride,
    max_num_blocks,
    num_reqs,
    BLOCK: tl.constexpr,
):
    req = tl.program_id(0)
    out_ptr = input_block_table_ptr + req.to(tl.int64) * input_block_table_stride
    if req >= num_reqs:
        for done in range(0, max_num_blocks, BLOCK):
            column = done + tl.arange(0, BLOCK)
            tl.store(out_ptr + column, tl.zeros([BLOCK], tl.int32), mask=column < max_num_blocks)
        return
    row = tl.load(idx_mapping_ptr + req).to(tl.int64)
    copy_blocks(block_table_ptr + row * block_table_stride, tl.load(num_blocks_ptr + row), out_ptr, BLOCK)


@triton.jit
def copy_blocks(source_ptr, used, out_ptr, BLOCK: tl.constexpr):
    """The used prefix of a block row."""
    for done in range(0, used, BLOCK):
        column = done + tl.arange(0, BLOCK)
        mask = column < used
        tl.store(out_ptr + column, tl.load(source_ptr + column, mask=mask), mask=mask)
