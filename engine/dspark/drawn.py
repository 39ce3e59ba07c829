"""Drafts that are drawn one behind the other: what the rejection rule needs keeps its own path (see DraftSampler)."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.markov_drafts import ConfidenceHead, MarkovHead, next_latent

Draw = Callable[[int, Tensor, Tensor], Tensor]
"""A draft's token ids i64 [r] from (its number, logits f32 [r, V] that may be changed, i64 [r] where it will stand)."""


def drawn_drafts(
    base_logits: Tensor,
    hidden: Tensor,
    anchors: Tensor,
    positions: Tensor,
    head: MarkovHead | None,
    confidence: ConfidenceHead | None,
    draw: Draw | None,
) -> tuple[Tensor, Tensor | None]:
    """Drafts i64 [r, N] and their confidences before the sigmoid, f32 [r, N] or None.

    Args:
        base_logits: f32 [r, N, V], of the output head.
        hidden: [r, Q, d], of the backbone, Q >= N.
        anchors: i32 or i64 [r], the tokens before the blocks.
        positions: i64 [r, Q]: draft n will stand at positions[:, n] + 1.
        head: None: a draft does not hang on the one before it.
        draw: None for the most likely tokens.
    """
    num_drafts = base_logits.shape[1]
    gates = state = None
    if head is not None and head.hidden_weight is not None:
        gates = F.linear(hidden[:, :num_drafts], head.hidden_weight, head.bias)
    places = positions + 1
    before, tokens = [anchors], []
    for n in range(num_drafts):
        row = base_logits[:, n]
        if head is not None:
            e = F.embedding(before[n], head.w1)
            latent, state = next_latent(head, None if gates is None else gates[:, n], e, state)
            row = row + F.linear(latent, head.w2)
        tokens.append(row.argmax(-1) if draw is None else draw(n, row.contiguous(), places[:, n]))
        before.append(tokens[n])
    found = torch.stack(tokens, 1)
    if confidence is None:
        return found, None
    logits = F.linear(hidden[:, :num_drafts], confidence.hidden_weight.unsqueeze(0))[..., 0].float()
    if head is not None and confidence.token_weight is not None:
        e = F.embedding(torch.cat((anchors.unsqueeze(1), found[:, :-1]), 1), head.w1)
        logits = logits + F.linear(e, confidence.token_weight.unsqueeze(0))[..., 0].float()
    return found, logits + confidence.bias.float()
