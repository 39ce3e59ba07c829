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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from kernels.allot_verification import likeliest_lengths

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
    return likeliest_lengths(confidences, budget)


def _lengths(admitted: Tensor, order: Tensor, r: int, n: int) -> Tensor:
    """Admitted items per request; ``admitted`` i32 [r * N] is in the order ``order``. A prefix, as survival falls."""
    by_item = torch.zeros_like(admitted).scatter_(0, order, admitted)
    return by_item.view(r, n).sum(1, dtype=torch.int32)


@dataclass(frozen=True)
class StaleConfidences:
    """Confidences of one round, on the host; ``round`` says which."""

    round: int
    # [r, N], an array or nested sequences
    values: np.ndarray | Sequence[Sequence[float]]


def choose_budget(
    stale: StaleConfidences,
    current_round: int,
    draft_cost: CostTable | None,
    verify_cost: CostTable,
    *,
    num_reqs: int | None = None,
    num_tokens: int | None = None,
    budgets: Sequence[int] | None = None,
) -> tuple[int, float]:
    """The number of drafts worth verifying, from an earlier round's confidences: the host's half of "budgeted".

    The B that maximises (r + sum of the B largest survivals) / (draft_cost(r) + verify_cost(T + B)); the smallest on a
    tie. It changes from round to round slowly, which is why old confidences serve.

    Args:
        draft_cost: None where verify_cost is of a whole step, drafting included.
        num_reqs: r, where that has changed since: the requests are taken to be like those of then.
        num_tokens: T, tokens of the step without drafts; r where left out.
        budgets: the values of B that are possible, ascending; every one where left out.

    Returns:
        B, and the tokens that are expected of the step.

    Raises:
        ValueError: the confidences are of the current round or a later one: that budget would look at the drafts it
            judges, and the output would be biased.
    """
    if stale.round >= current_round:
        raise ValueError(
            f"a budget for round {current_round} from the confidences of round {stale.round} looks at the very drafts "
            "it decides on, which biases the output: use those of an earlier round"
        )
    confidences = np.asarray(stale.values, dtype=np.float64)
    known = len(confidences)
    r = known if num_reqs is None else num_reqs
    tokens = r if num_tokens is None else num_tokens
    survivals = confidences.cumprod(1).ravel()
    survivals.sort()
    gains = np.zeros(len(survivals) + 1)
    np.cumsum(survivals[::-1], out=gains[1:])
    every = range(r * confidences.shape[1] + 1)
    possible, costs = _costs(verify_cost, tokens, tuple(every if budgets is None else budgets))
    expected = r + np.interp(possible * (known / r), np.arange(len(gains)), gains) * (r / known)
    rates = expected / (costs if draft_cost is None else costs + draft_cost(r))
    # The first that is no worse than the best but for rounding.
    best = int(np.argmax(rates >= rates.max() * (1 - 1e-12)))
    return int(possible[best]), float(expected[best])


@lru_cache(maxsize=256)
def _costs(cost: CostTable, num_tokens: int, budgets: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """`budgets` i64, and the cost f64 of `num_tokens` with each of them: the same in nearly every step."""
    return np.array(budgets), np.array([cost(num_tokens + budget) for budget in budgets])


def step_costs_of(tables: Mapping[int, CostTable], num_reqs: int) -> CostTable:
    """The table that stands for ``num_reqs`` requests: of the next larger number that was measured, or the largest."""
    return tables[min((size for size in tables if size >= num_reqs), default=max(tables))]


class Budgets:
    """The host's half of "budgeted" over time: takes confidences as they arrive, gives budgets for the rounds to come.

    Args:
        step_costs: by the number of requests, microseconds of a whole step by its tokens, drafting included.
    """

    def __init__(self, step_costs: Mapping[int, CostTable]) -> None:
        self.step_costs = dict(sorted(step_costs.items()))
        self._latest: StaleConfidences | None = None

    def observe(self, confidences: StaleConfidences) -> None:
        """Confidences of a round whose output has arrived; an older round than the latest is ignored."""
        if self._latest is None or confidences.round > self._latest.round:
            self._latest = confidences

    def budget(
        self,
        current_round: int,
        num_reqs: int,
        num_drafts: int,
        *,
        num_tokens: int | None = None,
        budgets: Sequence[int] | None = None,
    ) -> tuple[int, float | None]:
        """B for a round of ``num_reqs`` requests with ``num_drafts`` each, and the tokens expected of it. All drafts
        and None while nothing is known. Arguments as of `choose_budget`.

        Raises:
            ValueError: what was observed last is of this very round, see `choose_budget`.
        """
        stale = self._latest
        if stale is None or not len(stale.values) or not self.step_costs:
            return (num_reqs * num_drafts if budgets is None else budgets[-1]), None
        return choose_budget(
            stale, current_round, None, step_costs_of(self.step_costs, num_reqs), num_reqs=num_reqs,
            num_tokens=num_tokens, budgets=budgets,
        )  # fmt: skip
