"""The rule of speculative sampling, by exact enumeration: no dice."""

import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.sample.rejection import (
    Law,
    Model,
    acceptance_probabilities,
    conditional_rates,
    num_accepted,
    one_hot,
    output_law,
    rates_of_mean_length,
    residual_law,
)

VOCAB = 3
P, Q = [0.5, 0.3, 0.2], [0.7, 0.2, 0.1]


def random_model(seed: int, sharpness: float, zeros: float = 0.0) -> Model:
    """A law for every prefix; some of its probabilities are 0."""

    def law(tokens: tuple[int, ...]) -> Law:
        dice = random.Random(f"{seed} {tokens}")
        weights = [math.exp(sharpness * dice.gauss(0, 1)) * (dice.random() >= zeros) for _ in range(VOCAB)]
        if not any(weights):
            weights[dice.randrange(VOCAB)] = 1.0
        return [weight / sum(weights) for weight in weights]

    return law


def greedy(model: Model) -> Model:
    def law(tokens: tuple[int, ...]) -> Law:
        probabilities = list(model(tokens))
        return one_hot(probabilities.index(max(probabilities)), VOCAB)

    return law


@pytest.mark.parametrize("method", ["standard", "block"])
@given(
    seed=st.integers(0, 10**6),
    num_drafts=st.integers(0, 3),
    sharpness=st.floats(0, 3),
    zeros=st.sampled_from([0.0, 0.4]),
    kind=st.sampled_from(["sampled", "greedy drafts", "greedy both", "own"]),
)
def test_a_round_has_the_law_of_the_target(
    method: str, seed: int, num_drafts: int, sharpness: float, zeros: float, kind: str
) -> None:
    target, draft = random_model(seed, sharpness, zeros), random_model(seed + 1, sharpness, zeros)
    if kind == "own":
        draft = target
    if kind.startswith("greedy"):
        draft = greedy(draft)
    if kind == "greedy both":
        target = greedy(target)
    law = output_law(target, draft, num_drafts, method)
    for tokens in itertools.product(range(VOCAB), repeat=num_drafts + 1):
        expected = math.prod(target(tokens[:j])[token] for j, token in enumerate(tokens))
        assert law.get(tokens, 0.0) == pytest.approx(expected, abs=1e-9)


@given(seed=st.integers(0, 10**6), num_drafts=st.integers(1, 3))
def test_a_block_accepts_no_fewer_drafts_on_average(seed: int, num_drafts: int) -> None:
    target, draft = random_model(seed, 1.0), random_model(seed + 1, 1.0)
    mean = {}
    for method in ("standard", "block"):
        mean[method] = 0.0
        for tokens in itertools.product(range(VOCAB), repeat=num_drafts):
            targets = [target(tokens[:j]) for j in range(num_drafts)]
            drafts = [draft(tokens[:j]) for j in range(num_drafts)]
            h = acceptance_probabilities(targets, drafts, tokens, method)
            if method == "standard":
                accepted = sum(math.prod(h[: j + 1]) for j in range(num_drafts))
            else:
                accepted = sum(1 - math.prod(1 - x for x in h[j:]) for j in range(num_drafts))
            mean[method] += accepted * math.prod(q[t] for q, t in zip(drafts, tokens, strict=True))
    assert mean["block"] >= mean["standard"] - 1e-9


def test_the_published_numbers_of_one_draft() -> None:
    def one_draft(draft: Law) -> float:
        return sum(q * acceptance_probabilities([P], [draft], [t], "standard")[0] for t, q in enumerate(draft))

    assert one_draft(Q) == pytest.approx(0.8)
    assert residual_law(P, Q) == pytest.approx([0, 0.5, 0.5])
    assert one_draft(one_hot(0, 3)) == pytest.approx(0.5)
    assert residual_law(P, one_hot(0, 3)) == pytest.approx([0, 0.6, 0.4])
    # Strict match with a sampled draft (accepted only if an own draw of the target gives it) wastes drafts.
    assert sum(p * q for p, q in zip(P, Q, strict=True)) == pytest.approx(0.43)


def test_which_drafts_are_accepted() -> None:
    h, u = [0.5, 0.5, 0.5], [0.4, 0.6, 0.4]
    assert num_accepted(h, u, "standard") == 1
    assert num_accepted(h, u, "block") == 3
    assert num_accepted(h, [0.5, 0.6, 0.9], "standard") == num_accepted(h, [0.5, 0.6, 0.9], "block") == 0
    assert num_accepted([], [], "standard") == num_accepted([], [], "block") == 0
    assert num_accepted([0.0], [0.0], "standard") == 0 and num_accepted([1.0], [1 - 2**-24], "block") == 1


def test_synthetic_rates() -> None:
    assert conditional_rates([0.8, 0.4, 0.4]) == pytest.approx([0.8, 0.5, 1.0])
    assert conditional_rates([0.5, 0.0, 0.0]) == [0.5, 0.0, 0.0]
    for mean, count in [(1.0, 3), (2.5, 3), (4.0, 3), (1.7, 1)]:
        rates = rates_of_mean_length(mean, count)
        assert 1 + sum(rates) == pytest.approx(mean, abs=1e-9)
        assert all(a >= b for a, b in itertools.pairwise(rates)) and len(rates) == count
