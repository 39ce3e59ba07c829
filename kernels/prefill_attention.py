"""Attention of prefills, their chunks and verified drafts over the paged KV cache: any query lengths, one launch.

A program owns a tile of one request's queries, with all query heads of one KV head as its rows. It finds its request by
a binary search over query_start_loc, so nothing is prepared on the host and the launch may be captured.
"""

import torch

from kernels.attention_forms import attend_loop, attend_torch
from kernels.dispatch import check_tensors, resolve_form, segment_of
from kernels.store_kv import check_qkv
from kernels.triton_support import launch, tl, triton

_LOG2_E = 1.4426950408889634


def prefill_attention(
    # [t, (Hq + 2 Hk) * D], rotated; K and V are read from the cache
    qkv: torch.Tensor,
    # [2 (K, V), num_blocks, block_size, Hk, D], with this step's tokens stored
    kv_cache: torch.Tensor,
    # [r, B] i32
    block_table: torch.Tensor,
    # [r] i32, this step's tokens counted
    seq_lens: torch.Tensor,
    # [r + 1] i32: request i owns rows query_start_loc[i] : query_start_loc[i + 1] of qkv
    query_start_loc: torch.Tensor,
    # [t, Hq * D]; rows of no request keep what they hold
    out: torch.Tensor,
    *,
    num_tokens: int,
    max_seq_len: int,
    form: str = "auto",
) -> None:
    """Causal attention of the requests' queries, which are the last tokens of their sequences; written to `out`.

    `num_tokens` is an upper bound of query_start_loc[r] - query_start_loc[0], `max_seq_len` one of seq_lens; only the
    torch form needs the latter.

    Raises:
        ValueError: a wrong dtype, shape or form.
    """
    num_heads, head_dim = check_qkv(qkv, kv_cache)
    num_reqs = query_start_loc.shape[0] - 1
    check_tensors(torch.int32, 2, num_reqs, block_table=block_table)
    check_tensors(torch.int32, 1, num_reqs, seq_lens=seq_lens)
    check_tensors(torch.int32, 1, 1, query_start_loc=query_start_loc)
    check_tensors(qkv.dtype, 2, qkv.shape[0], out=out)
    form = resolve_form(form, qkv)
    if num_reqs == 0:
        return
    q = qkv[:, : num_heads * head_dim].view(-1, num_heads, head_dim)
    if form == "torch":
        _torch(q, kv_cache, block_table, seq_lens, query_start_loc, out, max_seq_len)
        return
    if form == "loop":
        for i in range(num_reqs):
            begin, end = int(query_start_loc[i]), int(query_start_loc[i + 1])
            for token in range(begin, end):
                visible = int(seq_lens[i]) - (end - 1 - token)
                out[token] = attend_loop(q[token], kv_cache, block_table[i], visible).flatten()
        return
    block_size, num_kv_heads = kv_cache.shape[2:4]
    group = num_heads // num_kv_heads
    block_m = max(64 if form == "triton" else 16, 1 << (group - 1).bit_length())
    block_q = block_m // group
    launch(
        _prefill_attention_kernel,
        (num_tokens // block_q + num_reqs, num_kv_heads),
        qkv,
        qkv.stride(0),
        kv_cache,
        kv_cache.stride(0),
        block_table,
        block_table.stride(0),
        seq_lens,
        query_start_loc,
        num_reqs,
        head_dim**-0.5 * _LOG2_E,
        out,
        out.stride(0),
        form=form,
        UPCAST=form == "interpret",
        GROUP=group,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_D=max(16, 1 << (head_dim - 1).bit_length()),
        BLOCK_SIZE=block_size,
        BLOCK_M=block_m,
        BLOCK_Q=block_q,
        BLOCK_N=64,
    )


def _torch(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    out: torch.Tensor,
    max_seq_len: int,
) -> None:
    num_tokens, num_reqs = q.shape[0], query_start_loc.shape[0] - 1
    first = query_start_loc[0]
    req, offset, inside = segment_of(query_start_loc - first, num_reqs, num_tokens)
    token = (first + torch.arange(num_tokens, device=q.device)).clamp_(max=num_tokens - 1)
    query_len = query_start_loc[1:] - query_start_loc[:-1]
    visible = torch.where(inside, seq_lens[req] - query_len[req] + offset + 1, 0)
    result = attend_torch(q[token], kv_cache, block_table[req], visible, max_seq_len)
    # Rows in front of the first request are those that the shifted index leaves out.
    row = torch.arange(num_tokens, device=q.device)
    owned = (row >= first) & (row < query_start_loc[-1])
    out.copy_(torch.where(owned.view(-1, 1), result[(row - first).clamp_(min=0)], out))


# The decodes before them shift where a batch's prompts begin: another alignment must not be another kernel to compile.
@triton.jit(
    do_not_specialize=["num_reqs"],
    do_not_specialize_on_alignment=["block_table_ptr", "seq_lens_ptr", "query_start_loc_ptr"],
)
def _prefill_attention_kernel(
    qkv_ptr,
    qkv_stride,
    kv_cache_ptr,
    value_offset,
    block_table_ptr,
    block_table_stride,
    seq_lens_ptr,
    query_start_loc_ptr,
    num_reqs,
    scale,
    out_ptr,
    out_stride,
    UPCAST: tl.constexpr,
    GROUP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    TOKEN: tl.constexpr = NUM_KV_HEADS * HEAD_DIM
    STORED: tl.constexpr = kv_cache_ptr.dtype.element_ty
    MULTIPLIED: tl.constexpr = tl.float32 if UPCAST else STORED
    # The longest context a request has comes in its last tile: start there.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    first = tl.load(query_start_loc_ptr)
    # Request i has its tiles from (its first row) // BLOCK_Q + i on: find the last i that starts at or before this one.
    low = 0
    high = num_reqs - 1
    while low < high:
        middle = (low + high + 1) // 2
        if (tl.load(query_start_loc_ptr + middle) - first) // BLOCK_Q + middle <= tile:
            low = middle
        else:
            high = middle - 1
    begin = tl.load(query_start_loc_ptr + low)
    query_len = tl.load(query_start_loc_ptr + low + 1) - begin
    tile_begin = (tile - ((begin - first) // BLOCK_Q + low)) * BLOCK_Q
    if tile_begin >= query_len:
        return
    row = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    d_inside = d < HEAD_DIM
    query = tile_begin + row // GROUP
    q_inside = (query < query_len) & (row < BLOCK_Q * GROUP)
    token = (begin + query).to(tl.int64)
    column = (kv_head * GROUP + row % GROUP) * HEAD_DIM
    q_mask = q_inside[:, None] & d_inside[None, :]
    q = tl.load(qkv_ptr + (token * qkv_stride + column)[:, None] + d[None, :], mask=q_mask, other=0.0).to(MULTIPLIED)
    seq_len = tl.load(seq_lens_ptr + low)
    last = seq_len - query_len + query
    end = tl.minimum(seq_len, seq_len - query_len + tile_begin + BLOCK_Q)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    key_ptr = kv_cache_ptr + kv_head * HEAD_DIM
    blocks_ptr = block_table_ptr + low * block_table_stride
    for start in tl.range(0, end, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        inside = n < end
        block = tl.load(blocks_ptr + n // BLOCK_SIZE, mask=inside, other=0)
        slot = block.to(tl.int64) * BLOCK_SIZE + n % BLOCK_SIZE
        tile_ptr = key_ptr + slot[:, None] * TOKEN + d[None, :]
        mask = inside[:, None] & d_inside[None, :]
        k = tl.load(tile_ptr, mask=mask, other=0.0)
        scores = tl.dot(q, tl.trans(k.to(MULTIPLIED)), input_precision="ieee") * scale
        scores = tl.where(n[None, :] <= last[:, None], scores, float("-inf"))
        new_m = tl.maximum(m, tl.max(scores, axis=1))
        weights = tl.exp2(scores - new_m[:, None])
        shrink = tl.exp2(m - new_m)
        total = total * shrink + tl.sum(weights, axis=1)
        v = tl.load(tile_ptr + value_offset, mask=mask, other=0.0)
        weights = weights.to(STORED).to(MULTIPLIED)
        acc = tl.dot(weights, v.to(MULTIPLIED), acc * shrink[:, None], input_precision="ieee")
        m = new_m
    out_offset = (token * out_stride + column)[:, None] + d[None, :]
    tl.store(out_ptr + out_offset, (acc / total[:, None]).to(STORED), mask=q_mask)
