"""Paged attention in plain torch operations: the backend of the CPU, and a plain form that also runs on CUDA.

The cache is gathered by slot into dense K and V, requests of equal query length together. Everything that does not
depend on the layer (slots to gather, masks) is computed once a step. Sizes come from host integers, lengths that decide
what is visible from the device, so no operation waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .metadata import AttentionMetadata


@dataclass(slots=True)
class _Group:
    """g requests of one query length n, attended to together; S is the longest upper bound of their lengths."""

    num_reqs: int
    query_len: int
    kv_len: int
    # Rows of the batch that belong to the group: a slice where they lie together, else i64 [g * n]
    rows: slice | Tensor
    # n = 1: added to the scores, [g * Hk, Hq / Hk, S]. n > 1: bool [g, 1, n, S]. None: plain causal masking is right
    mask: Tensor | None = None
    # Where the keys lie, or None where K and V are all of this step
    gather: _Gather | None = None


@dataclass(slots=True)
class _Gather:
    """Copies the keys and values of a group out of a layer's cache.

    The space is made once a step. Made anew for each layer, it comes from the system page by page, which on a CPU took
    longer than the attention itself.
    """

    # i64 [g * Hk * S]: rows of K seen as [num_slots * Hk, D]
    rows: Tensor
    # [g * Hk * S, D] each; one and the same for decodes, which are done with the keys before they want the values
    keys: Tensor
    values: Tensor


@dataclass(slots=True)
class TorchAttentionPlan:
    """What all layers of a step share."""

    num_tokens: int
    # i64 [num_tokens]: slot to write; tokens without a slot write to slot 0, which `finish` puts back
    slots: Tensor
    # [num_layers, 2, Hk, D]: what slot 0 held before the step
    slot_zero: Tensor
    groups: list[_Group]


class TorchAttention:
    """:class:`~engine.attention.backend.AttentionBackend` for any device, float32, float16 or bfloat16."""

    def __init__(self, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.group_size = num_heads // num_kv_heads
        self.dtype = dtype
        self.scale = head_dim**-0.5

    def prepare(self, metadata: AttentionMetadata, kv_cache: Tensor) -> TorchAttentionPlan:
        """See :meth:`engine.attention.backend.AttentionBackend.prepare`."""
        return TorchAttentionPlan(
            num_tokens=metadata.num_tokens,
            slots=metadata.slot_mapping[: metadata.num_tokens].clamp_min(0),
            slot_zero=kv_cache[:, :, 0, 0].clone(),
            groups=[self._group(metadata, reqs) for reqs in _by_query_len(metadata)],
        )

    def finish(self, plan: TorchAttentionPlan, kv_cache: Tensor) -> None:
        """See :meth:`engine.attention.backend.AttentionBackend.finish`."""
        # Block 0 belongs to no request, so its first slot takes what must not be written, and is restored.
        kv_cache[:, :, 0, 0] = plan.slot_zero

    def forward(self, plan: TorchAttentionPlan, qkv: Tensor, kv_cache: Tensor) -> Tensor:
        """See :meth:`engine.attention.backend.AttentionBackend.forward`."""
        kv_size = self.num_kv_heads * self.head_dim
        cache = kv_cache.view(2, -1, kv_size)
        # [t, Hq / Hk + 2, Hk * D]: the last two of the middle dimension are K and V
        kv = qkv[: plan.num_tokens].view(plan.num_tokens, qkv.shape[1] // kv_size, kv_size)[:, -2:].transpose(0, 1)
        cache.index_copy_(1, plan.slots, kv)
        if len(plan.groups) == 1 and plan.num_tokens == qkv.shape[0]:
            return self._attend(qkv, kv_cache, plan.groups[0])
        output = torch.zeros((qkv.shape[0], self.num_heads * self.head_dim), dtype=qkv.dtype, device=qkv.device)
        for group in plan.groups:
            output[group.rows] = self._attend(qkv[group.rows], kv_cache, group)
        return output

    def _attend(self, qkv: Tensor, kv_cache: Tensor, group: _Group) -> Tensor:
        """Attention output [g * n, Hq * D] of the group's rows qkv [g * n, (Hq + 2 Hk) * D]."""
        g, n, s = group.num_reqs, group.query_len, group.kv_len
        heads, kv_heads, dim = self.num_heads, self.num_kv_heads, self.head_dim
        if group.gather is None:
            q, k, v = qkv.view(1, n, -1, dim).transpose(1, 2).split((heads, kv_heads, kv_heads), 1)
        elif n == 1:
            return self._decode(qkv[:, : heads * dim], kv_cache, group)
        else:
            q = qkv.view(g, n, -1, dim)[:, :, :heads].transpose(1, 2)
            gather, (key_cache, value_cache) = group.gather, kv_cache.view(2, -1, dim).unbind(0)
            k = torch.index_select(key_cache, 0, gather.rows, out=gather.keys).view(g, kv_heads, s, dim)
            v = torch.index_select(value_cache, 0, gather.rows, out=gather.values).view(g, kv_heads, s, dim)
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=group.mask, is_causal=group.mask is None and n > 1, enable_gqa=heads != kv_heads
        )
        return out.transpose(1, 2).reshape(g * n, heads * dim)

    def _decode(self, q: Tensor, kv_cache: Tensor, group: _Group) -> Tensor:
        """One query a request. The query heads of a KV head are rows of one product, so K and V are never repeated."""
        gather = group.gather
        assert gather is not None and group.mask is not None
        batch = group.num_reqs * self.num_kv_heads
        key_cache, value_cache = kv_cache.view(2, -1, self.head_dim).unbind(0)
        q = q.reshape(batch, self.group_size, self.head_dim)
        shape = (batch, group.kv_len, self.head_dim)
        k = torch.index_select(key_cache, 0, gather.rows, out=gather.keys).view(shape)
        weights = torch.baddbmm(group.mask, q, k.transpose(1, 2), alpha=self.scale).softmax(-1)
        v = torch.index_select(value_cache, 0, gather.rows, out=gather.values).view(shape)
        return torch.bmm(weights, v).view(group.num_reqs, -1)

    def _group(self, metadata: AttentionMetadata, reqs: list[int]) -> _Group:
        """Rows, slots and mask of the requests ``reqs`` (indices in order, of one query length)."""
        device = metadata.block_table.device
        first, last, count = reqs[0], reqs[-1], len(reqs)
        start = int(metadata.query_start_loc_np[first])
        n = int(metadata.query_start_loc_np[first + 1]) - start
        kv_len = int(metadata.seq_lens_np[reqs].max())
        if count == 1 and kv_len == n:
            # No context, so this step's own K and V are all there is and plain causal masking is exact.
            return _Group(1, n, kv_len, slice(start, start + n))
        rows: slice | Tensor = slice(start, start + n * count)
        select: slice | Tensor = slice(first, last + 1)
        if last - first >= count:
            starts = metadata.query_start_loc_np[reqs]
            rows = _to_device((starts[:, None] + np.arange(n)).reshape(-1), device)
            select = _to_device(np.array(reqs), device)
        mask = self._mask(metadata.seq_lens[select], n, kv_len)
        index = self._gather_rows(metadata, select, kv_len)
        keys = torch.empty((index.shape[0], self.head_dim), dtype=self.dtype, device=device)
        gather = _Gather(index, keys, keys if n == 1 else torch.empty_like(keys))
        return _Group(count, n, kv_len, rows, mask, gather)

    def _mask(self, seq_lens: Tensor, n: int, kv_len: int) -> Tensor:
        """See _Group.mask; query i of a request is at position seq_len - n + i. seq_lens i32 [g]."""
        key = torch.arange(kv_len, device=seq_lens.device)
        if n > 1:
            return key <= seq_lens.view(-1, 1, 1, 1) - n + torch.arange(n, device=seq_lens.device).view(-1, 1)
        hidden = key >= seq_lens.unsqueeze(1)
        mask = torch.zeros(hidden.shape, dtype=self.dtype, device=seq_lens.device).masked_fill_(hidden, float("-inf"))
        shape = (-1, self.num_kv_heads, self.group_size, -1)
        return mask.view(-1, 1, 1, kv_len).expand(shape).reshape(-1, self.group_size, kv_len)

    def _gather_rows(self, metadata: AttentionMetadata, select: slice | Tensor, kv_len: int) -> Tensor:
        """Rows of the requests' keys in the cache of one layer, in [g, Hk, S] order."""
        size = metadata.block_size
        blocks = metadata.block_table[select][:, : -(-kv_len // size)].long()
        slots = blocks.unsqueeze(2) * size + torch.arange(size, device=blocks.device)
        slots = slots.view(blocks.shape[0], 1, -1)[:, :, :kv_len]
        head = torch.arange(self.num_kv_heads, device=blocks.device).view(1, -1, 1)
        return (slots * self.num_kv_heads + head).view(-1)


def _by_query_len(metadata: AttentionMetadata) -> list[list[int]]:
    """Request indices grouped by query length, each group in order; requests without a query are left out."""
    groups: dict[int, list[int]] = {}
    if metadata.num_decodes:
        groups[1] = list(range(metadata.num_decodes))
    starts = metadata.query_start_loc_np[metadata.num_decodes : metadata.num_reqs + 1].tolist()
    for i, (start, end) in enumerate(pairwise(starts), metadata.num_decodes):
        if end > start:
            groups.setdefault(end - start, []).append(i)
    return list(groups.values())


def _to_device(values: np.ndarray, device: torch.device) -> Tensor:
    host = torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64))
    if device.type == "cuda":
        # Only a pinned source is copied without waiting for the device.
        host = host.pin_memory()
    return host.to(device, non_blocking=True)
