"""Attention of draft blocks over the paged cache: every query of a block sees the whole block, and all before it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels import MAX_COUNTERS, HeadRotation, block_attention


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
        self,
        plan: BlockAttentionPlan,
        qkv: Tensor,
        kv_cache: Tensor,
        rotation: HeadRotation | None = None,
        start_early: bool = False,
    ) -> Tensor:
        """Store K and V of the queries in their slots and attend; ``start_early`` as in kernels.decode_attention.

        Args:
            qkv: [r * Q, (Hq + 2 Hk) * D], normed and rotated, or as projected with ``rotation``; may be changed.
            kv_cache: [2, num_blocks, block_size, Hk, D] of one layer, changed in place.

        Returns:
            [r * Q, Hq * D].
        """
        return block_attention(
            qkv, kv_cache, plan.block_table, plan.seq_lens, plan.slot_mapping, rotation, max_seq_len=plan.max_seq_len,
            counters=self._counters, start_early=start_early, form=self.form,
        )  # fmt: skip
