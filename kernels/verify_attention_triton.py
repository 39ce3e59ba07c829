"""The Triton kernel of verify_attention.

As in the kernel of decode_attention a program serves the query heads of one KV head over one part of one request's
context, here those of several queries. With many requests all of a request's queries are one program's, so that a
context is read once however many drafts are verified. With few this step's own tokens are a part for themselves, and
everything but qkv is read before the wait: nothing is done one after the other that can be done at once.
"""

from kernels.head_rotation import rotation_factors
from kernels.paged_attention_triton import combine_parts, tile_pointers, weigh
from kernels.triton_support import tl, triton


@triton.jit(do_not_specialize=["num_reqs", "num_rows"])
def verify_attention_kernel(
    qkv_ptr,
    qkv_stride,
    kv_cache_ptr,
    value_offset,
    block_table_ptr,
    block_table_stride,
    seq_lens_ptr,
    query_start_loc_ptr,
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
    num_rows,
    PDL: tl.constexpr,
    UPCAST: tl.constexpr,
    EACH: tl.constexpr,
    QUERIES: tl.constexpr,
    GROUPS: tl.constexpr,
    PER_QUERY: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    SPLITS: tl.constexpr,
    OWN_PART: tl.constexpr,
):
    """See the head of this file; the grid is (Hk * GROUPS * SPLITS, requests).

    A request's queries are served by GROUPS programs, QUERIES each; row m of a block is head m % PER_QUERY of query
    m // PER_QUERY of a group, and of its BLOCK_M rows, as a matrix instruction takes them, ROWS may be somebody's. With
    OWN_PART part 0 is this step's tokens and the others are the context's; without it part 0 has both. Without
    query_start_loc every request has EACH queries, which see each other if they have a slot; with it a query sees those
    before it.
    """
    CAUSAL: tl.constexpr = query_start_loc_ptr is not None
    NUM_HEADS: tl.constexpr = PER_QUERY * NUM_KV_HEADS
    TOKEN: tl.constexpr = NUM_KV_HEADS * HEAD_DIM
    STORED: tl.constexpr = kv_cache_ptr.dtype.element_ty
    MULTIPLIED: tl.constexpr = tl.float32 if UPCAST else STORED
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    group = tl.program_id(0) // NUM_KV_HEADS % GROUPS
    split = tl.program_id(0) // (NUM_KV_HEADS * GROUPS)
    row = tl.program_id(1).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    d_inside = d < HEAD_DIM
    # Before the wait: all that the step's embedding came after.
    if CAUSAL:
        first = tl.load(query_start_loc_ptr + row).to(tl.int64)
        queries = (tl.load(query_start_loc_ptr + row + 1) - first).to(tl.int32)
        owned = tl.load(query_start_loc_ptr + num_reqs)
    else:
        first = row * EACH
        queries = EACH
        owned = num_reqs * EACH
    seq_len = tl.load(seq_lens_ptr + row)
    m = tl.arange(0, BLOCK_M)
    query = group * QUERIES + m // PER_QUERY
    is_query = (m < QUERIES * PER_QUERY) & (query < queries)
    token = first + query
    n = tl.arange(0, BLOCK_Q)
    is_new = n < queries
    slot = tl.load(slot_mapping_ptr + first + n, mask=is_new, other=-1)
    num_new = queries
    if not CAUSAL:
        is_new = slot >= 0
        num_new = tl.sum(is_new.to(tl.int32), axis=0)
    if OWN_PART:
        q_cos, q_sin = _angles(cos_sin_ptr, positions_ptr, token, is_query, d, d_inside, HEAD_DIM)
        is_read = is_new & (split + n * 0 == 0)
        k_cos, k_sin = _angles(cos_sin_ptr, positions_ptr, first + n, is_read, d, d_inside, HEAD_DIM)
    # The cache holds all but this step's tokens, which part 0 adds itself.
    cached = tl.maximum(seq_len - num_new, 0)
    part = tl.cdiv(tl.cdiv(cached, SPLITS - OWN_PART), BLOCK_N) * BLOCK_N
    begin = tl.maximum(split - OWN_PART, 0) * part
    end = tl.minimum(begin + part, cached)
    if OWN_PART:
        end = tl.where(split == 0, 0, end)
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
    head = kv_head * PER_QUERY + m % PER_QUERY
    out_row_ptr = out_ptr + token[:, None] * (NUM_HEADS * HEAD_DIM) + head[:, None] * HEAD_DIM + d[None, :]
    inside_out = is_query[:, None] & d_inside[None, :]
    if split == 0:
        # Zeros for the rows of no request, which are behind all others: a share for each request's programs.
        is_own = m[:, None] < PER_QUERY
        for idle in range(owned + tl.program_id(1), num_rows, num_reqs):
            idle_ptr = out_ptr + idle * (NUM_HEADS * HEAD_DIM) + head[:, None] * HEAD_DIM + d[None, :]
            tl.store(idle_ptr, tl.zeros([BLOCK_M, BLOCK_D], STORED), mask=is_own & d_inside[None, :])
        if not CAUSAL:  # noqa: SIM102, Triton must leave the inner one out
            if seq_len <= 0:
                tl.store(out_row_ptr, tl.zeros([BLOCK_M, BLOCK_D], STORED), mask=inside_out)
    if (queries <= group * QUERIES) | (seq_len <= 0):
        return
    if (split > 0) & (begin >= end):
        return
    if not OWN_PART:
        q_cos, q_sin = _angles(cos_sin_ptr, positions_ptr, token, is_query, d, d_inside, HEAD_DIM)
    q_ptr = qkv_ptr + token[:, None] * qkv_stride + head[:, None] * HEAD_DIM
    q = _rotated(q_ptr, is_query[:, None], q_cos, q_sin, d, d_inside, q_norm_ptr, cos_sin_ptr, eps, HEAD_DIM)
    q = q.to(STORED).to(MULTIPLIED)
    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    if (split == 0) & (num_new > 0):
        if not OWN_PART:
            k_cos, k_sin = _angles(cos_sin_ptr, positions_ptr, first + n, is_new, d, d_inside, HEAD_DIM)
        new_ptr = qkv_ptr + (first + n)[:, None] * qkv_stride + (NUM_HEADS + kv_head) * HEAD_DIM
        k = _rotated(new_ptr, is_new[:, None], k_cos, k_sin, d, d_inside, k_norm_ptr, cos_sin_ptr, eps, HEAD_DIM)
        k = k.to(STORED)
        v = tl.load(new_ptr + TOKEN + d[None, :], mask=is_new[:, None] & d_inside[None, :], other=0.0)
        store_ptr = key_ptr + slot[:, None] * TOKEN + d[None, :]
        # One group stores. A block of them: the interpreter cannot spread a boolean scalar over a block.
        has_slot = ((slot >= 0) & (group + n * 0 == 0))[:, None] & d_inside[None, :]
        tl.store(store_ptr, k, mask=has_slot)
        tl.store(store_ptr + value_offset, v, mask=has_slot)
        seen = is_new[None, :]
        if CAUSAL:
            # A query sees itself and those before it. Rows of no query see the first key: none may be without any.
            seen = seen & (n[None, :] <= query[:, None])
        weights, shrink, best, total = weigh(q, k, seen, scale, best, total, MULTIPLIED)
        weights = weights.to(STORED).to(MULTIPLIED)
        acc = tl.dot(weights, v.to(MULTIPLIED), acc, input_precision="ieee")
    if SPLITS > 1:
        if begin < end:
            weights, shrink, best, total = weigh(q, first_k, inside[None, :], scale, best, total, MULTIPLIED)
            weights = weights.to(STORED).to(MULTIPLIED)
            acc = tl.dot(weights, first_v.to(MULTIPLIED), acc * shrink[:, None], input_precision="ieee")
        begin += BLOCK_N
    for start in tl.range(begin, end, BLOCK_N):
        ptr, inside = tile_pointers(key_ptr, blocks_ptr, start, end, TOKEN, BLOCK_SIZE, BLOCK_N)
        mask = inside[:, None] & d_inside[None, :]
        k = tl.load(ptr + d[None, :], mask=mask, other=0.0)
        weights, shrink, best, total = weigh(q, k, inside[None, :], scale, best, total, MULTIPLIED)
        v = tl.load(ptr + value_offset + d[None, :], mask=mask, other=0.0)
        weights = weights.to(STORED).to(MULTIPLIED)
        acc = tl.dot(weights, v.to(MULTIPLIED), acc * shrink[:, None], input_precision="ieee")
    if SPLITS == 1:
        tl.store(out_row_ptr, (acc / total[:, None]).to(STORED), mask=inside_out)
    else:
        pair = (row * GROUPS + group) * NUM_KV_HEADS + kv_head
        at = (pair * SPLITS + split) * ROWS + m
        l_ptr = statistics_ptr + num_reqs.to(tl.int64) * (GROUPS * NUM_KV_HEADS * SPLITS * ROWS)
        tl.store(partial_ptr + at[:, None] * BLOCK_D + d[None, :], acc, mask=m[:, None] < ROWS)
        tl.store(statistics_ptr + at, best, mask=m < ROWS)
        tl.store(l_ptr + at, total, mask=m < ROWS)
        # All threads' stores come before the one thread's release.
        tl.debug_barrier()
        used = tl.cdiv(cached, tl.maximum(part, 1))
        used = used + 1 if OWN_PART else tl.maximum(used, 1)
        if tl.atomic_add(counters_ptr + pair, 1, sem="acq_rel") == used - 1:
            tl.store(counters_ptr + pair, 0)
            y = combine_parts(
                partial_ptr, statistics_ptr, l_ptr, pair * SPLITS * ROWS, used, d, ROWS, BLOCK_D, SPLITS
            )  # fmt: skip
            i = tl.arange(0, ROWS)
            own = group * QUERIES + i // PER_QUERY
            inside_y = ((i < QUERIES * PER_QUERY) & (own < queries))[:, None] & d_inside[None, :]
            y_ptr = out_ptr + ((first + own) * NUM_HEADS + kv_head * PER_QUERY + i % PER_QUERY)[:, None] * HEAD_DIM
            tl.store(y_ptr + d[None, :], y.to(STORED), mask=inside_y)


