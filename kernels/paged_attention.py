"""Decode attention over the paged KV cache: one query token a request, fused with its norm, RoPE and KV store.

A program serves the query heads of one KV head (so that K and V are read once) over one part of one request's context.
How many parts there are follows from the number of rows alone, and lengths are read on the device, so a captured launch
serves every length. With several parts the program that ends last combines them.
"""

import torch

from kernels.attention_forms import attend_loop, attend_torch
from kernels.dispatch import check_tensors, resolve_form
from kernels.head_rotation import HeadRotation, rotate_block, rotation_factors
from kernels.store_kv import check_qkv, store_kv
from kernels.triton_support import can_launch_early, launch, tl, triton

MAX_COUNTERS = 1024
_MAX_SPLITS = 32
_PROGRAMS = 512
_LOG2_E = 1.4426950408889634


def decode_attention(
    # [t, (Hq + 2 Hk) * D]; row i is the one token of request i
    qkv: torch.Tensor,
    # [2 (K, V), num_blocks, block_size, Hk, D], changed in place
    kv_cache: torch.Tensor,
    # [r, B] i32
    block_table: torch.Tensor,
    # [r] i32, this step's token counted
    seq_lens: torch.Tensor,
    # [>= t] i64
    slot_mapping: torch.Tensor,
    rotation: HeadRotation | None = None,
    *,
    max_seq_len: int,
    # i32 [MAX_COUNTERS], all zero, and again zero when the kernel has ended
    counters: torch.Tensor | None = None,
    # [t, Hq * D]
    out: torch.Tensor | None = None,
    start_early: bool = True,
    form: str = "auto",
) -> torch.Tensor:
    """Rotate q and k, store K and V in their slots and attend; returns `out` or a new [t, Hq * D].

    Rows without a request, those past r and those of seq_len 0, give zeros and touch no cache. qkv may be changed.
    `max_seq_len` is an upper bound of seq_lens that only the torch form needs. With `start_early` the launch may start
    before kernels in front of it have ended (see `can_launch_early`): of what is read here they may write qkv alone.

    Raises:
        ValueError: a wrong dtype, shape or form.
    """
    num_heads, head_dim = check_qkv(qkv, kv_cache)
    num_rows = qkv.shape[0]
    check_tensors(torch.int32, 2, block_table=block_table)
    check_tensors(torch.int32, 1, seq_lens=seq_lens)
    check_tensors(torch.int64, 1, num_rows, slot_mapping=slot_mapping)
    if rotation is not None:
        rotation.check(num_rows, head_dim)
    num_reqs = min(num_rows, block_table.shape[0], seq_lens.shape[0])
    if out is None:
        out = qkv.new_empty(num_rows, num_heads * head_dim)
    elif out.shape != (num_rows, num_heads * head_dim) or not out.is_contiguous():
        raise ValueError(f"out must be contiguous [{num_rows}, {num_heads * head_dim}], got {tuple(out.shape)}")
    form = resolve_form(form, qkv)
    if form in ("torch", "loop"):
        store_kv(qkv, kv_cache, slot_mapping, rotation, form=form)
        q = qkv[:, : num_heads * head_dim].view(num_rows, num_heads, head_dim)
        out.zero_()
        if form == "torch":
            args = (block_table[:num_reqs], seq_lens[:num_reqs], max_seq_len)
            out[:num_reqs] = attend_torch(q[:num_reqs], kv_cache, *args)
        else:
            for i in range(num_reqs):
                if int(seq_lens[i]) > 0:
                    out[i] = attend_loop(q[i], kv_cache, block_table[i], int(seq_lens[i])).flatten()
        return out
    _launch(qkv, kv_cache, block_table, seq_lens, slot_mapping, rotation, num_reqs, counters, out, form, start_early)
    return out


