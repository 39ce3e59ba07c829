"""Kernels 23 to 28: speculative sampling's verification, by rejection.

Drafts are judged by the target's logits behind the step's forward pass. What comes out has exactly the target's law
("synthetic" apart), whatever the drafts, as long as

- `draft_logits` are those that the drafts were drawn from, or a draft was not drawn (then its law has one token);
- how many drafts a request has does not depend on what was drawn;
- no noise is used twice. Each purpose has its stream (noise.py). Moreover a draft that is thrown away has looked at its
  noise, and the position comes again in the next round: so the noise of draft j of a round is named by the position
  where the draft stands and by j (`draft_noise_positions`), which no two rounds share.
"""

from typing import NamedTuple

import torch

from kernels.dispatch import check_tensors, resolve_form
from kernels.rejection_loop import loop_form
from kernels.rejection_torch import draft_noise_positions, torch_form
from kernels.rejection_triton import triton_form

__all__ = ["METHODS", "DraftedBatch", "Race", "RejectionOutput", "draft_noise_positions", "rejection_sample"]
METHODS = ("standard", "block", "synthetic")


class DraftedBatch(NamedTuple):
    """The r requests of a step; one with k drafts has k + 1 rows of logits."""

    # [r] i32, -1 for padding
    idx_mapping: torch.Tensor
    # [r + 1] i32, ascending from 0
    cu_num_logits: torch.Tensor
    # [l] i32 or i64, input token of each logits row: at local position j >= 1 draft j; a negative one ends the drafts
    token_ids: torch.Tensor
    # [l] i64, where the token stands that is drawn from the row
    positions: torch.Tensor
    max_drafts: int
    """N: the most that a request may have, which the host knows."""


class Race(NamedTuple):
    """The race for a request's own token, of which the best tile of the vocabulary is not found yet: the token of the
    largest maximum, the lowest of several, belongs to column `num_sampled - 1`."""

    # [r, tiles] f32
    tile_max: torch.Tensor
    # [r, tiles] i64
    tile_argmax: torch.Tensor


class RejectionOutput(NamedTuple):
    """Of row i the first `num_sampled[i]` tokens: accepted drafts, then one of the target's own; behind them -1.

    The draft at local position j + 1 is judged by logits row j: there stand p and q, the target's and the drafter's
    probability of it, and its uniform u. 0 in a request's rows without a draft, anything in rows of nobody. A greedy
    request's p is 1 for the argmax, else 0.
    """

    # [r, N + 1] i64
    sampled: torch.Tensor
    # [r] i32
    num_sampled: torch.Tensor
    # [l] f32
    target_probs: torch.Tensor
    # [l] f32
    draft_probs: torch.Tensor
    # [l] f32, in [0, 1)
    uniforms: torch.Tensor
    # What is still to be inserted into `sampled`, or None
    race: Race | None = None


def rejection_sample(
    # [l, V] f32, behind temperature and filters
    target_logits: torch.Tensor,
    # [R, >= N, V] f32, behind the drafter's; None for drafts that were not drawn
    draft_logits: torch.Tensor | None,
    batch: DraftedBatch,
    # [R] f32
    temperature: torch.Tensor,
    # [R] i64
    seeds: torch.Tensor,
    *,
    method: str = "standard",
    # [>= N] f32
    acceptance_rates: torch.Tensor | None = None,
    all_greedy: bool = False,
    insert: bool = True,
    form: str = "auto",
) -> RejectionOutput:
    """Accept a prefix of each request's drafts and draw one token more.

    Temperature 0: a draft is accepted if it is the argmax, and the token more is the argmax. Draft j of a request with
    another temperature was drawn from softmax(draft_logits[row, j]). A request without drafts gets the token that
    `gumbel_sample` with Purpose.SAMPLE gives it, and so does one whose drafts are all accepted.

    Args:
        method: "standard", draft by draft; "block", the drafts as a whole, which accepts no fewer on average;
            "synthetic", by `acceptance_rates` alone, which has another law: for benchmarks.
        acceptance_rates: the rate at which draft j is accepted if those before it were.
        all_greedy: the host knows that every temperature is 0: draw no noise.
        insert: False leaves the insertion, if it takes a launch, to whoever gets the result's `race`.

    Raises:
        ValueError: a wrong dtype, rank, length, method or form; rates with or without "synthetic".
    """
    num_reqs, num_logits = batch.idx_mapping.shape[0], target_logits.shape[0]
    check_tensors(torch.float32, 2, logits=target_logits)
    check_tensors(torch.int32, 1, idx_mapping=batch.idx_mapping)
    check_tensors(torch.int32, 1, num_reqs + 1, cu_num_logits=batch.cu_num_logits)
    check_tensors(None, 1, num_logits, token_ids=batch.token_ids)
    check_tensors(torch.int64, 1, num_logits, positions=batch.positions)
    check_tensors(torch.float32, 1, temperature=temperature)
    check_tensors(torch.int64, 1, temperature.shape[0], seeds=seeds)
    if draft_logits is not None:
        check_tensors(torch.float32, 3, temperature.shape[0], draft_logits=draft_logits)
        if draft_logits.shape[2] != target_logits.shape[1] or draft_logits.shape[1] < batch.max_drafts:
            raise ValueError(
                f"draft_logits of shape {tuple(draft_logits.shape)} must have at least {batch.max_drafts} drafts and "
                f"the target's vocabulary of {target_logits.shape[1]} tokens"
            )
    if method not in METHODS:
        raise ValueError(f"unknown rejection method {method!r}: choose one of {', '.join(METHODS)}")
    if (method == "synthetic") != (acceptance_rates is not None):
        raise ValueError("acceptance_rates belong to the method 'synthetic', and it needs them")
    if acceptance_rates is not None:
        check_tensors(torch.float32, 1, batch.max_drafts, acceptance_rates=acceptance_rates)
    form = resolve_form(form, target_logits)
    args = (target_logits, draft_logits, batch, temperature, seeds, method, acceptance_rates)
    if form == "torch":
        sampled, num_sampled, p, q, u = torch_form(*args, all_greedy)
        return RejectionOutput(sampled, num_sampled, p, q, u)
    device = target_logits.device
    p, q, u = (torch.empty(num_logits, device=device) for _ in range(3))
    out = RejectionOutput(
        torch.empty(num_reqs, batch.max_drafts + 1, dtype=torch.int64, device=device),
        torch.empty(num_reqs, dtype=torch.int32, device=device), p, q, u,
    )  # fmt: skip
    if form == "loop":
        loop_form(*args, out[:5])
        return out
    race = Race(*triton_form(*args, all_greedy, out[:5], form, insert))
    return out if insert else out._replace(race=race)
