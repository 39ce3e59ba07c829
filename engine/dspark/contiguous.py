"""The draft over plain contiguous tensors: many blocks of a sequence at once, differentiable.

It is the oracle of the paged form (drafter.py) and the forward pass of training. Symbols: b sequences, s positions of
the longest, a anchors a sequence, γ block size, n injected layers, d hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from ..models.config import ModelConfig
from ..models.rope import compute_inv_freq
from .config import DSparkConfig
from .heads import confidence_logits, markov_bias, markov_embedding, markov_latent

Rope = tuple[Tensor, Tensor]


def block_ids(config: DSparkConfig, anchors: Tensor) -> Tensor:
    """[anchor, mask, ..., mask] of anchor token ids [...]: [..., γ]."""
    masks = torch.full((*anchors.shape, config.block_size - 1), config.mask_token_id, device=anchors.device)
    return torch.cat((anchors.unsqueeze(-1), masks.to(anchors.dtype)), -1)


def project_context(config: DSparkConfig, weights: Mapping[str, Tensor], hidden: Tensor) -> Tensor:
    """What every layer makes its context keys and values of: norm(fc(hidden [..., n * d])), [..., d]."""
    return _rms_norm(F.linear(hidden, weights["fc.weight"]), weights["hidden_norm.weight"], config.model.rms_norm_eps)


def draft_hidden(
    config: DSparkConfig,
    weights: Mapping[str, Tensor],
    embedding: Tensor,
    hidden: Tensor,
    anchors: Tensor,
    anchor_positions: Tensor,
) -> Tensor:
    """The backbone's hidden states after the last norm, [b, a, γ, d].

    A block sees the context before its anchor and all of itself, and no other block (attention is not causal).

    Args:
        embedding: [V, d], the draft's or the target's.
        hidden: [b, s, n * d], the target's at the injected layers, position i at row i. Rows that no anchor lies
            behind may hold anything finite.
        anchors: i64 [b, a], token ids.
        anchor_positions: i64 [b, a]; 0 <= anchor position <= s.
    """
    b, a = anchors.shape
    s, block = hidden.shape[1], config.block_size
    device = hidden.device
    positions = anchor_positions.unsqueeze(-1) + torch.arange(block, device=device)
    block_rope = _rope(config.model, positions.view(b, a * block))
    context_rope = _rope(config.model, torch.arange(s, device=device).view(1, s))
    of_block = torch.arange(a, device=device).repeat_interleave(block)
    start = anchor_positions.repeat_interleave(block, dim=1).unsqueeze(-1)
    mask = torch.cat(
        (torch.arange(s, device=device) < start, (of_block.view(-1, 1) == of_block).expand(b, -1, -1)), -1
    ).unsqueeze(1)
    context = project_context(config, weights, hidden)
    x = F.embedding(block_ids(config, anchors).view(b, a * block), embedding).to(context.dtype)
    for i in range(config.model.num_hidden_layers):
        prefix = f"layers.{i}."
        layer = {name.removeprefix(prefix): w for name, w in weights.items() if name.startswith(prefix)}
        x = x + _attention(config.model, layer, x, context, block_rope, context_rope, mask)
        x = x + _mlp(config.model, layer, x)
    return _rms_norm(x, weights["norm.weight"], config.model.rms_norm_eps).view(b, a, block, -1)


def most_likely(logits: Tensor) -> Tensor:
    """Token ids [m] of logits [m, V]."""
    return logits.argmax(-1)


def draft_block(
    config: DSparkConfig,
    weights: Mapping[str, Tensor],
    hidden: Tensor,
    base_logits: Tensor,
    anchors: Tensor,
    choose: Callable[[Tensor], Tensor] = most_likely,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The Markov loop: the specification of drafting.

    Args:
        hidden: [m, γ, d], of `draft_hidden`.
        base_logits: f32 [m, γ, V], the output head's.
        anchors: i64 [m].
        choose: token ids [m] of the logits [m, V] of one position.

    Returns:
        tokens i64 [m, γ], logits f32 [m, γ, V] and confidences before the sigmoid [m, γ], None without that head.
    """
    previous, state = anchors, None
    tokens, logits, confidences = [], [], []
    for k in range(config.block_size):
        h, e, row = hidden[:, k], None, base_logits[:, k]
        if config.markov_rank:
            e = markov_embedding(weights, previous)
            latent, state = markov_latent(config, weights, e, h, state)
            row = row + markov_bias(weights, latent).float()
        if config.enable_confidence_head:
            confidences.append(confidence_logits(config, weights, h, e).float())
        previous = choose(row)
        tokens.append(previous)
        logits.append(row)
    return torch.stack(tokens, 1), torch.stack(logits, 1), torch.stack(confidences, 1) if confidences else None


def _attention(
    model: ModelConfig,
    layer: Mapping[str, Tensor],
    x: Tensor,
    context: Tensor,
    block_rope: Rope,
    context_rope: Rope,
    mask: Tensor,
) -> Tensor:
    normed = _rms_norm(x, layer["input_layernorm.weight"], model.rms_norm_eps)
    q_norm, k_norm = layer["self_attn.q_norm.weight"], layer["self_attn.k_norm.weight"]
    q = _rotate(_rms_norm(_heads(model, layer, "q", normed), q_norm, model.rms_norm_eps), block_rope)
    parts = ((context, context_rope), (normed, block_rope))
    keys = [_rotate(_rms_norm(_heads(model, layer, "k", y), k_norm, model.rms_norm_eps), rope) for y, rope in parts]
    values = [_heads(model, layer, "v", y) for y, _ in parts]
    k, v = torch.cat(keys, 1), torch.cat(values, 1)
    # Repeated by hand: with a mask and grouped heads torch falls back to a form that keeps all weights in memory.
    group = model.num_attention_heads // model.num_key_value_heads
    k, v = k.repeat_interleave(group, dim=2), v.repeat_interleave(group, dim=2)
    out = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask)
    return F.linear(
        out.transpose(1, 2).flatten(2), layer["self_attn.o_proj.weight"], layer.get("self_attn.o_proj.bias")
    )


def _heads(model: ModelConfig, layer: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    y = F.linear(x, layer[f"self_attn.{name}_proj.weight"], layer.get(f"self_attn.{name}_proj.bias"))
    return y.unflatten(-1, (-1, model.head_dim))


def _mlp(model: ModelConfig, layer: Mapping[str, Tensor], x: Tensor) -> Tensor:
    normed = _rms_norm(x, layer["post_attention_layernorm.weight"], model.rms_norm_eps)
    gate = F.silu(F.linear(normed, layer["mlp.gate_proj.weight"]))
    return F.linear(gate * F.linear(normed, layer["mlp.up_proj.weight"]), layer["mlp.down_proj.weight"])


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    y = x.float()
    return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


def _rope(model: ModelConfig, positions: Tensor) -> Rope:
    """cos and sin, its first half negated, f32 [b, t, 1, head_dim], of positions [b, t]."""
    inv_freq, factor = compute_inv_freq(model)
    angles = positions.unsqueeze(-1).unsqueeze(-1) * inv_freq.to(positions.device)
    cos, sin = angles.cos() * factor, angles.sin() * factor
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def _rotate(x: Tensor, rope: Rope) -> Tensor:
    cos, sin = rope
    return (x.float() * cos + x.float().roll(x.shape[-1] // 2, -1) * sin).to(x.dtype)
