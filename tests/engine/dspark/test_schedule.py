"""Verification lengths: the published cases, prefixes always, and the law of the output under each schedule."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.dspark.costs import CostTable
from engine.dspark.schedule import (
    Budgets,
    StaleConfidences,
    choose_budget,
    early_stop_lengths,
    fixed_lengths,
    survival,
    threshold_lengths,
    top_budget_lengths,
)
from tests.kernels.test_no_host_wait import NoHostWait, forbid_waits

CASE = ((0.9, 0.8, 0.5), (0.6, 0.5, 0.4), (0.95, 0.9, 0.9))
CONFIDENCES = torch.tensor(CASE)
DRAFT_COST = CostTable((1,), (300.0,))


def flat(cost: float) -> CostTable:
    return CostTable((0,), (cost,))


SLOPED = CostTable(tuple(range(13)), tuple(200.0 + 200.0 * t for t in range(13)))
STAIRCASE = CostTable((8, 12), (1000.0, 2000.0), step_limit=12)


def test_threshold() -> None:
    """T14."""
    assert threshold_lengths(CONFIDENCES, 0.55).tolist() == [2, 1, 3]
    assert threshold_lengths(torch.tensor([[0.9, 0.4, 0.95]]), 0.55).tolist() == [1]
    assert threshold_lengths(CONFIDENCES, 0.0).tolist() == [3, 3, 3]
    assert threshold_lengths(torch.tensor([[0.5, 0.9, 0.9]]), 0.55).tolist() == [0]
    with pytest.raises(ValueError, match=r"possible are 0 .* to 1"):
        threshold_lengths(CONFIDENCES, 1.5)


@pytest.mark.parametrize(
    ("verify", "budget", "lengths"), [(flat(1000.0), 9, [3, 3, 3]), (SLOPED, 5, [2, 0, 3]), (STAIRCASE, 5, [2, 0, 3])]
)
def test_budget(verify: CostTable, budget: int, lengths: list[int]) -> None:
    """T15."""
    chosen, expected = choose_budget(StaleConfidences(6, CASE), 7, DRAFT_COST, verify)
    assert chosen == budget
    best = sorted(survival(CONFIDENCES).flatten().tolist(), reverse=True)[:budget]
    assert abs(expected - 3 - sum(best)) < 1e-6
    assert top_budget_lengths(CONFIDENCES, torch.tensor(budget)).tolist() == lengths


def test_fixed() -> None:
    assert fixed_lengths(3, 5, torch.device("cpu")).tolist() == [5, 5, 5]


def early_stop_by_hand(confidences: list[list[float]], sps: list[float]) -> list[int]:
    r, lengths = len(confidences), [0] * len(confidences)
    items = sorted(
        (
            (-float(np.prod(row[: j + 1], dtype=np.float32)), i, j)
            for i, row in enumerate(confidences)
            for j in range(len(row))
        )
    )
    total, best = float(r), r * sps[r]
    for admitted, (negative, i, _) in enumerate(items, 1):
        total -= negative
        if total * sps[r + admitted] < best:
            break
        best = total * sps[r + admitted]
        lengths[i] += 1
    return lengths


@given(seed=st.integers(0, 2**31), r=st.integers(1, 6), n=st.integers(1, 5))
@settings(deadline=None)
def test_early_stop_against_the_loop(seed: int, r: int, n: int) -> None:
    g = torch.Generator().manual_seed(seed)
    confidences = torch.rand(r, n, generator=g)
    sps = torch.rand(r * (n + 1) + 1, generator=g).cumsum(0).add(1.0).reciprocal()
    assert early_stop_lengths(confidences, sps).tolist() == early_stop_by_hand(confidences.tolist(), sps.tolist())


def test_early_stop_does_not_look_behind_a_drop() -> None:
    """One more token costs much, a third one nothing: all three would be best, but only a leak finds that out."""
    sps = torch.tensor([1.0, 1.0, 0.4, 0.4, 0.4])
    confidences = torch.tensor([[0.99, 0.99, 0.99]])
    assert 4 * 0.4 > 1 * 1.0
    assert early_stop_lengths(confidences, sps).tolist() == [0]


@given(seed=st.integers(0, 2**31), r=st.integers(1, 6), n=st.integers(1, 6), threshold=st.floats(0, 1))
@settings(deadline=None)
def test_lengths_are_prefixes_that_ignore_what_comes_later(seed: int, r: int, n: int, threshold: float) -> None:
    """Changing c_{j+1} .. of a request never changes whether its draft j is verified."""
    g = torch.Generator().manual_seed(seed)
    confidences = torch.rand(r, n, generator=g)
    budget = torch.randint(0, r * n + 1, (), generator=g)
    sps = torch.rand(r * (n + 1) + 1, generator=g).cumsum(0).add(1.0).reciprocal()
    schedules: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda c: threshold_lengths(c, threshold),
        lambda c: early_stop_lengths(c, sps),
        lambda c: top_budget_lengths(c, budget),
    ]
    row, j = int(torch.randint(r, (), generator=g)), int(torch.randint(n, (), generator=g))
    changed = confidences.clone()
    changed[row, j + 1 :] = torch.rand(n - j - 1, generator=g)
    for lengths in schedules:
        before, after = lengths(confidences), lengths(changed)
        assert before.dtype == torch.int32 and (before >= 0).all() and (before <= n).all()
        assert bool(before[row] > j) == bool(after[row] > j)


@given(
    st.lists(st.lists(st.floats(0, 1), min_size=3, max_size=3), min_size=1, max_size=4),
    st.floats(0, 500),
    st.floats(0, 500),
)
@settings(deadline=None)
def test_a_steeper_cost_never_buys_more(rows: list[list[float]], slope: float, more: float) -> None:
    def cost(slope: float) -> CostTable:
        return CostTable(tuple(range(20)), tuple(100.0 + slope * t for t in range(20)))

    stale = StaleConfidences(0, rows)
    cheap, dear = (choose_budget(stale, 1, DRAFT_COST, cost(s)) for s in (slope, slope + more))
    assert dear[0] <= cheap[0]


def test_a_budget_of_the_round_itself_is_refused() -> None:
    for current in (6, 5):
        with pytest.raises(ValueError, match="biases the output: use those of an earlier round"):
            choose_budget(StaleConfidences(6, CASE), current, DRAFT_COST, SLOPED)


def test_budgets_follow_the_confidences_that_have_arrived() -> None:
    steps = CostTable(tuple(range(40)), tuple(500.0 + 200.0 * t for t in range(40)))
    doubled = CostTable(tuple(range(40)), tuple(1000.0 + 200.0 * t for t in range(40)))
    budgets = Budgets({3: steps, 6: doubled})
    assert budgets.budget(0, 3, 3) == (9, None)
    budgets.observe(StaleConfidences(2, CASE))
    budgets.observe(StaleConfidences(1, [[0.0] * 3] * 3))
    assert budgets.budget(3, 3, 3)[0] == 5
    # Twice the requests are twice as many like them; and of given budgets the best.
    assert budgets.budget(4, 6, 3)[0] == 10
    assert budgets.budget(4, 3, 3, budgets=(0, 3, 9))[0] == 3
    # A padded step costs what it is padded to.
    assert budgets.budget(4, 3, 3, num_tokens=20)[0] == 8
    with pytest.raises(ValueError, match="biases the output"):
        budgets.budget(2, 3, 3)
    budgets.observe(StaleConfidences(5, []))
    assert budgets.budget(6, 2, 3) == (6, None)


def test_cost_tables() -> None:
    table = CostTable((1, 4, 8, 16), (10.0, 20.0, 40.0, 120.0), step_limit=4)
    assert [table(n) for n in (0, 1, 2, 4, 6, 8, 12, 16, 24)] == [10, 10, 20, 20, 30, 40, 80, 120, 200]
    noisy = iter([5.0, 8.0, 9.0, 1.0, 7.0, 2.0])
    assert CostTable.measured((1, 2), lambda size: next(noisy), repeats=3).costs == (7.0, 7.0)
    # A machine that is busy for two measurements in a row.
    busy = iter([90.0, 90.0, 1.0, 2.0, 1.0, 2.0])
    assert CostTable.measured((1, 2), lambda size: next(busy), repeats=3).costs == (1.0, 2.0)
    for sizes, costs in (((), ()), ((2, 1), (1.0, 2.0)), ((1, 2), (2.0, 1.0)), ((1,), (0.0,))):
        with pytest.raises(ValueError, match="cost"):
            CostTable(sizes, costs)


def test_no_host_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    confidences, sps, budget = torch.rand(4, 3), torch.ones(17), torch.tensor(5)
    with monkeypatch.context() as patch, NoHostWait("cpu"):
        forbid_waits(patch)
        early_stop_lengths(confidences, sps)
        top_budget_lengths(confidences, budget)
        threshold_lengths(confidences, 0.5)


# -- the law ----------------------------------------------------------------------------------------------------------

# A vocabulary of 2. Whatever the prefix, the drafter says 0 with .9 where the target says it with .5; the confidence of
# the second draft is high behind a first draft of 0.
Q, P = 0.9, 0.5
TRIALS = 200_000


def confidences_of(first: np.ndarray) -> np.ndarray:
    """[trials, 2]: the first is a constant, the second looks at the first draft."""
    return np.stack([np.full(first.shape, 0.6), np.where(first == 0, 0.95, 0.05)], 1)


def output_of(lengths: Callable[[torch.Tensor], torch.Tensor]) -> tuple[float, float]:
    """Frequencies of 0 as first and second output token; ``lengths`` decides how much of two drafts is verified."""
    rng = np.random.default_rng(7)
    drafts = (rng.random((TRIALS, 2)) >= Q).astype(int)
    k = lengths(torch.from_numpy(confidences_of(drafts[:, 0])).float()).numpy()
    accept_probability = np.where(drafts == 0, min(1, P / Q), 1.0)
    accepted = rng.random((TRIALS, 2)) < accept_probability
    target = (rng.random((TRIALS, 2)) >= P).astype(int)
    # Where a draft was rejected the residual (p - q)+ is all on 1; an unverified place is the target's own.
    first = np.where(k >= 1, np.where(accepted[:, 0], drafts[:, 0], 1), target[:, 0])
    reached = (k >= 2) & accepted[:, 0]
    second = np.where(reached, np.where(accepted[:, 1], drafts[:, 1], 1), target[:, 1])
    return float((first == 0).mean()), float((second == 0).mean())


def one_at_a_time(lengths: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Every trial is a batch of its own; there are only two kinds of them."""

    def of_all(confidences: torch.Tensor) -> torch.Tensor:
        kinds = {
            row: int(lengths(torch.tensor([row]))[0]) for row in {tuple(r) for r in confidences.unique(dim=0).tolist()}
        }
        high = confidences[:, 1] > 0.5
        values = {row[1] > 0.5: n for row, n in kinds.items()}
        return torch.where(high, values[True], values[False])

    return of_all


