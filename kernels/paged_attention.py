"""Decode attention over the paged KV cache: one query token a request, fused with its norm, RoPE and KV store."""

import torch

from kernels.attention_forms import attend_loop, attend_torch
from kernels.dispatch import check_tensors, resolve_form
from kernels.head_rotation import HeadRotation
from kernels.paged_attention_triton import decode_attention_kernel
from kernels.store_kv import check_qkv, store_kv
from kernels.triton_support import can_launch_early, launch

MAX_COUNTERS = 1024
_MAX_SPLITS = 32
"""Programs that share a context at most, whichever kernel asks."""
LOG2_E = 1.4426950408889634


def decode_attention(
    # [t, (Hq + 2 Hk) * D]; row i is the one token of request i
    qkv: torch.Tensor,
    # [2 (K, V), num_blocks, block_size, Hk, D], changed in place
    kv_cache: torch.Tensor,
    # [r, B] i32
    block_table: torch.Tensor,
    # [r] i32, this step's token counted
    seq_lens: torch.Tensor,
    # [>= t] i64, or None: every key is stored, and q is rotated
    slot_mapping: torch.Tensor | None,
    rotation: HeadRotation | None = None,
    *,
    max_seq_len: int,
    # i32 [MAX_COUNTERS], all zero, and again zero when the kernel has ended
    counters: torch.Tensor | None = None,
    # [t, Hq * D]
    out: torch.Tensor | None = None,
    start_early: bool = False,
    form: str = "auto",
) -> torch.Tensor:
    """Rotate q and k, store K and V in their slots and attend; returns `out` or a new [t, Hq * D].

    Rows without a request, those past r and those of seq_len 0, give zeros and touch no cache. qkv may be changed.
    `max_seq_len` is an upper bound of seq_lens that only the torch form needs. With `start_early` the launch may start
    before kernels in front of it have ended (see `can_launch_early`): of what is read here they may write qkv alone.

    Raises:
        ValueError: a wrong dtype, shape or form, or a rotation without a slot_mapping.
    """
    num_heads, head_dim = check_qkv(qkv, kv_cache)
    num_rows = qkv.shape[0]
    check_tensors(torch.int32, 2, block_table=block_table)
    check_tensors(torch.int32, 1, seq_lens=seq_lens)
    if slot_mapping is not None:
        check_tensors(torch.int64, 1, num_rows, slot_mapping=slot_mapping)
    elif rotation is not None:
        raise ValueError("a rotation without a slot_mapping: call store_kv first, which rotates and stores")
    if rotation is not None:
        rotation.check(num_rows, head_dim)
    num_reqs = min(num_rows, block_table.shape[0], seq_lens.shape[0])
    if out is None:
        out = qkv.new_empty(num_rows, num_heads * head_dim)
    elif out.shape != (num_rows, num_heads * head_dim) or not out.is_contiguous():
        raise ValueError(f"out must be contiguous [{num_rows}, {num_heads * head_dim}], got {tuple(out.shape)}")
    form = resolve_form(form, qkv)
    if form in ("torch", "loop"):
        if slot_mapping is not None:
            store_kv(qkv, kv_cache, slot_mapping, rotation, form=form)
        q = qkv[:num_reqs, : num_heads * head_dim].view(num_reqs, num_heads, head_dim)
        out.zero_()
        if form == "torch":
            out[:num_reqs] = attend_torch(q, kv_cache, block_table[:num_reqs], seq_lens[:num_reqs], max_seq_len)
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
    slot_mapping: torch.Tensor | None,
    rotation: HeadRotation | None,
    num_reqs: int,
    counters: torch.Tensor | None,
    out: torch.Tensor,
    form: str,
    start_early: bool,
) -> None:
    num_rows, (block_size, num_kv_heads, head_dim) = qkv.shape[0], kv_cache.shape[2:]
    group = qkv.shape[1] // head_dim // num_kv_heads - 2
    group_pad = 1 << (group - 1).bit_length()
    block_d = max(16, 1 << (head_dim - 1).bit_length())
    pairs = num_rows * num_kv_heads
    # The fastest of those measured on an H200, as the tile: beyond, parts cost more to combine than they save.
    splits = num_splits(pairs, 16 if pairs <= 64 else 8)
    # What is combined lies in the registers of as few threads as can hold it.
    block_n, num_warps = (32, 1) if splits * group_pad * block_d <= 4096 else (64, 4)
    partial = statistics = None
    if splits > 1:
        shape = (pairs * splits, group_pad)
        partial = torch.empty(*shape, block_d, dtype=torch.float32, device=qkv.device)
        statistics = torch.empty(2, *shape, dtype=torch.float32, device=qkv.device)
        if counters is None:
            counters = torch.zeros(MAX_COUNTERS, dtype=torch.int32, device=qkv.device)
    early = start_early and can_launch_early(form, qkv)
    launch(
        decode_attention_kernel,
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
        head_dim**-0.5 * LOG2_E,
        out,
        partial,
        statistics,
        counters,
        num_reqs,
        form=form,
        num_warps=num_warps,
        num_stages=2,
        pdl=early,
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


def num_splits(num_pairs: int, most: int = _MAX_SPLITS) -> int:
    """How many programs share the context of each pair of a request and a KV head: a power of two, at most `most`.

    About sixteen programs of a warp for each multiprocessor in all, so that those with long contexts don't end alone.
    """
    wanted = min(most, _MAX_SPLITS, 2048 // max(1, num_pairs))
    return 1 << max(0, wanted.bit_length() - 1)
