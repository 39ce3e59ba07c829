"""Replayed rounds are those of a real speculative loop; outcomes are what the rejection rule gives."""

import numpy as np
import pytest
import torch

from engine.dspark.data import Sequences
from engine.dspark.evaluate import (
    Acceptance,
    DraftModel,
    evaluate_draft,
    evaluate_lookup,
    greedy_outcomes,
    replay,
    sampled_outcomes,
)
from tests.engine.dspark.golden import HEADS, golden

pytestmark = pytest.mark.slow


def golden_sequences(head: str) -> Sequences:
    given = golden(head)
    prompt = given.values["prompt"].tolist()
    return Sequences.of([(prompt, given.sequence[len(prompt) :])])


@pytest.mark.parametrize("head", HEADS)
def test_replayed_rounds_are_the_golden_ones(head: str) -> None:
    """As far as a whole block of the answer is known."""
    given = golden(head)
    found = evaluate_draft(DraftModel(given.target, given.config, given.weights), golden_sequences(head), 5)
    expected = [len(values["emitted"]) - 1 for _, values in given.rounds()]
    assert len(found.accepted) >= 3
    assert found.accepted.tolist() == expected[: len(found.accepted)]


def test_accepted_length_is_one_and_the_sum_of_the_rates() -> None:
    """T13."""
    accepted = np.array([5] * 158 + [4] * 79 + [3] * 79 + [2] * 131 + [1] * 132 + [0] * 421)
    found = Acceptance(5, accepted)
    assert found.prefix_rates == pytest.approx([0.579, 0.447, 0.316, 0.237, 0.158])
    assert found.accepted_length == pytest.approx(2.737)
    assert found.accepted_length == pytest.approx(1 + sum(found.prefix_rates))
    assert found.conditional_rates == pytest.approx([0.579, 447 / 579, 316 / 447, 237 / 316, 158 / 237])
    empty = Acceptance(2, np.zeros(0, dtype=np.int64))
    assert (empty.accepted_length, empty.prefix_rates, empty.conditional_rates) == (1.0, [0.0, 0.0], [None, None])


def test_replay_by_hand() -> None:
    tokens = [9, 1, 2, 3, 4, 5, 6, 7]
    drafts = {1: [2, 3, 0], 4: [0, 0, 0]}
    # From 1: two accepted, then 4 is the target's own; from 4: none accepted; from 5 a block would run past the end.
    assert replay(tokens, 1, 3, lambda position: drafts[position]) == [2, 0]


def test_lookup_on_a_repeating_answer() -> None:
    sequences = Sequences.of([([1, 2], [3, 4, 5, 3, 4, 5, 3, 4, 5, 3, 4, 5, 3, 4, 5])])
    found = evaluate_lookup(sequences, 3)
    # Nothing repeats until the period has been seen once; from then on every draft is right.
    assert found.accepted.tolist() == [0, 0, 0, 0, 3, 3]


def test_greedy_outcomes_are_of_every_position() -> None:
    given = golden("gated")
    sequences = golden_sequences("gated")
    model = DraftModel(given.target, given.config, given.weights)
    logits, accepted = greedy_outcomes(model, sequences)
    start = int(sequences.starts[0])
    assert logits.shape == accepted.shape == (len(given.sequence) - start - 5, 5)
    for position, values in given.rounds():
        if position - start < len(logits):
            np.testing.assert_allclose(logits[position - start], values["confidence_logits"], atol=1e-4)
            expected = np.arange(5) < int(values["num_accepted"])
            assert accepted[position - start].tolist() == expected.tolist()


def test_sampled_outcomes_happen_with_the_exact_chance_of_the_first_slot() -> None:
    """One anchor, many rounds: the first draft is accepted with chance Σ min(p, q)."""
    given = golden("vanilla")
    tokens = given.sequence[:18]
    sequences = Sequences.of([(tokens[:17], tokens[17:])])
    model = DraftModel(given.target, given.config, given.weights)
    rounds = 400
    logits, accepted = sampled_outcomes(model, sequences, rounds, seed=3)
    assert logits.shape == accepted.shape == (rounds, 5) and accepted.dtype == np.bool_
    assert (np.diff(accepted.astype(int), axis=1) <= 0).all()
    _, values = given.rounds()[0]
    p, q = values["target_logits"][0].softmax(-1), values["draft_logits"][0].softmax(-1)
    chance = float(torch.minimum(p, q).sum())
    assert 0.02 < chance < 0.98
    assert abs(accepted[:, 0].mean() - chance) < 4.5 * (chance * (1 - chance) / rounds) ** 0.5
    again = sampled_outcomes(model, sequences, 3, seed=3)
    assert np.array_equal(again[1], accepted[:3])