LOSSLESS = {
    "fixed": lambda c: fixed_lengths(c.shape[0], 2, c.device),
    "threshold": lambda c: threshold_lengths(c, 0.5),
    "early stop": one_at_a_time(lambda c: early_stop_lengths(c, torch.tensor([1.0, 1.0, 0.7, 0.55]))),
    "budget of 1": one_at_a_time(lambda c: top_budget_lengths(c, torch.tensor(1))),
    "budget of 2": one_at_a_time(lambda c: top_budget_lengths(c, torch.tensor(2))),
}


@pytest.mark.parametrize("name", LOSSLESS)
def test_the_output_has_the_targets_law(name: str) -> None:
    for frequency in output_of(LOSSLESS[name]):
        assert abs(frequency - P) < 5 * (P * (1 - P) / TRIALS) ** 0.5


def test_lengths_really_depend_on_the_drafts() -> None:
    """So that the law test of them says something."""
    confidences = torch.tensor([[0.6, 0.95], [0.6, 0.05]])
    assert LOSSLESS["threshold"](confidences).tolist() == [2, 1]
    assert LOSSLESS["early stop"](confidences).tolist() == [2, 1]


def leaking(confidences: torch.Tensor) -> torch.Tensor:
    """A budget from the round's own survivals: where both drafts look good verify both, else none. Whether the first is
    verified now depends on the second's confidence, that is on what the first turned out to be."""
    return torch.where(survival(confidences).sum(1) > 1.0, 2, 0)


def test_a_leaking_schedule_biases_the_output() -> None:
    first, _ = output_of(leaking)
    # A draft of 0 is always judged, one of 1 never: P(0) = q min(1, p/q) + (1 - q) p.
    expected = Q * (P / Q) + (1 - Q) * P
    assert abs(first - expected) < 5 * (P * (1 - P) / TRIALS) ** 0.5
    assert first - P > 0.04
