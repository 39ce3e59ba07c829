"""Verification attention over the paged KV cache: a few query tokens a request, fused with norm, RoPE and KV store.

What drafts and the token before them are to decode attention: each query sees its request's context, the queries before
it and itself. How many queries a request has is read on the device.
"""

from typing import NamedTuple

import torch

from kernels.dispatch import check_tensors, resolve_form
from kernels.head_rotation import HeadRotation
from kernels.paged_attention import LOG2_E, MAX_COUNTERS, decode_attention, num_splits
from kernels.store_kv import check_qkv, store_kv
from kernels.token_rows import token_rows
from kernels.triton_support import can_launch_early, launch
from kernels.verify_attention_triton import verify_attention_kernel

MAX_QUERIES = 64
_VERY_FEW, _FEW = 2, 16
"""Requests."""
_COMBINED = 8192
"""Elements that the program which combines the parts of a context holds at most: 64 a thread of four warps."""
_MAX_ROWS = 128
"""Heads of queries that one program serves."""


def verify_attention(
    # [t, (Hq + 2 Hk) * D]
    qkv: torch.Tensor,
    # [2 (K, V), num_blocks, block_size, Hk, D], changed in place
    kv_cache: torch.Tensor,
    # [r, B] i32
    block_table: torch.Tensor,
    # [r] i32, this step's tokens counted
    seq_lens: torch.Tensor,
    # [r + 1] i32: request i has the rows query_start_loc[i] : query_start_loc[i + 1]; none is fine
    query_start_loc: torch.Tensor,
    # [>= t] i64
    slot_mapping: torch.Tensor,
    rotation: HeadRotation | None = None,
    *,
    # no request has more queries; 1 .. MAX_QUERIES
    max_query_len: int,
    max_seq_len: int,
    # i32 [MAX_COUNTERS], all zero, and again zero when the kernel has ended
    counters: torch.Tensor | None = None,
    start_early: bool = False,
    form: str = "auto",
) -> torch.Tensor:
    """Rotate q and k, store K and V in their slots and attend causally; returns a new [t, Hq * D].

    Rows behind the last request's give zeros. No request may read a slot that another one stores here. qkv may be
    changed. `max_seq_len` is an upper bound of seq_lens that only the torch form needs. `start_early`: as in
    `decode_attention`.

    Raises:
        ValueError: a wrong dtype, shape or form, or more queries than MAX_QUERIES.
    """
    _, head_dim = check_qkv(qkv, kv_cache)
    num_rows, num_reqs = qkv.shape[0], seq_lens.shape[0]
    check_tensors(torch.int32, 1, 1, seq_lens=seq_lens)
    check_tensors(torch.int32, 2, num_reqs, block_table=block_table)
    check_tensors(torch.int32, 1, num_reqs + 1, query_start_loc=query_start_loc)
    check_tensors(torch.int64, 1, num_rows, slot_mapping=slot_mapping)
    if not 1 <= max_query_len <= MAX_QUERIES:
        raise ValueError(f"max_query_len={max_query_len}: 1 to {MAX_QUERIES} queries a request are possible")
    if rotation is not None:
        rotation.check(num_rows, head_dim)
    form = resolve_form(form, qkv)
    if form in ("torch", "loop"):
        store_kv(qkv, kv_cache, slot_mapping, rotation, form=form)
        rows, seen = token_rows(query_start_loc, seq_lens, block_table, num_rows, form=form)
        return decode_attention(qkv, kv_cache, rows, seen, None, max_seq_len=max_seq_len, form=form)
    return launch_verification(
        qkv, kv_cache, block_table, seq_lens, query_start_loc, slot_mapping, rotation, max_query_len, counters,
        start_early, form,
    )  # fmt: skip


