"""The Triton kernel of decode_attention.

A program serves the query heads of one KV head (so that K and V are read once) over one part of one request's context.
How many parts there are follows from the number of rows alone, and lengths are read on the device, so a captured launch
serves every length. With several parts the program that ends last combines them.
"""

from kernels.head_rotation import rotate_block, rotation_factors
from kernels.triton_support import tl, triton


@triton.jit(do_not_specialize=["num_reqs"])
def decode_attention_kernel(
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
    """See the head of this file; the grid is (Hk * SPLITS, requests)."""
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
    if slot_mapping_ptr is not None:
        slot = tl.load(slot_mapping_ptr + row)
    table_ptr = cos_sin_ptr
    if cos_sin_ptr is not None:
        table_ptr = cos_sin_ptr + tl.load(positions_ptr + row) * HEAD_DIM
    q_own, q_cross = rotation_factors(d, d_inside, q_norm_ptr, table_ptr, HEAD_DIM)
    k_own, k_cross = rotation_factors(d, d_inside, k_norm_ptr, table_ptr, HEAD_DIM)
    # The cache holds all, or all but this step's token, which split 0 adds itself.
    cached = tl.maximum(seq_len - (0 if slot_mapping_ptr is None else 1), 0)
    part = tl.cdiv(tl.cdiv(cached, SPLITS), BLOCK_N) * BLOCK_N
    begin = split * part
    end = tl.minimum(begin + part, cached)
    key_ptr = kv_cache_ptr + kv_head * HEAD_DIM
    blocks_ptr = block_table_ptr + row * block_table_stride
    if SPLITS > 1:
        ptr, inside = tile_pointers(key_ptr, blocks_ptr, begin, end, TOKEN, BLOCK_SIZE, BLOCK_N)
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
    if slot_mapping_ptr is not None:  # noqa: SIM102, Triton must leave the inner one out
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
        weights, shrink, m, total = weigh(q, first_k, inside[None, :], scale, m, total, MULTIPLIED)
        weights = weights.to(STORED).to(MULTIPLIED)
        acc = tl.dot(weights, first_v.to(MULTIPLIED), acc * shrink[:, None], input_precision="ieee")
        begin += BLOCK_N
    for start in tl.range(begin, end, BLOCK_N):
        ptr, inside = tile_pointers(key_ptr, blocks_ptr, start, end, TOKEN, BLOCK_SIZE, BLOCK_N)
        mask = inside[:, None] & d_inside[None, :]
        k = tl.load(ptr + d[None, :], mask=mask, other=0.0)
        weights, shrink, m, total = weigh(q, k, inside[None, :], scale, m, total, MULTIPLIED)
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
            y = combine_parts(partial_ptr, statistics_ptr, l_ptr, first, used, d, GROUP_PAD, BLOCK_D, SPLITS)
            h = tl.arange(0, GROUP_PAD)
            y_inside = (h < GROUP)[:, None] & d_inside[None, :]
            tl.store(out_ptr + h[:, None] * HEAD_DIM + d[None, :], y.to(STORED), mask=y_inside)


@triton.jit
def tile_pointers(
    key_ptr, blocks_ptr, start, end, TOKEN: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Pointers to the keys of BLOCK_N tokens [BLOCK_N, 1], and which of the tokens there are [BLOCK_N]."""
    n = start + tl.arange(0, BLOCK_N)
    inside = n < end
    block = tl.load(blocks_ptr + n // BLOCK_SIZE, mask=inside, other=0)
    token = block.to(tl.int64) * BLOCK_SIZE + n % BLOCK_SIZE
    return key_ptr + token[:, None] * TOKEN, inside


@triton.jit
def weigh(q, k, inside, scale, m, total, MULTIPLIED: tl.constexpr):
    """One step of the running softmax: weights [M, N], what earlier sums shrink by [M], new maximum and total [M].

    `inside`: which keys there are, [1, N], or are seen, [M, N].
    """
    scores = tl.dot(q, tl.trans(k.to(MULTIPLIED)), input_precision="ieee") * scale
    scores = tl.where(inside, scores, float("-inf"))
    new_m = tl.maximum(m, tl.max(scores, axis=1))
    weights = tl.exp2(scores - new_m[:, None])
    shrink = tl.exp2(m - new_m)
    return weights, shrink, new_m, total * shrink + tl.sum(weights, axis=1)


@triton.jit
def combine_parts(
    partial_ptr, m_ptr, l_ptr, first, used, d, GROUP_PAD: tl.constexpr, BLOCK_D: tl.constexpr, SPLITS: tl.constexpr
):
    """The attention of `used` parts of a context together, [GROUP_PAD, BLOCK_D] f32."""
    if SPLITS > 4:
        if used <= SPLITS // 2:
            y = _combine(partial_ptr, m_ptr, l_ptr, first, used, d, GROUP_PAD, BLOCK_D, SPLITS // 2)
        else:
            y = _combine(partial_ptr, m_ptr, l_ptr, first, used, d, GROUP_PAD, BLOCK_D, SPLITS)
        return y
    else:
        return _combine(partial_ptr, m_ptr, l_ptr, first, used, d, GROUP_PAD, BLOCK_D, SPLITS)


@triton.jit
def _combine(
    partial_ptr, m_ptr, l_ptr, first, used, d, GROUP_PAD: tl.constexpr, BLOCK_D: tl.constexpr, SPLITS: tl.constexpr
):
    split = tl.arange(0, SPLITS)[:, None]
    head = first + split * GROUP_PAD + tl.arange(0, GROUP_PAD)[None, :]
    valid = split < used
    m = tl.load(m_ptr + head, mask=valid, other=float("-inf"))
    share = tl.exp2(m - tl.max(m, axis=0)[None, :])
    total = tl.sum(tl.load(l_ptr + head, mask=valid, other=0.0) * share, axis=0)
    ptr = partial_ptr + head[:, :, None] * BLOCK_D + d[None, None, :]
    parts = tl.load(ptr, mask=valid[:, :, None], other=0.0)
    return tl.sum(parts * share[:, :, None], axis=0) / total[:, None]
