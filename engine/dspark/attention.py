"""Attention of draft blocks over the paged cache: every query of a block sees the whole block, and all before it.

All queries of a block see the same keys. So a block is one decode with Q times as many query heads a KV head, and the
decode kernel serves it: keys are read once a block, and its splits, its captured launch and its other forms come along.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels import MAX_COUNTERS, decode_attention, store_kv


@dataclass(frozen=True, slots=True)
class BlockAttentionPlan:
    """What all layers of a draft share: r requests with Q queries each."""

    # [r * Q] i64, -1 stores nothing
    slot_mapping: Tensor
    # [r, B] i32
    block_table: Tensor
    # [r] i32
    seq_lens: Tensor
    max_seq_len: int
    # [r] i64: the last query of each block whose key is stored, which the decode kernel takes from its row
    last_stored: Tensor
    # [r] i64, all -1: by then every key is stored
    no_slots: Tensor


class BlockAttention:
    """Grouped-query attention that isn't causal inside a block. ``form`` is a kernel form (see kernels.dispatch)."""

    def __init__(
        self, num_heads: int, num_kv_heads: int, head_dim: int, device: torch.device, form: str = "auto"
    ) -> None:
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.form = form
        self._counters = torch.zeros(MAX_COUNTERS, dtype=torch.int32, device=device)

    def prepare(
        self, slot_mapping: Tensor, seq_lens: Tensor, block_table: Tensor, max_seq_len: int
    ) -> BlockAttentionPlan:
        """Reads nothing of the device on the host.

        Args:
            slot_mapping: i64 [r * Q]; those with a slot come first in each block.
            seq_lens: i32 [r], the stored queries counted; a request of 0 gets zeros.
            block_table: i32 [r, B].
            max_seq_len: an upper bound of seq_lens, for the torch form.
        """
        r = seq_lens.shape[0]
        slots = slot_mapping.view(r, -1)
        query = slots.shape[1]
        last = (slots >= 0).sum(1).sub_(1).clamp_(min=0)
        last.add_(torch.arange(0, r * query, query, device=last.device))
        return BlockAttentionPlan(slot_mapping, block_table, seq_lens, max_seq_len, last, torch.full_like(last, -1))

    def forward(self, plan: BlockAttentionPlan, qkv: Tensor, kv_cache: Tensor) -> Tensor:
        """Store K and V of the queries in their slots, then attend.

        Args:
            qkv: [r * Q, (Hq + 2 Hk) * D], normed and rotated.
            kv_cache: [2, num_blocks, block_size, Hk, D] of one layer, changed in place.

        Returns:
            [r * Q, Hq * D].
        """
        r, q_size = plan.last_stored.shape[0], self.num_heads * self.head_dim
        by_kv_head = (r, -1, self.num_kv_heads, q_size // self.num_kv_heads)
        store_kv(qkv, kv_cache, plan.slot_mapping, form=self.form)
        q = qkv[:, :q_size].reshape(by_kv_head).transpose(1, 2).reshape(r, -1)
        rows = torch.cat((q, qkv[:, q_size:].index_select(0, plan.last_stored)), 1)
        out = decode_attention(
            rows, kv_cache, plan.block_table, plan.seq_lens, plan.no_slots,
            max_seq_len=plan.max_seq_len, counters=self._counters, form=self.form,
        )  # fmt: skip
        return out.view(r, self.num_kv_heads, -1, q_size // self.num_kv_heads).transpose(1, 2).reshape(-1, q_size)


def store_context(keys: Tensor, values: Tensor, slot_mapping: Tensor, kv_cache: Tensor) -> None:
    """Store keys and values [t, layers, Hk, D] of context tokens in the slots [t] of all layers; -1 stores nothing.

    kv_cache is [layers, 2, num_blocks, block_size, Hk, D]. Block 0 belongs to no request, so its first slot is given
    back to itself by every token that has no slot.
    """
    layers, _, num_blocks, block_size, num_kv_heads, dim = kv_cache.shape
    cache = kv_cache.view(layers, 2, num_blocks * block_size, num_kv_heads, dim)
    kv = torch.stack((keys, values)).permute(2, 0, 1, 3, 4)
    kept = torch.where((slot_mapping < 0).view(1, 1, -1, 1, 1), cache[:, :, :1], kv)
    cache.index_copy_(2, slot_mapping.clamp(min=0), kept)
