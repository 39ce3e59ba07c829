"""The Triton kernels of small_linear.

With a few rows a projection does nothing but read its weights, so what counts is how early those reads start and how
few launches stand between them. A program owns a few output columns and the whole depth: it issues all its weight reads
before it waits for the kernel in front of it, and only then reads the activations. More rows than one instruction takes
are further programs, which find the weights in the cache.
"""

from kernels.triton_support import tl, triton


@triton.jit
def _load(ptr, mask, EVEN: tl.constexpr, UPCAST: tl.constexpr):
    if EVEN:
        w = tl.load(ptr, eviction_policy="evict_first")
    else:
        w = tl.load(ptr, mask=mask, other=0.0)
    return w.to(tl.float32) if UPCAST else w


@triton.jit
def _finish(y, row, column, bias_ptr, residual_ptr, out_ptr, out_stride, copy_ptr, copy_stride, num_rows, N):
    # y, row and column broadcast to one shape
    inside = (row < num_rows) & (column < N)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + column, mask=column < N, other=0.0).to(tl.float32)
    offset = row * out_stride + column
    if residual_ptr is not None:
        y += tl.load(residual_ptr + offset, mask=inside, other=0.0).to(tl.float32)
    y = y.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + offset, y, mask=inside)
    if copy_ptr is not None:
        tl.store(copy_ptr + row * copy_stride + column, y, mask=inside)