@triton.jit
def _angles(table_ptr, positions_ptr, token, inside, d, d_inside, HEAD_DIM: tl.constexpr):
    # Cosine and sine of each token's angles [M, D], as the table has them; zeros where there is no table.
    half: tl.constexpr = HEAD_DIM // 2
    if table_ptr is None:
        return 0.0, 0.0
    else:
        position = tl.load(positions_ptr + token, mask=inside, other=0)
        angle_ptr = table_ptr + position[:, None] * HEAD_DIM + tl.where(d < half, d, d - half)[None, :]
        mask = inside[:, None] & d_inside[None, :]
        return tl.load(angle_ptr, mask=mask, other=0.0), tl.load(angle_ptr + half, mask=mask, other=0.0)


@triton.jit
def _rotated(head_ptr, inside, cos, sin, d, d_inside, norm_ptr, table_ptr, eps, HEAD_DIM: tl.constexpr):
    # Heads [M, D] f32 after norm and RoPE, each row turned by its own angles; pointers [M, 1].
    half: tl.constexpr = HEAD_DIM // 2
    is_low = d < half
    mask = inside & d_inside[None, :]
    own, cross = rotation_factors(d, d_inside, norm_ptr, None, HEAD_DIM)
    x = tl.load(head_ptr + d[None, :], mask=mask, other=0.0).to(tl.float32)
    y = x * own[None, :]
    if table_ptr is not None:
        partner = tl.load(head_ptr + tl.where(is_low, d + half, d - half)[None, :], mask=mask, other=0.0)
        turned = partner.to(tl.float32) * cross[None, :] * sin.to(tl.float32)
        y = y * cos.to(tl.float32) + tl.where(is_low[None, :], -turned, turned)
    if norm_ptr is not None:
        y *= 1.0 / tl.sqrt_rn(tl.sum(x * x, axis=1) / HEAD_DIM + eps)[:, None]
    return y
