"""What a draft is trained for: the paper's loss, over blocks whose anchors are drawn from the target's answers.

Symbols: m blocks, γ slots a block (slot k predicts the token at anchor + 1 + k), p target, q draft.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .config import DSparkConfig
from .heads import block_latents, confidence_logits, markov_bias, markov_embedding


@dataclass(frozen=True)
class LossWeights:
    """``ce`` * CE + ``l1`` * Σ|q - p| + ``confidence`` * BCE, slot k weighed with exp(-k / decay)."""

    ce: float = 0.1
    l1: float = 0.9
    confidence: float = 1.0
    decay: float = 4.0


@dataclass
class LossSums:
    """Weighted sums over slots, and plain ones to report from; all of them of one or more chunks of blocks."""

    # [] each, weighed; ``weight`` divides them
    ce: Tensor
    l1: Tensor
    confidence: Tensor
    # [γ] each, not weighed: slots, c*, |c - c*|, c - c*; and the sum of 1 + Σ Π c* over blocks
    slots: Tensor
    accept: Tensor
    error: Tensor
    bias: Tensor
    tau: Tensor
    blocks: Tensor

    def total(self, weights: LossWeights) -> Tensor:
        """What is differentiated, before the division by the weight of all slots."""
        return weights.ce * self.ce + weights.l1 * self.l1 + weights.confidence * self.confidence

    def detached(self) -> LossSums:
        return LossSums(**{name: value.detach() for name, value in vars(self).items()})

    def __add__(self, other: LossSums) -> LossSums:
        return LossSums(**{name: value + getattr(other, name) for name, value in vars(self).items()})


@dataclass(frozen=True)
class StepReport:
    """One step's loss and what it says about the draft, at temperature 1 and as drawn drafts would do.

    ``accept_rate`` is the mean chance of acceptance of each slot behind the target's own tokens, ``tau`` the expected
    tokens of a round, bonus counted; the confidence's error and bias are against that chance.
    """

    loss: float
    ce: float
    l1: float
    accept_rate: tuple[float, ...]
    tau: float
    confidence_error: float
    confidence_bias: float

    @classmethod
    def of(cls, sums: LossSums, weight: float, weights: LossWeights) -> StepReport:
        """The means of ``sums``; ``weight`` is that of all their slots."""
        slots = sums.slots.clamp(min=1)
        count = float(sums.slots.sum().clamp(min=1))
        return cls(
            loss=float(sums.total(weights)) / weight,
            ce=float(sums.ce) / weight,
            l1=float(sums.l1) / weight,
            accept_rate=tuple((sums.accept / slots).tolist()),
            tau=float(sums.tau / sums.blocks.clamp(min=1)),
            confidence_error=float(sums.error.sum()) / count,
            confidence_bias=float(sums.bias.sum()) / count,
        )


class Blocks(NamedTuple):
    """m blocks with all that their loss needs."""

    # [m, γ, d], the draft's
    hidden: Tensor
    # [m, γ, d], the target's at the token before each slot
    target_hidden: Tensor
    # [m, γ] each, of `block_labels`
    before: Tensor
    labels: Tensor
    valid: Tensor


def sample_anchors(
    lengths: np.ndarray, starts: np.ndarray, num_anchors: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Anchor positions i64 [b, a], sorted in each row, and which are real: bool [b, a].

    Up to ``num_anchors`` a sequence, without replacement, among the positions of the response that have another token
    behind them; rows with fewer are filled with position 0.
    """
    possible = np.maximum(lengths - 1 - starts, 0)
    counts = np.minimum(possible, num_anchors)
    width = max(int(counts.max(initial=0)), 1)
    # The places of the smallest random keys are a sample without replacement.
    keys = rng.random((len(lengths), max(int(possible.max(initial=0)), 1)))
    keys[np.arange(keys.shape[1]) >= possible[:, None]] = 2.0
    chosen = np.argsort(keys, axis=1)[:, :width]
    real = np.arange(width) < counts[:, None]
    anchors = np.sort(np.where(real, chosen + starts[:, None], np.iinfo(np.int64).max), axis=1)
    return np.where(real, anchors, 0), real


def block_labels(
    tokens: Tensor, lengths: Tensor, anchors: Tensor, real: Tensor, block: int
) -> tuple[Tensor, Tensor, Tensor]:
    """What the slots of blocks see and predict; all [b, a, γ].

    Args:
        tokens: i64 [b, s]; lengths: i64 [b]; anchors: i64 [b, a]; real: bool [b, a].

    Returns:
        The token before each slot, the token that it predicts, and whether the slot counts: whether it lies in the
        sequence, and all before it do.
    """
    place = anchors.unsqueeze(-1) + torch.arange(block + 1, device=anchors.device)
    valid = (place[..., 1:] < lengths.view(-1, 1, 1)) & real.unsqueeze(-1)
    flat = tokens.gather(1, place.clamp(max=tokens.shape[1] - 1).flatten(1)).view(place.shape)
    return flat[..., :-1], flat[..., 1:], valid


def weight_of_slots(lengths: np.ndarray, anchors: np.ndarray, real: np.ndarray, block: int, decay: float) -> float:
    """The sum of `slot_weights` over the slots that count by `block_labels`, on the host."""
    k = np.arange(block)
    valid = (anchors[..., None] + 1 + k < lengths[:, None, None]) & real[..., None]
    return float((valid * np.exp(-k / decay)).sum())


def slot_weights(valid: Tensor, decay: float) -> Tensor:
    """f32 [..., γ]: exp(-k / decay) where a slot counts."""
    k = torch.arange(valid.shape[-1], device=valid.device)
    return valid * torch.exp(-k / decay)


def vocabulary_terms(logits: Tensor, p: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy with ``labels`` [...] and Σ|q - p|, both [...], of the draft's logits [..., V] and the target's law
    p [..., V]."""
    log_q = logits.log_softmax(-1)
    ce = -log_q.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    return ce, (log_q.exp() - p).abs().sum(-1)


def block_losses(
    config: DSparkConfig,
    weights: Mapping[str, Tensor],
    head: Tensor,
    blocks: Blocks,
    decay: float,
) -> LossSums:
    """The sums of m blocks.

    Args:
        head: f32 [V, d], the output head, frozen.
    """
    hidden, valid = blocks.hidden.float(), blocks.valid
    logits = F.linear(hidden, head)
    e = None
    if config.markov_rank:
        e = markov_embedding(weights, blocks.before)
        logits = logits + markov_bias(weights, block_latents(config, weights, e, hidden)).float()
    scale = slot_weights(valid, decay)
    with torch.no_grad():
        p = F.linear(blocks.target_hidden.float(), head).softmax(-1)
    ce, l1 = vocabulary_terms(logits, p, blocks.labels)
    # The exact chance that rejection sampling accepts a token drawn from q.
    accept = (1 - 0.5 * l1).detach()
    zero = torch.zeros_like(ce)
    bce, gap = zero, zero
    if config.enable_confidence_head:
        z = confidence_logits(config, weights, hidden, e)
        bce = F.binary_cross_entropy_with_logits(z, accept.clamp(0, 1), reduction="none")
        gap = torch.sigmoid(z).detach() - accept
    first = valid[:, 0].float()
    tau = ((accept * valid).cumprod(-1).sum(-1) + 1) * first
    return LossSums(
        (ce * scale).sum(), (l1 * scale).sum(), (bce * scale).sum(),
        valid.float().sum(0), (accept * valid).sum(0), (gap.abs() * valid).sum(0), (gap * valid).sum(0),
        tau.sum(), first.sum(),
    )  # fmt: skip
