"""The small heads of a draft: the Markov head's bias, and the confidence.

Pure, differentiable functions over a draft's tensors, for any leading dimensions: training calls them for whole blocks,
and the plain form of drafting for one position at a time. On the paged path kernels/markov_drafts.py has their place.
Symbols: d hidden size, r Markov rank, V vocabulary, γ block size.

| head | latent | state |
|---|---|---|
| vanilla | e | |
| gated | σ(gate [h; e]) * e | |
| rnn | tanh(o), where g, c, o = joint [s; e; h] | s' = σ(g) * s + (1 - σ(g)) * tanh(c), from 0 |

with e = W1[token before], h the backbone's hidden state; the bias of the logits is W2 latent.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.markov_drafts import ConfidenceHead, MarkovHead

from .config import DSparkConfig


def markov_embedding(weights: Mapping[str, Tensor], tokens: Tensor) -> Tensor:
    """e of token ids [...]: [..., r]."""
    return F.embedding(tokens, weights["markov_head.markov_w1.weight"])


def markov_latent(
    config: DSparkConfig, weights: Mapping[str, Tensor], e: Tensor, h: Tensor, state: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """The latent [..., r] of e [..., r] and h [..., d], and the rnn's next state; ``state`` None is its first."""
    if config.markov_head_type == "vanilla":
        return e, None
    if config.markov_head_type == "gated":
        gate = F.linear(
            torch.cat((h, e), -1), weights["markov_head.gate_proj.weight"], weights["markov_head.gate_proj.bias"]
        )
        return torch.sigmoid(gate) * e, None
    if state is None:
        state = torch.zeros_like(e)
    joint = F.linear(
        torch.cat((state, e, h), -1), weights["markov_head.joint_proj.weight"], weights["markov_head.joint_proj.bias"]
    )
    gate, candidate, output = joint.chunk(3, -1)
    gate = torch.sigmoid(gate)
    return torch.tanh(output), gate * state + (1 - gate) * torch.tanh(candidate)


def markov_bias(weights: Mapping[str, Tensor], latent: Tensor) -> Tensor:
    """What the logits get, [..., V], of a latent [..., r]."""
    return F.linear(latent, weights["markov_head.markov_w2.weight"])


def block_latents(config: DSparkConfig, weights: Mapping[str, Tensor], e: Tensor, h: Tensor) -> Tensor:
    """Latents [..., γ, r] of whole blocks whose tokens are known: e [..., γ, r], h [..., γ, d]."""
    if config.markov_head_type != "rnn":
        return markov_latent(config, weights, e, h, None)[0]
    latents, state = [], None
    for k in range(e.shape[-2]):
        latent, state = markov_latent(config, weights, e[..., k, :], h[..., k, :], state)
        latents.append(latent)
    return torch.stack(latents, -2)


def confidence_logits(config: DSparkConfig, weights: Mapping[str, Tensor], h: Tensor, e: Tensor | None) -> Tensor:
    """Confidences before the sigmoid, [...], of h [..., d] and, where the head sees it, e [..., r]."""
    x = h
    if config.confidence_head_with_markov:
        assert e is not None
        x = torch.cat((h, e), -1)
    return F.linear(x, weights["confidence_head.proj.weight"], weights["confidence_head.proj.bias"]).squeeze(-1)


def markov_head(config: DSparkConfig, weights: Mapping[str, Tensor]) -> MarkovHead | None:
    """The Markov head as drafting takes it, what it makes of h apart; None for a draft without."""
    rank, d = config.markov_rank, config.model.hidden_size
    if not rank:
        return None
    head = MarkovHead(
        config.markov_head_type, weights["markov_head.markov_w1.weight"], weights["markov_head.markov_w2.weight"]
    )
    if config.markov_head_type == "vanilla":
        return head
    name, split = ("gate_proj", [d, rank]) if config.markov_head_type == "gated" else ("joint_proj", [2 * rank, d])
    parts = weights[f"markov_head.{name}.weight"].split(split, 1)
    hidden, token = parts if config.markov_head_type == "gated" else parts[::-1]
    return head._replace(
        hidden_weight=hidden.contiguous(), bias=weights[f"markov_head.{name}.bias"], token_weight=token.contiguous()
    )


def confidence_head(config: DSparkConfig, weights: Mapping[str, Tensor]) -> ConfidenceHead | None:
    """The confidence head as drafting takes it; None for a draft without."""
    if not config.enable_confidence_head:
        return None
    weight, d = weights["confidence_head.proj.weight"][0], config.model.hidden_size
    return ConfidenceHead(
        weight[:d].contiguous(), weights["confidence_head.proj.bias"],
        weight[d:].contiguous() if config.confidence_head_with_markov else None,
    )  # fmt: skip
