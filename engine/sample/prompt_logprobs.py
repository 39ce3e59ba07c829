"""Logprobs of a prompt's own tokens, for a stretch of it at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from .logprobs import LogprobsTensors, RequestLogprobs, compute_logprobs, rows_to_dicts

LOGITS_ROWS = 256
"""Prompt positions whose logits exist at the same time."""


@dataclass(frozen=True)
class PromptLogprobs:
    """Entry i belongs to prompt position `start + i`, counted from 0, with the `k` most likely tokens there. Position 0
    has none: nothing comes before it. Logits of `chunk_rows` positions existed at a time."""

    start: int
    entries: list[RequestLogprobs]
    k: int
    chunk_rows: int


def compute_prompt_logprobs(
    hidden: torch.Tensor,
    targets: torch.Tensor,
    k: int,
    compute_logits: Callable[[torch.Tensor], torch.Tensor],
    logits_rows: int = LOGITS_ROWS,
) -> LogprobsTensors:
    """hidden [n, H] of prompt tokens, targets i64 [n] the token behind each. Logits are made for at most `logits_rows`
    positions at a time, so that a long prompt needs no [n, V]."""
    parts = [
        compute_logprobs(compute_logits(hidden[begin : begin + logits_rows]), targets[begin : begin + logits_rows], k)
        for begin in range(0, hidden.shape[0], logits_rows)
    ]
    return LogprobsTensors(
        torch.cat([part.token_ids for part in parts]),
        torch.cat([part.logprobs for part in parts]),
        torch.cat([part.ranks for part in parts]),
    )


def prompt_logprobs_of(host: dict[str, torch.Tensor], start: int, k: int) -> PromptLogprobs:
    """From `LogprobsTensors.as_dict()` on the host."""
    token_ids, logprobs, ranks = (host[name].numpy() for name in ("token_ids", "logprobs", "ranks"))
    entries = [rows_to_dicts(token_ids, logprobs, ranks, row, k) for row in range(len(ranks))]
    return PromptLogprobs(start, entries, k, LOGITS_ROWS)
