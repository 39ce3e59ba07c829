"""A linear layer for a handful of rows: the norm before it, the residual or the gate after it, in one launch."""

from typing import NamedTuple

import torch
import torch.nn.functional as F

from kernels.dispatch import check_tensors, resolve_form
from kernels.linear_triton import few_rows_kernel, one_row_kernel
from kernels.triton_support import can_launch_early, launch

_HELD = 384
"""Weights that a thread holds at most."""


def max_rows(x: torch.Tensor, hidden_size: int) -> int:
    """Rows of tensors like x up to which a model of that hidden size is faster with small_linear; 0 is never.

    Measured on an H200 with whole layers of SmolLM2-135M (96 rows 29.0 µs for torch's 34.3, 128 rows the same),
    Qwen3-0.6B (24 rows 47.8 for 50.0), hidden size 2048 (1 row 40.7 for 53.0, 8 rows 99 for 57) and 4096 (1 row 142 for
    132). In float32, which a GPU's matrix instructions do not take as it is, a GPU has one row only.
    """
    rows = 96 if hidden_size < 1024 else 24 if hidden_size < 2048 else 1 if hidden_size < 4096 else 0
    return min(rows, 1) if x.is_cuda and x.dtype == torch.float32 else rows


def small_linear(
    # [t, K]
    x: torch.Tensor,
    # [N, K]; gated: [2 N, K], the gate's rows first
    weight: torch.Tensor,
    *,
    # [K]
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    # [N]
    bias: torch.Tensor | None = None,
    # [t, N], changed in place
    residual: torch.Tensor | None = None,
    # [t, N] of the result's dtype, any row stride: written too
    copy: torch.Tensor | None = None,
    gated: bool = False,
    out_dtype: torch.dtype | None = None,
    form: str = "auto",
) -> torch.Tensor:
    """Return norm(x) W^T + bias, or silu(gate) * up of its two halves where `gated`, as [t, N] of out_dtype or x's.

    With `norm_weight`, norm is the RMS norm over K. With `residual` the result is added to it in place and returned.
    Products are summed in float32 and rounded once. All tensors have one dtype: float32, float16 or bfloat16.

    Raises:
        ValueError: a wrong dtype, shape or form, a bias together with `gated`, or several rows of float32 on a GPU in
            Triton.
    """
    num_rows, depth = x.shape
    num_columns = weight.shape[0] // 2 if gated else weight.shape[0]
    check_tensors(x.dtype, 2, x=x, weight=weight)
    if weight.shape[1] != depth or (gated and weight.shape[0] % 2):
        raise ValueError(f"weight must be [N, {depth}] (gated: an even N), got {tuple(weight.shape)}")
    if gated and bias is not None:
        raise ValueError("a gated projection has no bias: pass bias=None")
    if residual is not None:
        check_tensors(x.dtype, 2, num_rows, residual=residual)
        if out_dtype not in (None, x.dtype):
            raise ValueError(f"a residual of {x.dtype} is changed in place, so out_dtype={out_dtype} is not possible")
    if copy is not None:
        check_tensors(out_dtype or x.dtype, 2, num_rows, copy=copy)
        if copy.shape != (num_rows, num_columns):
            raise ValueError(f"copy must be [{num_rows}, {num_columns}], got {tuple(copy.shape)}")
    form = resolve_form(form, x)
    if form == "torch":
        out = _torch(x, weight, norm_weight, eps, bias, residual, gated).to(out_dtype or x.dtype)
        return out if copy is None else _copied(out, copy)
    out = residual if residual is not None else x.new_empty(num_rows, num_columns, dtype=out_dtype)
    if form == "loop":
        _loop(x, weight, norm_weight, eps, bias, residual, gated, out)
        return out if copy is None else _copied(out, copy)
    if form == "triton" and num_rows > 1 and x.dtype == torch.float32:
        raise ValueError(
            f"small_linear's kernels take one row of float32 on a GPU, got {num_rows}: use form='torch' for more"
        )
    _launch(x, weight, norm_weight, eps, bias, residual, copy, gated, out, form)
    return out


