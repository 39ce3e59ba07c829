"""The multi-token-prediction head over plain contiguous tensors, differentiable, and what it is trained for.

It is the oracle of the paged form (mtp.py). b sequences of s tokens, hidden size d, vocabulary V.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..models.config import ModelConfig
from ..models.rope import compute_inv_freq


@dataclass(frozen=True)
class MtpLoss:
    """Means over the tokens that count, each []: `total` is what is differentiated, `accept_rate` the chance that
    verification accepts a draft drawn from the head at temperature 1."""

    total: Tensor
    cross_entropy: Tensor
    l1: Tensor
    accept_rate: Tensor


def mtp_loss(
    config: ModelConfig,
    weights: Mapping[str, Tensor],
    embedding: Tensor,
    lm_head: Tensor,
    hidden: Tensor,
    tokens: Tensor,
    counts: Tensor,
    *,
    ce_weight: float = 0.1,
    l1_weight: float = 0.9,
) -> MtpLoss:
    """Cross-entropy with the token after the next, and the distance from the target's own law of it.

    The distance sum |p - q| is twice what rejection sampling loses: a draft is accepted with chance 1 - distance / 2.

    Args:
        embedding, lm_head: [V, d], the target's; no gradient goes there.
        hidden: [b, s, d], the target's behind its last norm.
        tokens: i64 [b, s].
        counts: bool [b, s]: tokens that the head is to learn to predict; the first two of a sequence never count.
    """
    states = mtp_hidden(config, weights, hidden[:, :-2], F.embedding(tokens[:, 1:-1], embedding).to(hidden.dtype))
    wanted = counts[:, 2:]
    logits = F.linear(states[wanted], lm_head).float()
    with torch.no_grad():
        target = F.linear(hidden[:, 1:-1][wanted], lm_head).float().softmax(-1)
    number = wanted.sum().clamp(min=1)
    cross_entropy = F.cross_entropy(logits, tokens[:, 2:][wanted], reduction="sum") / number
    l1 = (logits.softmax(-1) - target).abs().sum() / number
    return MtpLoss(ce_weight * cross_entropy + l1_weight * l1, cross_entropy.detach(), l1.detach(), 1 - l1.detach() / 2)


def mtp_hidden(config: ModelConfig, weights: Mapping[str, Tensor], hidden: Tensor, following: Tensor) -> Tensor:
    """[b, s, d] behind the head's last norm, of hidden states [b, s, d] at positions 0 .. s - 1 and the embeddings
    [b, s, d] of the tokens that follow them."""
    eps = config.rms_norm_eps
    parts = (_norm(following, weights["enorm.weight"], eps), _norm(hidden, weights["hnorm.weight"], eps))
    x = F.linear(torch.cat(parts, -1), weights["eh_proj.weight"])
    layer = {name.removeprefix("layers.0."): w for name, w in weights.items() if name.startswith("layers.0.")}
    x = x + _attention(config, layer, _norm(x, layer["input_layernorm.weight"], eps))
    y = _norm(x, layer["post_attention_layernorm.weight"], eps)
    gate = F.silu(F.linear(y, layer["mlp.gate_proj.weight"])) * F.linear(y, layer["mlp.up_proj.weight"])
    x = x + F.linear(gate, layer["mlp.down_proj.weight"])
    return _norm(x, weights["norm.weight"], eps)


def _attention(config: ModelConfig, layer: Mapping[str, Tensor], x: Tensor) -> Tensor:
    def heads(name: str) -> Tensor:
        y = F.linear(x, layer[f"self_attn.{name}_proj.weight"], layer.get(f"self_attn.{name}_proj.bias"))
        y = y.unflatten(-1, (-1, config.head_dim))
        norm = layer.get(f"self_attn.{name}_norm.weight")
        return (y if norm is None else _norm(y, norm, config.rms_norm_eps)).transpose(1, 2)

    inv_freq, factor = compute_inv_freq(config)
    angles = torch.arange(x.shape[1], device=x.device).unsqueeze(1) * inv_freq.to(x.device)
    cos, sin = (angles.cos() * factor).repeat(1, 2), (angles.sin() * factor).repeat(1, 2)

    def rotated(y: Tensor) -> Tensor:
        first, second = y.float().chunk(2, -1)
        return (y.float() * cos + torch.cat((-second, first), -1) * sin).to(y.dtype)

    gqa = config.num_attention_heads != config.num_key_value_heads
    out = F.scaled_dot_product_attention(
        rotated(heads("q")), rotated(heads("k")), heads("v"), is_causal=True, enable_gqa=gqa
    )
    bias = layer.get("self_attn.o_proj.bias")
    return F.linear(out.transpose(1, 2).flatten(2), layer["self_attn.o_proj.weight"], bias)


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    y = x.float()
    return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)