@triton.jit
def one_row_kernel(
    x_ptr,
    x_stride,
    weight_ptr,
    norm_weight_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    out_stride,
    copy_ptr,
    copy_stride,
    num_rows,
    N,
    K,
    eps,
    GATED: tl.constexpr,
    PDL: tl.constexpr,
    UPCAST: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """x [K] by vector instructions."""
    PART: tl.constexpr = BLOCK_K // SPLIT
    column = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    n = column[None, :, None]
    # [SPLIT, 1, PART]: every warp has a part of the depth to itself
    k = tl.arange(0, SPLIT)[:, None, None] * PART + tl.arange(0, PART)[None, None, :]
    weights = ()
    up_weights = ()
    for chunk in tl.static_range(NUM_CHUNKS):
        depth = k + chunk * BLOCK_K
        mask = (n < N) & (depth < K)
        weights = weights + (_load(weight_ptr + n * K + depth, mask, EVEN, UPCAST),)  # type: ignore[assignment]
        if GATED:
            up_weights = up_weights + (_load(weight_ptr + (n + N) * K + depth, mask, EVEN, UPCAST),)  # type: ignore[assignment]
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    acc = tl.zeros([SPLIT, BLOCK_N, PART], dtype=tl.float32)
    up_acc = acc
    squares = tl.zeros([SPLIT, 1, PART], dtype=tl.float32)
    for chunk in tl.static_range(NUM_CHUNKS):
        depth = k + chunk * BLOCK_K
        x = tl.load(x_ptr + depth, mask=depth < K, other=0.0)
        exact = x.to(tl.float32)
        if norm_weight_ptr is not None:
            squares += exact * exact
            # The norm's scale is one number a row, so it may come after the product; its weight may not.
            weight = tl.load(norm_weight_ptr + depth, mask=depth < K, other=0.0).to(tl.float32)
            exact = (exact * weight).to(x.dtype).to(tl.float32)
        acc += exact * weights[chunk].to(tl.float32)
        if GATED:
            up_acc += exact * up_weights[chunk].to(tl.float32)
    y = tl.sum(tl.sum(acc, axis=2), axis=0)
    scale = 1.0
    if norm_weight_ptr is not None:
        scale = 1.0 / tl.sqrt_rn(tl.sum(tl.sum(tl.sum(squares, axis=2), axis=1), axis=0) / K + eps)
        y *= scale
    if GATED:
        y = y / (1.0 + tl.exp(-y)) * (tl.sum(tl.sum(up_acc, axis=2), axis=0) * scale)
    _finish(
        y, column * 0, column, bias_ptr, residual_ptr, out_ptr, out_stride, copy_ptr, copy_stride, num_rows, N
    )  # fmt: skip


@triton.jit
def _fragments(x, LINES: tl.constexpr, SLICES: tl.constexpr):
    """[LINES * SLICES, 32] as loaded -> [SLICES, LINES, 32] as a matrix instruction wants it, without moving anything.

    A thread has loaded 8 neighbours of a line, while its operand of an instruction is pairs. The order of the depth is
    free as long as both operands have the same, so the neighbours are renamed instead of exchanged with other threads.
    """
    x = tl.reshape(x, [LINES // 8, SLICES, 8, 4, 2, 2, 2])
    return tl.reshape(tl.permute(x, (1, 0, 2, 4, 5, 3, 6)), [SLICES, LINES, 32])


@triton.jit
def few_rows_kernel(
    x_ptr,
    x_stride,
    weight_ptr,
    norm_weight_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    out_stride,
    copy_ptr,
    copy_stride,
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
    COLUMNS_FIRST: tl.constexpr,
):
    """BLOCK_M rows of x [t, K] by matrix instructions; the grid is (blocks of columns, blocks of rows)."""
    SLICES: tl.constexpr = BLOCK_K // 32
    # Line i of a tile is depth slice i // 8 % SLICES of column (or row) i // (8 * SLICES) * 8 + i % 8: a warp reads
    # eight lines by four threads, which is the shape of its operands.
    line = tl.arange(0, BLOCK_N * SLICES)
    column = tl.program_id(0).to(tl.int64) * BLOCK_N + (line // (8 * SLICES) * 8 + line % 8)[:, None]
    k = (line // 8 % SLICES * 32)[:, None] + tl.arange(0, 32)[None, :]
    weights = ()
    up_weights = ()
    for chunk in tl.static_range(NUM_CHUNKS):
        depth = k + chunk * BLOCK_K
        mask = (column < N) & (depth < K)
        w = _load(weight_ptr + column * K + depth, mask, EVEN, UPCAST)
        weights = weights + (_fragments(w, BLOCK_N, SLICES),)  # type: ignore[assignment]
        if GATED:
            w = _load(weight_ptr + (column + N) * K + depth, mask, EVEN, UPCAST)
            up_weights = up_weights + (_fragments(w, BLOCK_N, SLICES),)  # type: ignore[assignment]
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    line = tl.arange(0, BLOCK_M * SLICES)
    row = (tl.program_id(1) * BLOCK_M + line // (8 * SLICES) * 8 + line % 8)[:, None]
    k = (line // 8 % SLICES * 32)[:, None] + tl.arange(0, 32)[None, :]
    TOP: tl.constexpr = BLOCK_N if COLUMNS_FIRST else BLOCK_M
    SIDE: tl.constexpr = BLOCK_M if COLUMNS_FIRST else BLOCK_N
    acc = tl.zeros([SLICES, TOP, SIDE], dtype=tl.float32)
    up_acc = acc
    squares = tl.zeros([BLOCK_M * SLICES, 32], dtype=tl.float32)
    for chunk in tl.static_range(NUM_CHUNKS):
        depth = k + chunk * BLOCK_K
        x = tl.load(x_ptr + row * x_stride + depth, mask=(row < num_rows) & (depth < K), other=0.0)
        if UPCAST:
            x = x.to(tl.float32)
        if norm_weight_ptr is not None:
            exact = x.to(tl.float32)
            squares += exact * exact
            weight = tl.load(norm_weight_ptr + depth, mask=depth < K, other=0.0).to(tl.float32)
            x = (exact * weight).to(x.dtype)
        x = _fragments(x, BLOCK_M, SLICES)
        acc = _add_product(acc, x, weights[chunk], COLUMNS_FIRST)
        if GATED:
            up_acc = _add_product(up_acc, x, up_weights[chunk], COLUMNS_FIRST)
    y = tl.sum(acc, axis=0)
    scale = 1.0
    if norm_weight_ptr is not None:
        per_row = tl.sum(tl.reshape(tl.sum(squares, axis=1), [BLOCK_M // 8, SLICES, 8]), axis=1)
        scale = 1.0 / tl.sqrt_rn(tl.reshape(per_row, [BLOCK_M]) / K + eps)
        scale = scale[None, :] if COLUMNS_FIRST else scale[:, None]
        y *= scale
    if GATED:
        y = y / (1.0 + tl.exp(-y)) * (tl.sum(up_acc, axis=0) * scale)
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = row[None, :] if COLUMNS_FIRST else row[:, None]
    column = column[:, None] if COLUMNS_FIRST else column[None, :]
    _finish(y, row, column, bias_ptr, residual_ptr, out_ptr, out_stride, copy_ptr, copy_stride, num_rows, N)


@triton.jit
def _add_product(acc, x, w, COLUMNS_FIRST: tl.constexpr):
    if COLUMNS_FIRST:
        return tl.dot(w, tl.permute(x, (0, 2, 1)), acc, input_precision="ieee")
    else:
        return tl.dot(x, tl.permute(w, (0, 2, 1)), acc, input_precision="ieee")
