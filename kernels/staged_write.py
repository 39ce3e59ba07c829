"""Kernel 1: scatter staged ragged rows into a persistent tensor. The cost follows the changes, not the table."""

import torch

from kernels.dispatch import check_tensors, resolve_form, segment_of
from kernels.triton_support import launch, tl, triton


def apply_write(
    # [R, C] or [R], any int or float dtype
    target: torch.Tensor,
    # [n] i32
    row: torch.Tensor,
    # [n] i32
    start: torch.Tensor,
    # [n + 1] i32
    cu_len: torch.Tensor,
    # [cu_len[n]], target's dtype
    contents: torch.Tensor,
    *,
    form: str = "auto",
) -> None:
    """Write slice i, `contents[cu_len[i] : cu_len[i + 1]]`, at `target[row[i], start[i]:]`, for every i < n.

    A target [R] counts as [R, 1]. No two slices of a call may cover the same cell: writes run in parallel, so neither
    would be sure to win. The loop form checks this.

    Raises:
        ValueError: a wrong dtype, rank or form; in the loop form also an overlap or a slice outside of the target.
    """
    table = target.unsqueeze(1) if target.dim() == 1 else target
    num_writes = row.shape[0]
    check_tensors(None, 2, target=table)
    check_tensors(torch.int32, 1, num_writes, row=row, start=start)
    check_tensors(torch.int32, 1, num_writes + 1, cu_len=cu_len)
    check_tensors(target.dtype, 1, contents=contents)
    form = resolve_form(form, target)
    if num_writes == 0:
        return
    if form == "torch":
        _torch(table, row, start, cu_len, contents)
    elif form == "loop":
        _loop(table, row, start, cu_len, contents)
    else:
        launch(
            _apply_write_kernel,
            (num_writes,),
            table,
            table.stride(0),
            row,
            start,
            cu_len,
            contents,
            form=form,
            BLOCK=1024,
        )


def _loop(
    table: torch.Tensor, row: torch.Tensor, start: torch.Tensor, cu_len: torch.Tensor, contents: torch.Tensor
) -> None:
    written: set[tuple[int, int]] = set()
    for i in range(row.shape[0]):
        r, first = int(row[i]), int(start[i])
        values = contents[int(cu_len[i]) : int(cu_len[i + 1])]
        cells = {(r, column) for column in range(first, first + len(values))}
        if not (0 <= r < table.shape[0] and 0 <= first <= first + len(values) <= table.shape[1]):
            raise ValueError(
                f"write {i} covers row {r}, columns {first}..{first + len(values) - 1}: "
                f"outside of a target of shape {tuple(table.shape)}"
            )
        if cells & written:
            raise ValueError(
                f"write {i} covers (row, column) {min(cells & written)} that an earlier write covers too: "
                "merge the two before staging them"
            )
        written |= cells
        table[r, first : first + len(values)] = values


def _torch(
    table: torch.Tensor, row: torch.Tensor, start: torch.Tensor, cu_len: torch.Tensor, contents: torch.Tensor
) -> None:
    write, offset, _ = segment_of(cu_len, row.shape[0], contents.shape[0])
    table[row[write].long(), (start[write] + offset).long()] = contents


@triton.jit
def _apply_write_kernel(target_ptr, target_stride, row_ptr, start_ptr, cu_len_ptr, contents_ptr, BLOCK: tl.constexpr):
    write = tl.program_id(0)
    row = tl.load(row_ptr + write).to(tl.int64)
    begin = tl.load(cu_len_ptr + write)
    length = tl.load(cu_len_ptr + write + 1) - begin
    out_ptr = target_ptr + row * target_stride + tl.load(start_ptr + write)
    for done in range(0, length, BLOCK):
        offset = done + tl.arange(0, BLOCK)
        mask = offset < length
        tl.store(out_ptr + offset, tl.load(contents_ptr + begin + offset, mask=mask), mask=mask)
