"""What became of the drafts of a step, for who watches: nothing of it runs otherwise.

The rejection rule has p, q and u of every draft at hand; they leave with the step's output, so that a trace changes
nothing and makes nobody wait. r requests, N drafts at most, k drafts of one request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

_PREFIX = "drafts judged by "


@dataclass(frozen=True, slots=True)
class DraftTrace:
    """The k >= 1 drafts of a request in one step, and how they were judged.

    `target_probs`, `draft_probs` and `uniforms` [k] are p, q and u as in `kernels.RejectionOutput`; `confidences` [k],
    None where the drafter has none. The first `num_accepted` drafts stand; the `next_token_id` of the target's own
    follows them: behind all k a bonus, else a correction. `method` names the rule, as in `rejection_sample_method`;
    "synthetic" accepts by given rates, and its tokens are not the target's.
    """

    method: str
    token_ids: tuple[int, ...]
    target_probs: tuple[float, ...]
    draft_probs: tuple[float, ...]
    uniforms: tuple[float, ...]
    confidences: tuple[float, ...] | None
    num_accepted: int
    next_token_id: int


def padded_drafts(token_ids: torch.Tensor, cu_num_logits: torch.Tensor, max_drafts: int) -> torch.Tensor:
    """Each request's drafts i64 [r, N], -1 behind the last; from the input tokens of the rows of logits, i64 or i32
    [l], of which those of request i begin at `cu_num_logits[i]` [r + 1]."""
    row, last = _rows(cu_num_logits, max_drafts)
    drafts = torch.where(row < last, token_ids[(row + 1).clamp_(max=len(token_ids) - 1)].long(), -1)
    # A draft that is none ends its request's drafts.
    return torch.where((drafts >= 0).cumprod(dim=1).bool(), drafts, -1)


def padded_rows(values: torch.Tensor, cu_num_logits: torch.Tensor, max_drafts: int) -> torch.Tensor:
    """[r, N] of `values` [l]; a row of logits judges the draft behind its token. What is behind a request's drafts has
    no meaning."""
    return values[_rows(cu_num_logits, max_drafts)[0]]


def draft_tensors(
    method: str,
    drafts: torch.Tensor,
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor,
    uniforms: torch.Tensor,
    confidences: torch.Tensor | None,
) -> dict[str, torch.Tensor]:
    """Called on the stream: what `read_draft_traces` wants, one small tensor f32 [r, 4 or 5, N] that leaves with the
    step's output. `drafts` of `padded_drafts`, the others f32 [r, N]."""
    # A token id below 2^24 is exact in f32, so one tensor brings all.
    parts = [drafts.float(), target_probs, draft_probs, uniforms]
    if confidences is not None:
        parts.append(confidences[:, : drafts.shape[1]])
    return {_PREFIX + method: torch.stack(parts, dim=1)}


def read_draft_traces(
    host: Mapping[str, np.ndarray], req_ids: Sequence[str], sampled: np.ndarray, num_sampled: np.ndarray
) -> dict[str, DraftTrace] | None:
    """By request, of those that had drafts; None if the step was not traced.

    Args:
        host: what `draft_tensors` gave, copied to the host, among other things.
        sampled, num_sampled: the step's tokens i64 [r, N + 1], and how many of each row [r] count.
    """
    name = next((name for name in host if name.startswith(_PREFIX)), None)
    if name is None:
        return None
    method, found = name.removeprefix(_PREFIX), {}
    for row, (req_id, count) in enumerate(zip(req_ids, num_sampled.tolist(), strict=True)):
        k = int((host[name][row, 0] >= 0).sum())
        if not k or not count:
            continue
        ids, p, q, u, *confidences = host[name][row, :, :k].tolist()
        found[req_id] = DraftTrace(
            method, tuple(map(int, ids)), tuple(p), tuple(q), tuple(u),
            tuple(confidences[0]) if confidences else None, count - 1, int(sampled[row, count - 1]),
        )  # fmt: skip
    return found


def _rows(cu_num_logits: torch.Tensor, max_drafts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The row of logits that judges each draft i64 [r, N], not beyond the request's last [r, 1]."""
    begin, last = cu_num_logits[:-1].long().unsqueeze(1), cu_num_logits[1:].long().unsqueeze(1) - 1
    return torch.minimum(begin + torch.arange(max_drafts, device=cu_num_logits.device), last), last
