"""Logprobs of sampled tokens, for both runners."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

RequestLogprobs = dict[int, tuple[float, int | None]]


@dataclass(frozen=True)
class LogprobsTensors:
    """`token_ids` i64 and `logprobs` f32 [l, k + 1], column 0 the sampled token; `ranks` i64 [l] of the sampled
    token."""

    token_ids: torch.Tensor
    logprobs: torch.Tensor
    ranks: torch.Tensor

    def as_dict(self) -> dict[str, torch.Tensor]:
        return {"token_ids": self.token_ids, "logprobs": self.logprobs, "ranks": self.ranks}


def compute_logprobs(logits: torch.Tensor, sampled: torch.Tensor, k: int) -> LogprobsTensors:
    """log_softmax of the model's own logits (before temperature and filters, as vLLM's default) for the k best and
    `sampled`.

    logits f32 [l, V], sampled i64 [l]. A rank counts the tokens whose logit is at least the sampled one's, so that
    two tied tokens both have the higher number.
    """
    column = sampled.unsqueeze(1)
    own = logits.gather(1, column)
    normaliser = logits.logsumexp(dim=-1, keepdim=True)
    ranks = (logits >= own).sum(dim=-1)
    best, best_ids = logits.topk(min(k, logits.shape[-1]), dim=-1)
    return LogprobsTensors(torch.cat([column, best_ids], dim=1), torch.cat([own, best], dim=1) - normaliser, ranks)


def rows_to_dicts(token_ids: np.ndarray, logprobs: np.ndarray, ranks: np.ndarray, row: int, k: int) -> RequestLogprobs:
    """Row `row` as token id -> (logprob, rank): the sampled token first, then the `k` best in order."""
    result: RequestLogprobs = {int(token_ids[row, 0]): (float(logprobs[row, 0]), int(ranks[row]))}
    for rank in range(1, k + 1):
        result.setdefault(int(token_ids[row, rank]), (float(logprobs[row, rank]), rank))
    return result
