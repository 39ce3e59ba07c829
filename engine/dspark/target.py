"""The target's hidden states at the layers that a draft listens to."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from ..attention import AttentionMetadata, allocate_kv_cache
from ..models.decoder import CausalLM


@torch.inference_mode()
def forward_with_hidden(
    model: CausalLM,
    input_ids: Tensor,
    positions: Tensor,
    metadata: AttentionMetadata,
    kv_cache: Tensor,
    layer_ids: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """As :meth:`engine.models.decoder.CausalLM.forward`, layer by layer, with the outputs of some layers.

    Returns:
        Hidden states after the last norm [t, d], and the outputs of ``layer_ids`` (-1: the embedding) side by side,
        [t, len(layer_ids) * d].
    """
    attention = model.triton_attention or model.attention
    x = model.embed_tokens(input_ids)
    rope = model.rotary_emb(positions)
    plan = attention.prepare(metadata, kv_cache)
    attend = partial(attention.forward, plan)
    # Clones: a layer adds its branches to its input in place.
    chosen = [x.clone()] if -1 in layer_ids else []
    for i, (layer, cache) in enumerate(zip(model.layers, kv_cache.unbind(0), strict=True)):
        x = layer(x, rope, attend, cache)
        if i in layer_ids:
            chosen.append(x.clone())
    attention.finish(plan, kv_cache)
    return model.norm(x), torch.cat(chosen, -1) if chosen else x.new_empty(x.shape[0], 0)


def prefill_with_hidden(
    model: CausalLM, sequences: Sequence[Sequence[int]], layer_ids: Sequence[int]
) -> tuple[list[Tensor], list[Tensor]]:
    """Whole sequences through the target at once, over a cache of their own.

    Returns:
        For each sequence of s tokens its hidden states after the last norm [s, d] and those of ``layer_ids``
        [s, len(layer_ids) * d].
    """
    lengths = [len(tokens) for tokens in sequences]
    flat = torch.tensor([token for tokens in sequences for token in tokens], dtype=torch.int32, device=model.device)
    metadata, positions = _prefill_metadata(lengths, model.device)
    num_blocks = int(metadata.block_table.max()) + 1
    kv_cache = allocate_kv_cache(model.config, num_blocks, metadata.block_size, model.dtype, model.device)
    last, chosen = forward_with_hidden(model, flat, positions, metadata, kv_cache, layer_ids)
    return list(last.split(lengths)), list(chosen.split(lengths))


def _prefill_metadata(lengths: Sequence[int], device: torch.device) -> tuple[AttentionMetadata, Tensor]:
    """A batch of prompts without context, on consecutive blocks from 1 (block 0 is the padding's); and positions."""
    block_size = 16
    lens = np.array(lengths, dtype=np.int32)
    starts = np.concatenate(([0], lens.cumsum())).astype(np.int32)
    per_req = -(-lens // block_size)
    table = np.zeros((len(lens), int(per_req.max())), dtype=np.int32)
    first = 1 + np.concatenate(([0], per_req.cumsum()[:-1]))
    for row, (begin, count) in enumerate(zip(first, per_req, strict=True)):
        table[row, :count] = np.arange(begin, begin + count)
    positions = np.concatenate([np.arange(n, dtype=np.int64) for n in lens])
    of_token = np.repeat(np.arange(len(lens)), lens)
    slots = table[of_token, positions // block_size].astype(np.int64) * block_size + positions % block_size
    total = int(lens.sum())
    metadata = AttentionMetadata(
        num_reqs=len(lens),
        num_tokens=total,
        num_tokens_padded=total,
        query_start_loc=torch.from_numpy(starts).to(device),
        query_start_loc_np=starts,
        seq_lens=torch.from_numpy(lens).to(device),
        seq_lens_np=lens,
        block_table=torch.from_numpy(table).to(device),
        slot_mapping=torch.from_numpy(slots).to(device),
        block_size=block_size,
        max_query_len=int(lens.max()),
        max_seq_len=int(lens.max()),
        num_decodes=0,
    )
    return metadata, torch.from_numpy(positions).to(device)
