"""The loop and torch forms of paged attention: what one query token sees, shared by decode and prefill."""

import torch


def attend_loop(
    # [Hq, D]
    q: torch.Tensor,
    # [2 (K, V), num_blocks, block_size, Hk, D]
    kv_cache: torch.Tensor,
    # [B] i32
    blocks: torch.Tensor,
    visible: int,
) -> torch.Tensor:
    """Attention of one token over the first `visible` tokens of its request, [Hq, D] f32: the specification.

    Query head h attends to KV head h // (Hq / Hk), with weights softmax(q k / sqrt(D)).
    """
    num_heads, head_dim = q.shape
    block_size, num_kv_heads = kv_cache.shape[2:4]
    slots = [(int(blocks[n // block_size]), n % block_size) for n in range(visible)]
    keys = torch.stack([kv_cache[0, block, offset] for block, offset in slots]).float()
    values = torch.stack([kv_cache[1, block, offset] for block, offset in slots]).float()
    out = torch.empty(num_heads, head_dim)
    for head in range(num_heads):
        kv_head = head // (num_heads // num_kv_heads)
        weights = torch.softmax(keys[:, kv_head] @ q[head].float() / head_dim**0.5, dim=0)
        out[head] = weights @ values[:, kv_head]
    return out


def attend_torch(
    # [t, Hq, D]
    q: torch.Tensor,
    # [2 (K, V), num_blocks, block_size, Hk, D]
    kv_cache: torch.Tensor,
    # [t, B] i32: the block table of each token's request
    block_table: torch.Tensor,
    # [t] i32: how many tokens of its request each token sees; 0 gives zeros
    visible: torch.Tensor,
    max_seq_len: int,
) -> torch.Tensor:
    """As `attend_loop` for all tokens at once, [t, Hq * D] in q's dtype, without a host wait."""
    t, num_heads, head_dim = q.shape
    block_size, num_kv_heads = kv_cache.shape[2:4]
    key = torch.arange(max_seq_len, device=q.device)
    outside = key >= visible.view(t, 1)
    # What lies beyond a request's length is garbage, block ids too.
    block = block_table[:, key // block_size].long().masked_fill(outside, 0)
    slot = block * block_size + key % block_size
    keys, values = kv_cache.view(2, -1, num_kv_heads, head_dim)[:, slot].float().unbind(0)
    grouped = q.float().view(t, num_kv_heads, -1, head_dim)
    scores = torch.einsum("tkgd,tnkd->tkgn", grouped, keys).div_(head_dim**0.5)
    hidden = outside.view(t, 1, 1, -1)
    weights = torch.softmax(scores.masked_fill_(hidden, float("-inf")), dim=-1).masked_fill_(hidden, 0.0)
    values = values.masked_fill(outside.view(t, -1, 1, 1), 0.0)
    return torch.einsum("tkgn,tnkd->tkgd", weights, values).reshape(t, -1).to(q.dtype)