def launch_verification(
    qkv: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor | None,
    slot_mapping: torch.Tensor,
    rotation: HeadRotation | None,
    max_query_len: int,
    counters: torch.Tensor | None,
    start_early: bool,
    form: str,
) -> torch.Tensor:
    """The kernel over checked arguments. Without `query_start_loc` each request has max_query_len queries that are a
    block: see `block_attention`."""
    num_rows, num_reqs = qkv.shape[0], seq_lens.shape[0]
    num_kv_heads, head_dim = kv_cache.shape[3:]
    num_heads = qkv.shape[1] // head_dim - 2 * num_kv_heads
    per_query = num_heads // num_kv_heads
    block_d = max(16, 1 << (head_dim - 1).bit_length())
    tiles = _tiles(num_reqs, num_kv_heads, per_query, max_query_len, block_d)
    out = qkv.new_empty(num_rows, num_heads * head_dim)
    rows = 1 << (tiles.queries * per_query - 1).bit_length()
    partial = statistics = None
    if tiles.splits > 1:
        shape = (num_reqs * tiles.groups * num_kv_heads * tiles.splits, rows)
        partial = torch.empty(*shape, block_d, dtype=torch.float32, device=qkv.device)
        statistics = torch.empty(2, *shape, dtype=torch.float32, device=qkv.device)
        if counters is None:
            counters = torch.zeros(MAX_COUNTERS, dtype=torch.int32, device=qkv.device)
    early = start_early and can_launch_early(form, qkv)
    launch(
        verify_attention_kernel,
        (num_kv_heads * tiles.groups * tiles.splits, num_reqs),
        qkv,
        qkv.stride(0),
        kv_cache,
        kv_cache.stride(0),
        block_table,
        block_table.stride(0),
        seq_lens,
        query_start_loc,
        slot_mapping,
        rotation.positions if rotation else None,
        rotation.cos_sin if rotation else None,
        rotation.q_norm if rotation else None,
        rotation.k_norm if rotation else None,
        rotation.eps if rotation else 0.0,
        head_dim**-0.5 * LOG2_E,
        out,
        partial,
        statistics,
        counters,
        num_reqs,
        num_rows,
        form=form,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        pdl=early,
        UPCAST=form == "interpret",
        EACH=max_query_len if query_start_loc is None else 0,
        QUERIES=tiles.queries,
        GROUPS=tiles.groups,
        PER_QUERY=per_query,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_D=block_d,
        BLOCK_SIZE=kv_cache.shape[2],
        ROWS=rows,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        BLOCK_Q=max(16, 1 << (max_query_len - 1).bit_length()),
        SPLITS=tiles.splits,
        OWN_PART=int(tiles.has_own_part),
    )
    return out


class _Tiles(NamedTuple):
    """A request's queries are shared by `groups` programs, its context by `splits`, of which the first may have nothing
    but this step's tokens; `block_n` tokens a read."""

    queries: int
    groups: int
    splits: int
    has_own_part: bool
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def _tiles(num_reqs: int, num_kv_heads: int, per_query: int, max_query_len: int, block_d: int) -> _Tiles:
    """The fastest of those measured on an H200, in place, with SmolLM2's heads.

    With few requests what counts is how little a program has to do one after the other: a query alone by one warp, or
    the 16 rows of heads that a matrix instruction takes at least. With many, how often a context is read.
    """
    # A power of two, so that there are few kernels.
    queries = 1 << (max_query_len - 1).bit_length()
    most = 1 if num_reqs <= _VERY_FEW else 16 // per_query if num_reqs <= _FEW else _MAX_ROWS // per_query
    own = min(max(most, 1), queries)
    groups = -(-queries // own)
    block_m = max(16, 1 << (own * per_query - 1).bit_length())
    size = block_m * block_d
    pairs = num_reqs * num_kv_heads
    splits = num_splits(pairs) if pairs * groups <= MAX_COUNTERS else 1
    if num_reqs <= _VERY_FEW:
        parts, block_n = (16, 32) if queries <= 2 else (8, 64)
        splits = max(1, min(splits, parts, _COMBINED // 2 // (block_d << (per_query - 1).bit_length())))
        return _Tiles(own, groups, splits, splits > 2, block_m, block_n, 1, 2)
    if num_reqs <= _FEW:
        splits = max(1, min(splits, 4, _COMBINED // size))
        return _Tiles(own, groups, splits, splits > 2, block_m, 128 if block_d <= 64 else 64, 4, 2)
    if size <= 1024:
        return _Tiles(own, groups, max(1, min(splits // 2, _COMBINED // 2 // size)), False, block_m, 32, 1, 3)
    splits = max(1, min(splits // 4, _COMBINED // size))
    if size <= 2048 and splits == 1:
        return _Tiles(own, groups, 1, False, block_m, 32, 1, 3)
    return _Tiles(own, groups, splits, False, block_m, 64, 4, 2)
