"""Filters that both runners apply to logits before the draw. l rows, V vocabulary. Nothing here makes the host wait."""

from __future__ import annotations

import torch

NEG_INF = float("-inf")


def apply_min_p(logits: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """Masks, in place, tokens whose probability is below min_p times the best one's. logits f32 [l, V], min_p f32
    [l]."""
    # p_i / p_max = exp(logit_i - logit_max): no softmax is needed. log(0) is -inf, which masks nothing.
    threshold = logits.amax(dim=-1, keepdim=True) + min_p.log().unsqueeze(1)
    return logits.masked_fill_(logits < threshold, NEG_INF)


def apply_top_k_top_p(logits: torch.Tensor, top_k: torch.Tensor | None, top_p: torch.Tensor | None) -> torch.Tensor:
    """Keeps, in place, the top_k best tokens and of these the smallest set with probability top_p (its last member
    included).

    logits f32 [l, V]; top_k i32 [l], V for off; top_p f32 [l], 1 for off. None skips a filter for the whole batch.
    Tokens that tie with the k-th are all kept.
    """
    if top_k is None and top_p is None:
        return logits
    # Stable, so that of tied tokens the lowest id comes first and is kept.
    descending, order = logits.sort(dim=-1, descending=True, stable=True)
    if top_k is not None:
        kth = descending.gather(1, top_k.long().sub(1).clamp(max=logits.shape[-1] - 1).unsqueeze(1))
        descending.masked_fill_(descending < kth, NEG_INF)
    if top_p is not None:
        probs = descending.softmax(dim=-1)
        mass_before = probs.cumsum(dim=-1).sub_(probs)
        # Rounded sums reach 1 before the last token: where top_p is off nothing may go.
        drop = (mass_before >= top_p.unsqueeze(1)) & (top_p < 1).unsqueeze(1)
        drop[:, 0] = False
        descending.masked_fill_(drop, NEG_INF)
    return logits.scatter_(1, order, descending)


def mask_stop_ids(logits: torch.Tensor, stop_ids: torch.Tensor, active: torch.Tensor) -> torch.Tensor:
    """Forbids, in place, each row's `stop_ids` i64 [l, S] (-1 is none) where `active` bool [l]: it is below
    min_tokens."""
    forbid = active.unsqueeze(1) & (stop_ids >= 0)
    ids = stop_ids.clamp(min=0)
    # Slots without an id point at token 0: amin keeps its logit unless another slot forbids it.
    values = torch.where(forbid, torch.full_like(forbid, NEG_INF, dtype=logits.dtype), logits.gather(1, ids))
    return logits.scatter_reduce_(1, ids, values, reduce="amin")


def apply_grammar_bitmask(logits: torch.Tensor, rows: torch.Tensor, bitmask: torch.Tensor) -> torch.Tensor:
    """Forbids, in place, the tokens t of rows i64 [n] whose bit t % 32 of `bitmask[:, t // 32]` i32 [n, ceil(V / 32)]
    is 0."""
    shifts = torch.arange(32, dtype=torch.int32, device=logits.device)
    allowed = (bitmask.unsqueeze(-1) >> shifts & 1).flatten(1)[:, : logits.shape[1]].bool()
    return logits.index_copy_(0, rows, logits[rows].masked_fill_(~allowed, NEG_INF))


def apply_allowed_token_ids(logits: torch.Tensor, rows: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Forbids, in place, every token of rows i64 [n] but those of `token_ids` i64 [n, any]; padding repeats one of
    them."""
    kept = torch.full((rows.shape[0], logits.shape[1]), NEG_INF, dtype=logits.dtype, device=logits.device)
    kept.scatter_(1, token_ids, logits[rows].gather(1, token_ids))
    return logits.index_copy_(0, rows, kept)


def apply_logit_bias(
    logits: torch.Tensor, rows: torch.Tensor, token_ids: torch.Tensor, biases: torch.Tensor
) -> torch.Tensor:
    """Adds, in place, bias i f32 to the logit of token i i64 in row i i64, each [n]; no pair comes twice."""
    return logits.index_put_((rows, token_ids), biases, accumulate=True)


def forbid_tokens(logits: torch.Tensor, rows: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Forbids, in place, token i i64 in row i i64, each [n]."""
    return logits.index_put_((rows, token_ids), torch.full_like(rows, NEG_INF, dtype=logits.dtype))
