"""Attention of draft blocks over the paged cache: every query of a block sees the whole block, and all before it.

All queries of a block see the same keys. So a block is one decode with Q times as many query heads a KV head, and the
decode kernel serves it: keys are read once a block, and its splits, its captured launch and its other forms come along.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels import MAX_COUNTERS, HeadRotation, decode_attention, store_kv


@dataclass(frozen=True, slots=True)
class BlockAttentionPlan:
    """What all layers of a draft share: r requests with Q queries each."""

    # [r * Q] i64, -1 stores nothing; those with a slot come first in each block
    slot_mapping: Tensor
    # [r, B] i32
    block_table: Tensor
    # [r] i32, the stored queries counted; a request of 0 gets zeros
    seq_lens: Tensor
    # An upper bound of seq_lens, for the torch form
    max_seq_len: int


class BlockAttention:
    """Grouped-query attention that isn't causal inside a block. ``form`` is a kernel form (see kernels.dispatch)."""

    def __init__(self, device: torch.device, form: str = "auto") -> None:
        self.form = form
        self._counters = torch.zeros(MAX_COUNTERS, dtype=torch.int32, device=device)

    def forward(
        self, plan: BlockAttentionPlan, qkv: Tensor, kv_cache: Tensor, rotation: HeadRotation | None = None
    ) -> Tensor:
        """Store K and V of the queries in their slots, then attend.

        Args:
            qkv: [r * Q, (Hq + 2 Hk) * D], normed and rotated, or as projected with ``rotation``; may be changed.
            kv_cache: [2, num_blocks, block_size, Hk, D] of one layer, changed in place.

        Returns:
            [r * Q, Hq * D].
        """
        store_kv(qkv, kv_cache, plan.slot_mapping, rotation, form=self.form)
        num_queries = qkv.shape[0] // max(plan.seq_lens.shape[0], 1)
        return decode_attention(
            qkv, kv_cache, plan.block_table, plan.seq_lens, None, max_seq_len=plan.max_seq_len,
            num_queries=max(num_queries, 1), counters=self._counters, form=self.form,
        )  # fmt: skip
