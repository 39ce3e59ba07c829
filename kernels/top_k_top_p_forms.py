"""The torch and the loop form of `mask_top_k_top_p`."""

import math

import torch

NEG_INF = float("-inf")


def mask_torch(
    logits: torch.Tensor,
    expanded_idx_mapping: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> None:
    """See `mask_top_k_top_p`; without a host wait."""
    vocab_size = logits.shape[1]
    rows = expanded_idx_mapping[: logits.shape[0]].long().unsqueeze(1)
    is_row, rows = rows >= 0, rows.clamp(min=0)
    k, p, floor = top_k[rows], top_p[rows], min_p[rows]
    filtered = is_row & ((k < vocab_size) | (p < 1) | (floor > 0))
    # Stable, so that ties stand in order of their ids.
    x, order = logits.masked_fill(logits.isnan(), NEG_INF).sort(dim=-1, descending=True, stable=True)
    best = x[:, :1].clone()
    x.masked_fill_(x < best + floor.log(), NEG_INF)
    x.masked_fill_(x < x.gather(1, (k.long() - 1).clamp(0, vocab_size - 1)), NEG_INF)
    mass = torch.where(x == best, 1, (x - best).exp())
    up_to = mass.cumsum(dim=-1)
    drop = (up_to - mass >= p * up_to[:, -1:]) & (p < 1)
    drop[:, 0] = False
    kept = torch.empty_like(x).scatter_(1, order, x.masked_fill_(drop, NEG_INF))
    logits.copy_(torch.where(filtered, kept, logits))


def mask_loop(
    logits: torch.Tensor,
    expanded_idx_mapping: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> None:
    """See `mask_top_k_top_p`."""
    for i in range(logits.shape[0]):
        row = int(expanded_idx_mapping[i])
        if row < 0:
            continue
        k, p, floor = int(top_k[row]), float(top_p[row]), float(min_p[row])
        if k < logits.shape[1] or p < 1 or floor > 0:
            kept = torch.tensor(survivors(logits[i].tolist(), k, p, floor), dtype=torch.int64)
            values = logits[i, kept]
            logits[i] = NEG_INF
            logits[i, kept] = values


def survivors(logits: list[float], top_k: int, top_p: float, min_p: float) -> list[int]:
    """Return the ids that the filters of one row keep, best first: the specification."""
    order = sorted((i for i, x in enumerate(logits) if x > NEG_INF), key=lambda i: (-logits[i], i))
    if not order:
        return []
    best = logits[order[0]]
    if min_p > 0:
        order = [i for i in order if logits[i] >= best + math.log(min_p)]
    kth = logits[order[min(top_k, len(order)) - 1]]
    order = [i for i in order if logits[i] >= kth]
    if top_p >= 1:
        return order
    mass = [1.0 if logits[i] == best else math.exp(logits[i] - best) for i in order]
    kept, before, target = 1, mass[0], top_p * sum(mass)
    while kept < len(order) and before < target:
        before += mass[kept]
        kept += 1
    return order[:kept]