def _launch(
    qkv: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    slot_mapping: torch.Tensor,
    rotation: HeadRotation | None,
    num_reqs: int,
    counters: torch.Tensor | None,
    out: torch.Tensor,
    form: str,
    start_early: bool,
) -> None:
    num_rows, block_size, num_kv_heads, head_dim = qkv.shape[0], *kv_cache.shape[2:]
    group = qkv.shape[1] // head_dim // num_kv_heads - 2
    group_pad = 1 << (group - 1).bit_length()
    block_d = max(16, 1 << (head_dim - 1).bit_length())
    splits = num_splits(num_rows, num_kv_heads)
    partial = statistics = None
    if splits > 1:
        shape = (num_rows * num_kv_heads * splits, group_pad)
        partial = torch.empty(*shape, block_d, dtype=torch.float32, device=qkv.device)
        statistics = torch.empty(2, *shape, dtype=torch.float32, device=qkv.device)
        if counters is None:
            counters = torch.zeros(MAX_COUNTERS, dtype=torch.int32, device=qkv.device)
    block_n, num_warps, num_stages = _tile(splits)
    early = start_early and can_launch_early(form, qkv)
    launch(
        _decode_attention_kernel,
        (num_kv_heads * splits, num_rows),
        qkv,
        qkv.stride(0),
        kv_cache,
        kv_cache.stride(0),
        block_table,
        block_table.stride(0),
        seq_lens,
        slot_mapping,
        rotation.positions if rotation else None,
        rotation.cos_sin if rotation else None,
        rotation.q_norm if rotation else None,
        rotation.k_norm if rotation else None,
        rotation.eps if rotation else 0.0,
        head_dim**-0.5 * _LOG2_E,
        out,
        partial,
        statistics,
        counters,
        num_reqs,
        form=form,
        num_warps=num_warps,
        num_stages=num_stages,
        pdl=early,
        PDL=early,
        UPCAST=form == "interpret",
        GROUP=group,
        GROUP_PAD=group_pad,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_D=block_d,
        BLOCK_SIZE=block_size,
        BLOCK_M=max(16, group_pad),
        BLOCK_N=block_n,
        SPLITS=splits,
    )


def num_splits(num_rows: int, num_kv_heads: int) -> int:
    """How many programs share one request's context for one KV head: about four for each multiprocessor in all."""
    wanted = _PROGRAMS // max(1, num_rows * num_kv_heads)
    return 1 << max(0, min(_MAX_SPLITS, wanted).bit_length() - 1)


def _tile(splits: int) -> tuple[int, int, int]:
    """Tokens of a read, warps and pipeline depth: the fastest of those measured on an H200."""
    return (32, 1, 2) if splits == 1 else (64, 2, 2) if splits < _MAX_SPLITS else (16, 2, 2)


