"""Hand-made batches: what a runner would hand to the model, from plain lists."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.attention import AttentionMetadata


def make_batch(
    requests: Sequence[tuple[int, int]],
    tables: Sequence[Sequence[int]],
    block_size: int,
    pad: int = 0,
    bound_slack: int = 0,
    device: str = "cpu",
) -> tuple[Tensor, AttentionMetadata]:
    """Positions and metadata of requests given as (tokens in the cache, tokens of this step).

    ``pad`` adds rows without a request; ``bound_slack`` raises the host's bounds of the lengths above the truth.
    """
    lens = [n for _, n in requests]
    query_start_loc = np.concatenate([[0], np.cumsum(lens)]).astype(np.int32)
    seq_lens = np.array([context + n for context, n in requests], dtype=np.int32)
    block_table = np.zeros((len(requests), max(map(len, tables))), dtype=np.int32)
    positions, slots = [], []
    for i, (context, n) in enumerate(requests):
        block_table[i, : len(tables[i])] = tables[i]
        for position in range(context, context + n):
            positions.append(position)
            slots.append(tables[i][position // block_size] * block_size + position % block_size)
    num_tokens = len(positions)

    def tensor(values: object, dtype: torch.dtype) -> Tensor:
        return torch.as_tensor(np.asarray(values), dtype=dtype, device=device)

    metadata = AttentionMetadata(
        num_reqs=len(requests),
        num_tokens=num_tokens,
        num_tokens_padded=num_tokens + pad,
        query_start_loc=tensor(query_start_loc, torch.int32),
        query_start_loc_np=query_start_loc,
        seq_lens=tensor(seq_lens, torch.int32),
        seq_lens_np=seq_lens + bound_slack,
        block_table=tensor(block_table, torch.int32),
        slot_mapping=tensor(slots + [-1] * pad, torch.int64),
        block_size=block_size,
        max_query_len=max(lens),
        max_seq_len=int(seq_lens.max()) + bound_slack,
        num_decodes=next((i for i, n in enumerate(lens) if n != 1), len(lens)),
    )
    return tensor(positions + [0] * pad, torch.int64), metadata
