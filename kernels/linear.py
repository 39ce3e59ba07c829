"""A linear layer for a handful of rows, with the norm before it and the residual or the gate after it in the same launch.

At 1 to 16 rows a projection does nothing but read its weights, so what counts is how early those reads start and how few
launches stand between them. A program owns a few output columns and the whole depth: it issues all its weight reads
before it waits for the kernel in front of it, and only then reads the activations.
"""

import torch
import torch.nn.functional as F

from kernels.dispatch import check_tensors, resolve_form
from kernels.triton_support import can_launch_early, launch, tl, triton

MAX_ROWS = 16
_WARPS = 8


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
    gated: bool = False,
    out_dtype: torch.dtype | None = None,
    form: str = "auto",
) -> torch.Tensor:
    """Return norm(x) W^T + bias, or silu(gate) * up of its two halves where `gated`, as [t, N] in out_dtype or x's dtype.

    With `norm_weight`, norm is the RMS norm over K. With `residual` the result is added to it in place and it is returned.
    Products are summed in float32 and rounded once. All tensors have one dtype: float32, float16 or bfloat16.

    Raises:
        ValueError: a wrong dtype, shape or form, a bias together with `gated`, or more than MAX_ROWS rows in Triton.
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
    form = resolve_form(form, x)
    if form == "torch":
        return _torch(x, weight, norm_weight, eps, bias, residual, gated).to(out_dtype or x.dtype)
    out = residual if residual is not None else x.new_empty(num_rows, num_columns, dtype=out_dtype)
    if form == "loop":
        _loop(x, weight, norm_weight, eps, bias, residual, gated, out)
        return out
    if num_rows > MAX_ROWS:
        raise ValueError(f"small_linear takes at most {MAX_ROWS} rows, got {num_rows}: use form='torch' for more")
    block_n, block_k = _tile(num_columns, depth)
    launch(
        _small_linear_kernel,
        (-(-num_columns // block_n),),
        x,
        x.stride(0),
        weight,
        norm_weight,
        bias,
        residual,
        out,
        out.stride(0),
        num_rows,
        num_columns,
        depth,
        eps,
        form=form,
        num_warps=_WARPS,
        pdl=can_launch_early(form, x),
        GATED=gated,
        PDL=can_launch_early(form, x),
        UPCAST=form == "interpret",
        EVEN=depth % block_k == 0 and num_columns % block_n == 0,
        BLOCK_M=1 if num_rows == 1 else MAX_ROWS,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        NUM_CHUNKS=-(-depth // block_k),
        SPLIT=_WARPS,
    )
    return out


def _tile(num_columns: int, depth: int) -> tuple[int, int]:
    """Output columns of a program and depth of a read: enough programs for every multiprocessor, whole rows if possible."""
    block_n = 8 if num_columns < 2048 else 16 if num_columns < 65536 else 32
    return block_n, max(128, min(1024, 1 << (depth - 1).bit_length()))


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


@triton.jit
def _load_weights(weight_ptr, n, k, N, K, EVEN: tl.constexpr, UPCAST: tl.constexpr):
    ptr = weight_ptr + n * K + k
    if EVEN:
        w = tl.load(ptr, eviction_policy="evict_first")
    else:
        w = tl.load(ptr, mask=(n < N) & (k < K), other=0.0)
    return w.to(tl.float32) if UPCAST else w


@triton.jit
def _add_product(acc, x, w, BLOCK_M: tl.constexpr):
    # x [SPLIT, M, k], w [SPLIT, N, k]: every warp has a part of the depth to itself.
    if BLOCK_M == 1:
        return acc + x.to(tl.float32) * w.to(tl.float32)
    else:
        return tl.dot(x, tl.permute(w, (0, 2, 1)), acc, input_precision="ieee")


@triton.jit
def _total(acc, BLOCK_M: tl.constexpr):
    # [M, N]
    if BLOCK_M == 1:
        return tl.sum(tl.sum(acc, axis=2), axis=0)[None, :]
    else:
        return tl.sum(acc, axis=0)


@triton.jit
def _small_linear_kernel(
    x_ptr,
    x_stride,
    weight_ptr,
    norm_weight_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    out_stride,
    num_rows,
    N,
    K,
    eps,
    GATED: tl.constexpr,
    PDL: tl.constexpr,
    UPCAST: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    SPLIT: tl.constexpr,
):
    PART: tl.constexpr = BLOCK_K // SPLIT
    first = tl.program_id(0).to(tl.int64) * BLOCK_N
    column = first + tl.arange(0, BLOCK_N)
    n = column[None, :, None]
    k = tl.arange(0, SPLIT)[:, None, None] * PART + tl.arange(0, PART)[None, None, :]
    weights = ()
    up_weights = ()
    for chunk in tl.static_range(NUM_CHUNKS):
        weights = weights + (_load_weights(weight_ptr, n, k + chunk * BLOCK_K, N, K, EVEN, UPCAST),)
        if GATED:
            up_ptr = weight_ptr + N.to(tl.int64) * K
            up_weights = up_weights + (_load_weights(up_ptr, n, k + chunk * BLOCK_K, N, K, EVEN, UPCAST),)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.arange(0, BLOCK_M)
    m = row[None, :, None]
    LAST: tl.constexpr = PART if BLOCK_M == 1 else BLOCK_N
    LINES: tl.constexpr = BLOCK_N if BLOCK_M == 1 else BLOCK_M
    acc = tl.zeros([SPLIT, LINES, LAST], dtype=tl.float32)
    up_acc = acc
    squares = tl.zeros([SPLIT, BLOCK_M, PART], dtype=tl.float32)
    for chunk in tl.static_range(NUM_CHUNKS):
        depth = k + chunk * BLOCK_K
        x = tl.load(x_ptr + m * x_stride + depth, mask=(m < num_rows) & (depth < K), other=0.0)
        if UPCAST:
            x = x.to(tl.float32)
        if norm_weight_ptr is not None:
            # The norm's scale is one number a row, so it may come after the product; only its weight must come before.
            exact = x.to(tl.float32)
            squares += exact * exact
            x = (exact * tl.load(norm_weight_ptr + depth, mask=depth < K, other=0.0).to(tl.float32)).to(x.dtype)
        acc = _add_product(acc, x, weights[chunk], BLOCK_M)
        if GATED:
            up_acc = _add_product(up_acc, x, up_weights[chunk], BLOCK_M)
    y = _total(acc, BLOCK_M)
    scale = 1.0
    if norm_weight_ptr is not None:
        scale = 1.0 / tl.sqrt_rn(tl.sum(tl.sum(squares, axis=2), axis=0) / K + eps)[:, None]
        y *= scale
    if GATED:
        y = y / (1.0 + tl.exp(-y)) * (_total(up_acc, BLOCK_M) * scale)
    inside = (row[:, None] < num_rows) & (column[None, :] < N)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + column, mask=column < N, other=0.0).to(tl.float32)[None, :]
    offset = row[:, None] * out_stride + column[None, :]
    if residual_ptr is not None:
        y += tl.load(residual_ptr + offset, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + offset, y.to(out_ptr.dtype.element_ty), mask=inside)
