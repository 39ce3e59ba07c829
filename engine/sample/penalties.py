"""Presence, frequency and repetition penalties on dense tensors. l rows, V vocabulary. Nothing here makes the host
wait."""

from __future__ import annotations

import torch


def token_counts(token_ids: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """How often each token stands in each row of `token_ids` i64 [l, any], padded with V -> i32 [l, V]."""
    counts = torch.zeros(token_ids.shape[0], vocab_size + 1, dtype=torch.int32, device=token_ids.device)
    ones = torch.ones(1, 1, dtype=torch.int32, device=token_ids.device)
    return counts.scatter_add_(1, token_ids, ones.expand_as(token_ids))[:, :vocab_size]


def apply_penalties(
    logits: torch.Tensor,
    prompt_token_ids: torch.Tensor,
    output_token_ids: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
    repetition: torch.Tensor,
) -> torch.Tensor:
    """Penalises, in place, logits f32 [l, V] by the tokens i64 [l, any] (padded with V) of prompts and outputs.

    The penalties are f32 [l]. Repetition (Keskar et al. 2019, "CTRL") divides a positive logit of a token that prompt
    or output has and multiplies another; then frequency times its count in the output is taken off, and presence if
    there is one (OpenAI's API).
    """
    vocab_size = logits.shape[1]
    counts = token_counts(output_token_ids, vocab_size)
    present = counts > 0
    seen = present | (token_counts(prompt_token_ids, vocab_size) > 0)
    factor = repetition.unsqueeze(1)
    logits.copy_(torch.where(seen, torch.where(logits > 0, logits / factor, logits * factor), logits))
    logits.sub_(frequency.unsqueeze(1) * counts)
    return logits.sub_(presence.unsqueeze(1) * present)