def _copied(out: torch.Tensor, copy: torch.Tensor) -> torch.Tensor:
    copy.copy_(out)
    return out


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    norm_weight: torch.Tensor | None,
    eps: float,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    copy: torch.Tensor | None,
    gated: bool,
    out: torch.Tensor,
    form: str,
) -> None:
    (num_rows, depth), num_columns = x.shape, out.shape[1]
    block_m, block_n, block_k, num_warps = _tile(num_rows, num_columns, depth, gated)
    tile = {"BLOCK_N": block_n, "BLOCK_K": block_k, "NUM_CHUNKS": -(-depth // block_k)}
    if block_m == 1:
        kernel, tile = one_row_kernel, {**tile, "SPLIT": num_warps}
    else:
        # Eight rows fit the narrow side of a matrix instruction, whose wide side then takes the columns.
        kernel, tile = few_rows_kernel, {**tile, "BLOCK_M": block_m, "COLUMNS_FIRST": block_m == 8}
    launch(
        kernel,
        (-(-num_columns // block_n), -(-num_rows // block_m)),
        x,
        x.stride(0),
        weight,
        norm_weight,
        bias,
        residual,
        out,
        out.stride(0),
        copy,
        0 if copy is None else copy.stride(0),
        num_rows,
        num_columns,
        depth,
        eps,
        form=form,
        num_warps=num_warps,
        pdl=can_launch_early(form, x),
        GATED=gated,
        UPCAST=form == "interpret",
        EVEN=depth % block_k == 0 and num_columns % block_n == 0,
        **tile,
    )


class _Tile(NamedTuple):
    """Rows and output columns of a program, depth of one read, and warps. One row is for vector instructions."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int


def _tile(num_rows: int, num_columns: int, depth: int, gated: bool) -> _Tile:
    """The fastest of those measured on an H200, in place: in a captured stack of SmolLM2's layers or Qwen3-0.6B's."""
    is_shallow = depth < 1024
    if num_columns >= 32768:
        tile = _Tile(8, 32, 64, 2) if is_shallow else _Tile(8, 16, 512, 2) if num_rows > 1 else _Tile(1, 8, 1024, 4)
    elif max(num_columns, depth) < 2048:
        tile = _small_tile(num_rows, num_columns, depth, gated)
    elif num_rows > 1:
        block_k = 128 if gated else 256 if depth > 2048 else 512
        tile = _Tile(8 if num_rows <= 8 else 16, 16, block_k, 4)
    elif gated:
        tile = _Tile(1, 8, 512, 2)
    elif num_columns >= 2048:
        tile = _Tile(1, 4, 1024, 2)
    else:
        tile = _Tile(1, 2, 1024 if depth > 2048 else 512, 1)
    block_m, block_n, block_k, num_warps = tile
    # What a program reads lies in registers.
    while num_warps < 8 and (1 + gated) * block_n * depth > _HELD * 32 * num_warps:
        num_warps *= 2
    return _Tile(block_m, block_n, min(block_k, max(128, 1 << (depth - 1).bit_length())), num_warps)


def _small_tile(num_rows: int, num_columns: int, depth: int, gated: bool) -> _Tile:
    """How little of a read lies past the depth counts, and how few warps wait for one another."""
    if num_rows == 1:
        if gated:
            return _Tile(1, 2, 256, 2)
        return _Tile(1, 8, 1024, 4) if depth >= 1024 else _Tile(1, 4, 256, 1 if num_columns > depth else 2)
    if gated:
        return _Tile(8, 16, 128 if num_rows <= 8 else 64, 2) if num_rows <= 32 else _Tile(16, 16, 64, 2)
    if depth >= 1024:
        return _Tile(8, 16, 256, 2)
    if num_rows > 8:
        return _Tile(8, 32, 128, 2)
    return _Tile(8, 16, 128 if num_columns > depth else 256, 2)


def _loop(
    x: torch.Tensor,
    weight: torch.Tensor,
    norm_weight: torch.Tensor | None,
    eps: float,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    gated: bool,
    out: torch.Tensor,
) -> None:
    num_columns = out.shape[1]
    for m in range(x.shape[0]):
        row = x[m].float()
        if norm_weight is not None:
            row = row / float(row.square().mean() + eps) ** 0.5 * norm_weight.float()
        for n in range(num_columns):
            y = float(row @ weight[n].float())
            if gated:
                y = y / (1 + float(torch.exp(torch.tensor(-y)))) * float(row @ weight[num_columns + n].float())
            if bias is not None:
                y += float(bias[n])
            out[m, n] = y if residual is None else y + float(residual[m, n])


def _torch(
    x: torch.Tensor,
    weight: torch.Tensor,
    norm_weight: torch.Tensor | None,
    eps: float,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    gated: bool,
) -> torch.Tensor:
    if norm_weight is not None:
        x = F.rms_norm(x, (x.shape[1],), norm_weight, eps)
    y = F.linear(x, weight, bias)
    if gated:
        gate, up = y.chunk(2, dim=1)
        y = F.silu(gate).mul_(up)
    return y if residual is None else residual.add_(y)
