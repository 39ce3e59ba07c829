"""How many drafts of each request are verified.

Symbols: r requests, N drafts a request, c_j confidence of draft j, survival a_j = c_1 * ... * c_j.

**What keeps a schedule lossless.** The rejection rule gives the target's law if it was decided without a look at draft
j or a later one whether draft j is verified. c_j looks at drafts up to j - 1 (the Markov embedding of the one before).
So a decision on draft j may use c_1 .. c_j, and all that other requests and earlier rounds drew, and nothing else:
then, given the drafts before it, draft j has the law q that the rule divides by, verified or not. This holds for block
verification too: its acceptance is built up node by node from the last verified draft, and where the drafts end early
by such a decision is an end like any other.

| schedule | decision on draft j looks at | |
|---|---|---|
| fixed | nothing | lossless |
| threshold | c_1 .. c_j | lossless |
| Algorithm 1 | items admitted before it, and its own a_j | lossless |
| budgeted | B, fixed beforehand; items with a larger survival | lossless, if B is from an earlier round |
| budgeted, B from this round's confidences | all of c, so later drafts too | **refused**: biased |

Confidences here are probabilities, behind sigmoid and calibration. A draft that isn't there (a request in its prompt,
at its length limit, padding of a captured batch) has confidence 0, and whoever uses the lengths clamps them to what is
there, a limit that no draw decides. Device functions read nothing on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .costs import CostTable


def survival(confidences: Tensor) -> Tensor:
    """a [r, N] of c [r, N]: never rising along a row."""
    return confidences.cumprod(1)


def fixed_lengths(num_reqs: int, k: int, device: torch.device) -> Tensor:
    """k drafts each, i32 [r]. Lossless: nothing is looked at."""
    return torch.full((num_reqs,), k, dtype=torch.int32, device=device)


def threshold_lengths(confidences: Tensor, threshold: float) -> Tensor:
    """Drafts before the first c_j < threshold, i32 [r]; later ones never come back. 0 verifies all.

    Lossless: whether draft j is verified depends on c_1 .. c_j alone.

    Raises:
        ValueError: threshold outside 0 .. 1.
    """
    if not 0.0 <= threshold <= 1.0:
        raise ValueError(f"confidence threshold {threshold}: possible are 0 (verify all) to 1")
    return (confidences >= threshold).cumprod(1, dtype=torch.int32).sum(1, dtype=torch.int32)


def early_stop_lengths(confidences: Tensor, steps_per_second: Tensor) -> Tensor:
    """The paper's Algorithm 1: admit items by falling survival while throughput rises, i32 [r].

    Throughput with B items admitted is (r + sum of their survivals) * SPS(r + B). The first item that would lower it is
    not admitted, and none behind it.

    Lossless: items come in order of survival, a request's own in order of position. An item is admitted if every one
    before it was and it doesn't lower the throughput itself; of its own request that is a_1 .. a_j. A better total
    further on, behind a drop, is not looked for: that would let draft j in because of what came behind it.

    Args:
        confidences: f32 [r, N].
        steps_per_second: f32 [>= r * (N + 1) + 1]: SPS of a step that verifies that many tokens, bonus rows counted.
    """
    r, n = confidences.shape
    ordered, order = survival(confidences).flatten().sort(descending=True, stable=True)
    gains = torch.cat((ordered.new_zeros(1), ordered.cumsum(0)))
    throughput = (r + gains) * steps_per_second[r : r + r * n + 1]
    admitted = (throughput[1:] >= throughput[:-1]).cumprod(0, dtype=torch.int32)
    return _lengths(admitted, order, r, n)


def top_budget_lengths(confidences: Tensor, budget: Tensor) -> Tensor:
    """The B items with the largest survival, as lengths i32 [r].

    Lossless if ``budget`` was fixed without these confidences: the rank of (request, j) depends on items with a larger
    survival only, and of its own request those are earlier positions. Ties go to the lower request, then the lower
    position, which no draw decides.

    Args:
        confidences: f32 [r, N].
        budget: i32 or i64 [] or [1], on the device.
    """
    r, n = confidences.shape
    order = survival(confidences).flatten().sort(descending=True, stable=True).indices
    rank = torch.arange(r * n, device=order.device)
    return _lengths((rank < budget).to(torch.int32), order, r, n)


def _lengths(admitted: Tensor, order: Tensor, r: int, n: int) -> Tensor:
    """Admitted items per request; ``admitted`` i32 [r * N] is in the order ``order``. A prefix, as survival falls."""
    by_item = torch.zeros_like(admitted).scatter_(0, order, admitted)
    return by_item.view(r, n).sum(1, dtype=torch.int32)


@dataclass(frozen=True)
class StaleConfidences:
    """Confidences of one round, on the host; ``round`` says which."""

    round: int
    # [r][N]
    values: Sequence[Sequence[float]]


def choose_budget(
    stale: StaleConfidences,
    current_round: int,
    draft_cost: CostTable,
    verify_cost: CostTable,
    num_tokens: int | None = None,
) -> int:
    """The number of drafts worth verifying, from an earlier round's confidences: the host's half of "budgeted".

    The B that maximises (r + sum of the B largest survivals) / (draft_cost(r) + verify_cost(T + B)); the smallest on a
    tie. It changes from round to round slowly, which is why old confidences serve.

    Args:
        num_tokens: T, tokens of the step without drafts; r where left out.

    Raises:
        ValueError: the confidences are of the current round or a later one: that budget would look at the drafts it
            judges, and the output would be biased.
    """
    if stale.round >= current_round:
        raise ValueError(
            f"a budget for round {current_round} from the confidences of round {stale.round} looks at the very drafts "
            "it decides on, which biases the output: use those of an earlier round"
        )
    items = sorted((a for row in stale.values for a in _survival(row)), reverse=True)
    r = len(stale.values)
    tokens = r if num_tokens is None else num_tokens
    drafting, expected, best, best_rate = draft_cost(r), float(r), 0, 0.0
    for budget in range(len(items) + 1):
        if budget:
            expected += items[budget - 1]
        rate = expected / (drafting + verify_cost(tokens + budget))
        if rate > best_rate * (1 + 1e-12):
            best, best_rate = budget, rate
    return best


class Budgets:
    """The host's half of "budgeted" over time: takes confidences as they arrive, gives budgets for the rounds to come.

    Args:
        draft_cost: microseconds by requests; verify_cost: by tokens of the step.
    """

    def __init__(self, draft_cost: CostTable, verify_cost: CostTable) -> None:
        self.draft_cost, self.verify_cost = draft_cost, verify_cost
        self._latest: StaleConfidences | None = None

    def observe(self, confidences: StaleConfidences) -> None:
        """Confidences of a round whose output has arrived; an older round than the latest is ignored."""
        if self._latest is None or confidences.round > self._latest.round:
            self._latest = confidences

    def budget(self, current_round: int, num_reqs: int, num_drafts: int) -> int:
        """B for a round of ``num_reqs`` requests with ``num_drafts`` each; all of them while nothing is known.

        Scaled where the number of requests has changed since.

        Raises:
            ValueError: what was observed last is of this very round, see `choose_budget`.
        """
        available, stale = num_reqs * num_drafts, self._latest
        if stale is None or not stale.values:
            return available
        chosen = choose_budget(stale, current_round, self.draft_cost, self.verify_cost)
        return min(available, round(chosen * num_reqs / len(stale.values)))


def _survival(row: Sequence[float]) -> list[float]:
    product, out = 1.0, []
    for confidence in row:
        product *= confidence
        out.append(product)
    return out
