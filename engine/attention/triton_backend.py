"""Paged attention by the kernels of this repository: the backend of CUDA, and of their other forms anywhere.

A batch of decodes is one launch a layer: norm, RoPE, KV store and attention. So is one of decodes with drafts. In any
other batch norm, RoPE and store come first for all tokens, since a request may read what another one stores, then the
leading decodes, then everything else, each in a launch of its own. A few tokens are decodes all of them, each of its
own length: the prefill kernel does not split a long context among programs. Nothing is prepared on the host and every
length is read on the device, so a captured step serves every length of its size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels import (
    MAX_COUNTERS,
    HeadRotation,
    decode_attention,
    prefill_attention,
    store_kv,
    verify_attention,
)
from kernels.token_rows import token_rows

from .metadata import AttentionMetadata

MAX_VERIFIED_TOKENS = 16
"""Most tokens a request of a batch that is taken as decodes with drafts; prompts are for the prefill kernel."""
MAX_TOKENS_AS_DECODES = 64
"""Beyond, reading the context once for each token costs more than its splits save."""


@dataclass(slots=True)
class TritonAttentionPlan:
    """What all layers of a step share: the batch's tensors, cut to its r requests, the first d of them decodes.

    Where every token is taken as a decode, `block_table` and `seq_lens` have a row for each token.
    """

    num_decodes: int
    num_tokens: int
    # The batch is nothing but decodes, and none of them reads what another one writes in this step
    fused: bool
    # Likewise, with at most max_query_len tokens a request instead of one
    is_verification: bool
    as_decodes: bool
    # [r, B] i32, [r] i32, [r + 1] i32, [r - d + 1] i32, [>= t] i64
    block_table: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor
    prefill_start_loc: Tensor
    # What the decode kernel stores, and what is stored before it
    slot_mapping: Tensor
    stored_slots: Tensor
    max_query_len: int
    max_seq_len: int


class TritonAttention:
    """:class:`~engine.attention.backend.AttentionBackend` for any device, float32, float16 or bfloat16.

    ``form`` is a kernel form (see kernels.dispatch).
    """

    def __init__(
        self, num_heads: int, num_kv_heads: int, head_dim: int, device: torch.device, form: str = "auto"
    ) -> None:
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.form = form
        self._counters = torch.zeros(MAX_COUNTERS, dtype=torch.int32, device=device)
        self._no_slots = torch.full((MAX_TOKENS_AS_DECODES,), -1, dtype=torch.int64, device=device)

    def prepare(self, metadata: AttentionMetadata, kv_cache: Tensor) -> TritonAttentionPlan:
        """See :meth:`engine.attention.backend.AttentionBackend.prepare`."""
        r, decodes, t = metadata.num_reqs, metadata.num_decodes, metadata.num_tokens_padded
        block_table, seq_lens = metadata.block_table[:r], metadata.seq_lens[:r]
        fused = decodes == r == metadata.num_tokens and not metadata.has_admitted
        few_each = r > 0 and metadata.max_query_len <= MAX_VERIFIED_TOKENS
        is_verification = few_each and not fused and not metadata.has_admitted
        as_decodes = not fused and not is_verification and r > 0 and t <= MAX_TOKENS_AS_DECODES
        slot_mapping = metadata.slot_mapping
        if as_decodes:
            block_table, seq_lens = token_rows(metadata.query_start_loc, seq_lens, block_table, t, form=self.form)
            slot_mapping = self._no_slots  # by then every key is stored
        return TritonAttentionPlan(
            num_decodes=decodes,
            num_tokens=metadata.num_tokens,
            fused=fused,
            is_verification=is_verification,
            as_decodes=as_decodes,
            block_table=block_table,
            seq_lens=seq_lens,
            query_start_loc=metadata.query_start_loc[: r + 1],
            prefill_start_loc=metadata.query_start_loc[decodes : r + 1],
            slot_mapping=slot_mapping,
            stored_slots=metadata.slot_mapping,
            max_query_len=metadata.max_query_len,
            max_seq_len=metadata.max_seq_len,
        )

    def forward(
        self,
        plan: TritonAttentionPlan,
        qkv: Tensor,
        kv_cache: Tensor,
        rotation: HeadRotation | None = None,
        start_early: bool = False,
    ) -> Tensor:
        """See :meth:`engine.attention.backend.AttentionBackend.forward`.

        With ``rotation`` qkv comes as the projection made it, and norm and RoPE of its heads are part of the launch,
        which may ``start_early`` (see kernels.decode_attention) where it is the only one.
        """
        if plan.fused:
            return self._decode(plan, qkv, kv_cache, rotation, None, start_early)
        if plan.is_verification:
            return verify_attention(
                qkv, kv_cache, plan.block_table, plan.seq_lens, plan.query_start_loc, plan.stored_slots, rotation,
                max_query_len=plan.max_query_len, max_seq_len=plan.max_seq_len, counters=self._counters,
                start_early=start_early, form=self.form,
            )  # fmt: skip
        if plan.as_decodes:
            store_kv(qkv, kv_cache, plan.stored_slots, rotation, form=self.form)
            return self._decode(plan, qkv, kv_cache, None, None, start_early=False)
        padded = plan.num_tokens < qkv.shape[0]
        out = (torch.zeros if padded else torch.empty)(
            (qkv.shape[0], self.num_heads * self.head_dim), dtype=qkv.dtype, device=qkv.device
        )
        store_kv(qkv, kv_cache, plan.stored_slots, rotation, form=self.form)
        d = plan.num_decodes
        if d:
            self._decode(plan, qkv[:d], kv_cache, None, out[:d], start_early=False)
        prefill_attention(
            qkv,
            kv_cache,
            plan.block_table[d:],
            plan.seq_lens[d:],
            plan.prefill_start_loc,
            out,
            num_tokens=plan.num_tokens - d,
            max_seq_len=plan.max_seq_len,
            form=self.form,
        )
        return out

    def finish(self, plan: TritonAttentionPlan, kv_cache: Tensor) -> None:
        """See :meth:`engine.attention.backend.AttentionBackend.finish`: nothing is left to do."""

    def _decode(
        self,
        plan: TritonAttentionPlan,
        qkv: Tensor,
        kv_cache: Tensor,
        rotation: HeadRotation | None,
        out: Tensor | None,
        start_early: bool,
    ) -> Tensor:
        return decode_attention(
            qkv,
            kv_cache,
            plan.block_table,
            plan.seq_lens,
            plan.slot_mapping,
            rotation,
            max_seq_len=plan.max_seq_len,
            counters=self._counters,
            out=out,
            start_early=start_early,
            form=self.form,
        )