@triton.jit
def _decode_attention_kernel(
    qkv_ptr,
    qkv_stride,
    kv_cache_ptr,
    value_offset,
    block_table_ptr,
    block_table_stride,
    seq_lens_ptr,
    slot_mapping_ptr,
    positions_ptr,
    cos_sin_ptr,
    q_norm_ptr,
    k_norm_ptr,
    eps,
    scale,
    out_ptr,
    partial_ptr,
    statistics_ptr,
    counters_ptr,
    num_reqs,
    PDL: tl.constexpr,
    UPCAST: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,
):
    NUM_HEADS: tl.constexpr = GROUP * NUM_KV_HEADS
    TOKEN: tl.constexpr = NUM_KV_HEADS * HEAD_DIM
    STORED: tl.constexpr = kv_cache_ptr.dtype.element_ty
    MULTIPLIED: tl.constexpr = tl.float32 if UPCAST else STORED
    # Neighbouring programs read neighbouring heads of the same tokens, which lie side by side in memory.
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    split = tl.program_id(0) // NUM_KV_HEADS
    row = tl.program_id(1).to(tl.int64)
    g = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    d_inside = d < HEAD_DIM
    # Before the wait: all that the step's embedding came after.
    seq_len = tl.load(seq_lens_ptr + row, mask=row < num_reqs, other=0)
    slot = tl.load(slot_mapping_ptr + row)
    table_ptr = cos_sin_ptr
    if cos_sin_ptr is not None:
        table_ptr = cos_sin_ptr + tl.load(positions_ptr + row) * HEAD_DIM
    q_own, q_cross = rotation_factors(d, d_inside, q_norm_ptr, table_ptr, HEAD_DIM)
    k_own, k_cross = rotation_factors(d, d_inside, k_norm_ptr, table_ptr, HEAD_DIM)
    # The cache holds all but this step's token, which split 0 adds itself.
    cached = tl.maximum(seq_len - 1, 0)
    part = tl.cdiv(tl.cdiv(cached, SPLITS), BLOCK_N) * BLOCK_N
    begin = split * part
    end = tl.minimum(begin + part, cached)
    key_ptr = kv_cache_ptr + kv_head * HEAD_DIM
    blocks_ptr = block_table_ptr + row * block_table_stride
    if SPLITS > 1:
        ptr, inside = _tile_pointers(key_ptr, blocks_ptr, begin, end, TOKEN, BLOCK_SIZE, BLOCK_N)
        mask = inside[:, None] & d_inside[None, :]
        first_k = tl.load(ptr + d[None, :], mask=mask, other=0.0)
        first_v = tl.load(ptr + value_offset + d[None, :], mask=mask, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    is_head = g[:, None] < GROUP
    inside_out = is_head & d_inside[None, :]
    out_ptr += (row * NUM_HEADS + kv_head * GROUP) * HEAD_DIM
    out = g[:, None] * HEAD_DIM + d[None, :]
    if seq_len <= 0:
        if split == 0:
            tl.store(out_ptr + out, tl.zeros([BLOCK_M, BLOCK_D], STORED), mask=inside_out)
        return
    if (split > 0) & (begin >= end):
        return
    qkv_ptr += row * qkv_stride
    q_ptr = qkv_ptr + (kv_head * GROUP + g[:, None]) * HEAD_DIM
    q = rotate_block(q_ptr, is_head, d, d_inside, q_own, q_cross, q_norm_ptr, table_ptr, eps, HEAD_DIM)
    q = q.to(STORED).to(MULTIPLIED)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    if split == 0:
        one = tl.arange(0, 1)[:, None]
        new_ptr = qkv_ptr + (NUM_HEADS + kv_head + one) * HEAD_DIM
        k = rotate_block(new_ptr, one == 0, d, d_inside, k_own, k_cross, k_norm_ptr, table_ptr, eps, HEAD_DIM)
        k = k.to(STORED)
        v = tl.load(new_ptr + TOKEN + d[None, :], mask=d_inside[None, :], other=0.0)
        store_ptr = key_ptr + slot * TOKEN + d[None, :]
        # A block of one: the interpreter cannot spread a boolean scalar over a block.
        has_slot = slot + tl.zeros([1, 1], tl.int64) >= 0
        tl.store(store_ptr, k, mask=d_inside[None, :] & has_slot)
        tl.store(store_ptr + value_offset, v, mask=d_inside[None, :] & has_slot)
        m = tl.sum(q.to(tl.float32) * k.to(tl.float32), axis=1) * scale
        total += 1.0
        acc += v.to(tl.float32)
    if SPLITS > 1:
        weights, shrink, m, total = _weigh(q, first_k, inside, scale, m, total, MULTIPLIED)
        weights = weights.to(STORED).to(MULTIPLIED)
        acc = tl.dot(weights, first_v.to(MULTIPLIED), acc * shrink[:, None], input_precision="ieee")
        begin += BLOCK_N
    for start in tl.range(begin, end, BLOCK_N):
        ptr, inside = _tile_pointers(key_ptr, blocks_ptr, start, end, TOKEN, BLOCK_SIZE, BLOCK_N)
        mask = inside[:, None] & d_inside[None, :]
        k = tl.load(ptr + d[None, :], mask=mask, other=0.0)
        weights, shrink, m, total = _weigh(q, k, inside, scale, m, total, MULTIPLIED)
        v = tl.load(ptr + value_offset + d[None, :], mask=mask, other=0.0)
        weights = weights.to(STORED).to(MULTIPLIED)
        acc = tl.dot(weights, v.to(MULTIPLIED), acc * shrink[:, None], input_precision="ieee")
    if SPLITS == 1:
        tl.store(out_ptr + out, (acc / total[:, None]).to(STORED), mask=inside_out)
    else:
        pair = row * NUM_KV_HEADS + kv_head
        head = (pair * SPLITS + split) * GROUP_PAD + g
        num_pairs = tl.num_programs(1) * NUM_KV_HEADS
        tl.store(partial_ptr + head[:, None] * BLOCK_D + d[None, :], acc, mask=g[:, None] < GROUP_PAD)
        tl.store(statistics_ptr + head, m, mask=g < GROUP_PAD)
        tl.store(statistics_ptr + num_pairs * SPLITS * GROUP_PAD + head, total, mask=g < GROUP_PAD)
        # All threads' stores come before the one thread's release.
        tl.debug_barrier()
        used = tl.maximum(tl.cdiv(cached, tl.maximum(part, 1)), 1)
        if tl.atomic_add(counters_ptr + pair, 1, sem="acq_rel") == used - 1:
            tl.store(counters_ptr + pair, 0)
            first = pair * SPLITS * GROUP_PAD
            l_ptr = statistics_ptr + num_pairs * SPLITS * GROUP_PAD
            y = _combine(partial_ptr, statistics_ptr, l_ptr, first, used, d, GROUP_PAD, BLOCK_D, SPLITS)
            h = tl.arange(0, GROUP_PAD)[:, None]
            y_inside = (h < GROUP) & d_inside[None, :]
            tl.store(out_ptr + h * HEAD_DIM + d[None, :], y.to(STORED), mask=y_inside)


@triton.jit
def _tile_pointers(
    key_ptr, blocks_ptr, start, end, TOKEN: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr
):
    # pointers to the keys of BLOCK_N tokens [BLOCK_N, 1], and which of the tokens there are [BLOCK_N]
    n = start + tl.arange(0, BLOCK_N)
    inside = n < end
    block = tl.load(blocks_ptr + n // BLOCK_SIZE, mask=inside, other=0)
    token = block.to(tl.int64) * BLOCK_SIZE + n % BLOCK_SIZE
    return key_ptr + token[:, None] * TOKEN, inside


@triton.jit
def _weigh(q, k, inside, scale, m, total, MULTIPLIED: tl.constexpr):
    # One step of the running softmax: weights [M, N], what earlier sums shrink by [M], new maximum and total [M].
    scores = tl.dot(q, tl.trans(k.to(MULTIPLIED)), input_precision="ieee") * scale
    scores = tl.where(inside[None, :], scores, float("-inf"))
    new_m = tl.maximum(m, tl.max(scores, axis=1))
    weights = tl.exp2(scores - new_m[:, None])
    shrink = tl.exp2(m - new_m)
    return weights, shrink, new_m, total * shrink + tl.sum(weights, axis=1)


@triton.jit
def _combine(
    partial_ptr, m_ptr, l_ptr, first, used, d, GROUP_PAD: tl.constexpr, BLOCK_D: tl.constexpr, SPLITS: tl.constexpr
):
    # [GROUP_PAD, BLOCK_D] f32
    split = tl.arange(0, SPLITS)[:, None]
    head = first + split * GROUP_PAD + tl.arange(0, GROUP_PAD)[None, :]
    valid = split < used
    m = tl.load(m_ptr + head, mask=valid, other=float("-inf"))
    share = tl.exp2(m - tl.max(m, axis=0)[None, :])
    total = tl.sum(tl.load(l_ptr + head, mask=valid, other=0.0) * share, axis=0)
    ptr = partial_ptr + head[:, :, None] * BLOCK_D + d[None, None, :]
    parts = tl.load(ptr, mask=valid[:, :, None], other=0.0)
    return tl.sum(parts * share[:, :, None], axis=0) / total[:, None]
