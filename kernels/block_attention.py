"""Attention of a parallel drafter's blocks over the paged KV cache: all queries of a request see each other."""

import torch

from kernels.attention_forms import attend_loop, attend_torch
from kernels.dispatch import check_tensors, resolve_form
from kernels.head_rotation import HeadRotation
from kernels.store_kv import check_qkv, store_kv
from kernels.verify_attention import MAX_QUERIES, launch_verification


def block_attention(
    # [r * Q, (Hq + 2 Hk) * D]; request i has the rows i * Q : (i + 1) * Q
    qkv: torch.Tensor,
    # [2 (K, V), num_blocks, block_size, Hk, D], changed in place
    kv_cache: torch.Tensor,
    # [r, B] i32
    block_table: torch.Tensor,
    # [r] i32, this step's stored tokens counted
    seq_lens: torch.Tensor,
    # [>= r * Q] i64
    slot_mapping: torch.Tensor,
    rotation: HeadRotation | None = None,
    *,
    max_seq_len: int,
    # i32 [MAX_COUNTERS], all zero, and again zero when the kernel has ended
    counters: torch.Tensor | None = None,
    start_early: bool = False,
    form: str = "auto",
) -> torch.Tensor:
    """Rotate q and k, store K and V in their slots and attend to all seq_lens tokens; returns a new [r * Q, Hq * D].

    Queries of slot -1 are a request's last ones; they are not counted in seq_lens, and nobody sees them. The queries of
    a request of seq_lens 0 give zeros. No request may read a slot that another one stores here. qkv may be changed.
    `max_seq_len` is an upper bound of seq_lens that only the torch form needs. `start_early`: as in `decode_attention`.

    Raises:
        ValueError: a wrong dtype, shape or form, or more than MAX_QUERIES queries a request.
    """
    num_heads, head_dim = check_qkv(qkv, kv_cache)
    num_rows, num_reqs = qkv.shape[0], seq_lens.shape[0]
    check_tensors(torch.int32, 1, 1, seq_lens=seq_lens)
    check_tensors(torch.int32, 2, num_reqs, block_table=block_table)
    check_tensors(torch.int64, 1, num_rows, slot_mapping=slot_mapping)
    num_queries, rest = divmod(num_rows, num_reqs)
    if rest or not 1 <= num_queries <= MAX_QUERIES:
        raise ValueError(f"qkv must have 1 to {MAX_QUERIES} rows for each of {num_reqs} requests, got {num_rows} rows")
    if rotation is not None:
        rotation.check(num_rows, head_dim)
    form = resolve_form(form, qkv)
    if form not in ("torch", "loop"):
        return launch_verification(
            qkv, kv_cache, block_table, seq_lens, None, slot_mapping, rotation, num_queries, counters, start_early, form
        )
    store_kv(qkv, kv_cache, slot_mapping, rotation, form=form)
    q = qkv[:, : num_heads * head_dim].view(num_reqs, num_queries, num_heads, head_dim)
    if form == "torch":
        return _torch(q, kv_cache, block_table, seq_lens, max_seq_len)
    out = qkv.new_zeros(num_reqs, num_queries, num_heads * head_dim)
    for i in range(num_reqs):
        for j in range(num_queries):
            if int(seq_lens[i]) > 0:
                out[i, j] = attend_loop(q[i, j], kv_cache, block_table[i], int(seq_lens[i])).flatten()
    return out.view(num_rows, -1)


def _torch(
    # [r, Q, Hq, D]
    q: torch.Tensor, kv_cache: torch.Tensor, block_table: torch.Tensor, seq_lens: torch.Tensor, max_seq_len: int
) -> torch.Tensor:  # fmt: skip
    (r, num_queries, num_heads, head_dim), num_kv_heads = q.shape, kv_cache.shape[3]
    # All queries of a request that share a KV head side by side, so that its keys are gathered once.
    heads = q.view(r, num_queries, num_kv_heads, -1, head_dim).transpose(1, 2).reshape(r, -1, head_dim)
    attended = attend_torch(heads, kv_cache, block_table, seq_lens, max_seq_len)
    by_query = attended.view(r, num_kv_heads, num_queries, -1).transpose(1, 2)
    return by_query.reshape(r * num_queries, num_heads * head_dim)
