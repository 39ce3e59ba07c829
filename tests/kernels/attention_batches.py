"""Random batches of paged attention: shuffled blocks, ragged lengths, and poison wherever nothing may be read."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.head_rotation import HeadRotation


@dataclass
class AttentionBatch:
    """Inputs of the attention kernels on one device. t tokens, r requests."""

    qkv: torch.Tensor
    kv_cache: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    slot_mapping: torch.Tensor
    rotation: HeadRotation

    def clone(self) -> AttentionBatch:
        return AttentionBatch(
            **{name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in vars(self).items()}
        )


def attention_batch(
    requests: list[tuple[int, int]],
    *,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    block_size: int = 4,
    pad: int = 0,
    norms: bool = True,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
) -> AttentionBatch:
    """Requests are (tokens in the cache, tokens of this step); `pad` rows without a request follow.

    Slots that belong to no request, block ids past a request's end and rows of padding hold NaN or ids out of range.
    """
    g = torch.Generator().manual_seed(seed)
    need = [-(-(context + n) // block_size) for context, n in requests]
    num_blocks = sum(need) + 3
    cache = torch.full((2, num_blocks, block_size, num_kv_heads, head_dim), float("nan"))
    ids = (torch.randperm(num_blocks - 1, generator=g) + 1).tolist()
    table = torch.full((len(requests) + pad, max(need) + 2), 10**6, dtype=torch.int32)
    positions, slots, starts = [], [], [0]
    for i, (context, n) in enumerate(requests):
        blocks, ids = ids[: need[i]], ids[need[i] :]
        table[i, : need[i]] = torch.tensor(blocks, dtype=torch.int32)
        for position in range(context + n):
            block, offset = blocks[position // block_size], position % block_size
            if position < context:
                cache[:, block, offset] = torch.randn(2, num_kv_heads, head_dim, generator=g)
            else:
                positions.append(position)
                slots.append(block * block_size + offset)
        starts.append(starts[-1] + n)
    width = (num_heads + 2 * num_kv_heads) * head_dim
    qkv = torch.cat([torch.randn(len(slots), width, generator=g), torch.full((pad, width), float("nan"))])
    table_size = max(context + n for context, n in requests)
    weights = [torch.rand(head_dim, generator=g) + 0.5 for _ in "qk"] if norms else [None, None]
    rotation = HeadRotation(
        torch.tensor(positions + [0] * pad, device=device),
        torch.randn(table_size, head_dim, generator=g).to(device, dtype),
        *[weight if weight is None else weight.to(device, dtype) for weight in weights],
        1e-6,
    )
    return AttentionBatch(
        qkv.to(device, dtype),
        cache.to(device, dtype),
        table.to(device),
        torch.tensor([context + n for context, n in requests] + [0] * pad, dtype=torch.int32, device=device),
        torch.tensor(starts, dtype=torch.int32, device=device),
        torch.tensor(slots + [-1] * pad, device=device),
        rotation,
    )


def cut_short(batch: AttentionBatch, request: int, stored: int) -> None:
    """Take the slots from a request's last queries, as at the end of its blocks."""
    first, end = batch.query_start_loc[request : request + 2].tolist()
    batch.slot_mapping[first + stored : end] = -1
    batch.seq_lens[request] -= end - first - stored


def padded_blocks(requests: list[tuple[int, int]], **shape: object) -> AttentionBatch:
    """A block for each request, and one request without: it has as many rows as the others, of which none is stored."""
    batch = attention_batch(requests, pad=requests[0][1], **shape)  # type: ignore[arg-type]
    batch.seq_lens = batch.seq_lens[: len(requests) + 1]
    batch.block_table = batch.block_table[: len(requests) + 1]
    return batch


def same_where_finite(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal within rounding, with NaN in the same places: a slot that must not be written kept its poison."""
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=2e-5, equal_nan=True)
