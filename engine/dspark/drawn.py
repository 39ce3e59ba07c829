"""Drafts that are drawn one behind the other, with what they are drawn from kept for the rejection rule."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import draft_noise_positions
from kernels.markov_drafts import ConfidenceHead, MarkovHead, next_latent
from kernels.markov_logits import markov_logits

from ..spec_decode.draw import DraftSampler
from ..spec_decode.interface import FinishedStep


def drawn_drafts(
    base_logits: Tensor,
    hidden: Tensor,
    anchors: Tensor,
    positions: Tensor,
    head: MarkovHead | None,
    sampler: DraftSampler,
    step: FinishedStep,
    form: str,
) -> Tensor:
    """Drafts i64 [r, N].

    Args:
        base_logits: f32 [r, N, V], of the output head.
        hidden: [r, Q, d], of the backbone, Q >= N.
        anchors: i32 or i64 [r], the tokens before the blocks.
        positions: i64 [r, Q]: draft n will stand at positions[:, n] + 1.
        head: None: a draft does not hang on the one before it.
        sampler, step: a "probabilistic" one, of N drafts.
    """
    num_drafts = base_logits.shape[1]
    gates = state = None
    if head is not None and head.hidden_weight is not None:
        gates = F.linear(hidden[:, :num_drafts], head.hidden_weight, head.bias)
    number = torch.arange(num_drafts, device=positions.device)
    noise = draft_noise_positions(positions[:, :num_drafts] + 1, number).t().contiguous()
    before, tokens = anchors, []
    for n in range(num_drafts):
        if head is None:
            before = sampler.draw(step, n, base_logits[:, n].contiguous(), positions[:, n] + 1)
        else:
            e = F.embedding(before, head.w1)
            latent, state = next_latent(head, None if gates is None else gates[:, n], e, state)
            logits = markov_logits(base_logits, latent, head.w2, n, sampler.kept(step), form=form)
            before = sampler.choose(step, logits, noise[n])
        tokens.append(before)
    return torch.stack(tokens, 1)


def confidences_of(
    hidden: Tensor, anchors: Tensor, tokens: Tensor, head: MarkovHead | None, confidence: ConfidenceHead
) -> Tensor:
    """Confidences before the sigmoid, f32 [r, N], of drafts i64 [r, N]; the other arguments as above."""
    logits = F.linear(hidden[:, : tokens.shape[1]], confidence.hidden_weight.unsqueeze(0))[..., 0].float()
    if head is not None and confidence.token_weight is not None:
        e = F.embedding(torch.cat((anchors.unsqueeze(1), tokens[:, :-1]), 1), head.w1)
        logits = logits + F.linear(e, confidence.token_weight.unsqueeze(0))[..., 0].float()
    return logits + confidence.bias.float()
