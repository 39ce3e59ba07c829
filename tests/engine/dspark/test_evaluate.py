"""Replayed rounds are those of a real speculative loop; outcomes are what the rejection rule gives."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine import LLM
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
from engine.dspark.evaluate_others import evaluate_mtp, evaluate_ngram, evaluate_none
from engine.dspark.hidden_states import HiddenStates
from engine.dspark.objectives import MtpObjective
from engine.dspark.training import Trainer, TrainingSettings
from tests.engine.dspark.golden import HEADS, ROOT, golden
from tests.engine.engine_helpers import greedy, ids

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
    found = evaluate_lookup(sequences, 3, 2, 4)
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


PROMPTS = [golden("vanilla").values["prompt"].tolist(), [7, 7, 1, 7, 7], [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]]


def rounds_of_the_engine(spec: dict[str, Any] | None, tokens: int = 60) -> tuple[Sequences, list[list[int]]]:
    """Greedy answers of the golden target by V2, and how many drafts each of their rounds accepted."""
    sizes: dict[str, Any] = {"max_model_len": 128, "max_num_seqs": 4, "num_gpu_blocks_override": 65}
    llm = LLM(
        str(ROOT / "vanilla" / "target"), dtype="float32", skip_tokenizer_init=True, speculative_config=spec, **sizes
    )
    try:
        outputs = llm.generate([ids(*p) for p in PROMPTS], greedy(tokens), use_tqdm=False)
    finally:
        llm.close()
    pairs = [(o.prompt_token_ids, o.outputs[0].token_ids) for o in outputs]
    return Sequences.of(pairs), [list(o.metrics.accepted_per_round) for o in outputs]


def test_what_is_replayed_is_what_the_engine_does(tmp_path: Path) -> None:
    """Each way of drafting through runner V2: the same answers, and round for round as many drafts accepted."""
    sequences, none = rounds_of_the_engine(None)
    assert none == [[], [], []] and evaluate_none(sequences).accepted_length == 1.0
    given = golden("vanilla")
    hidden = HiddenStates(given.target, (), sequences, tmp_path, 0, "golden", memory_bytes=1 << 24)
    objective = MtpObjective(given.target, seed=0)
    trainer = Trainer(objective, sequences, hidden, TrainingSettings(steps=40, batch_size=3, learning_rate=3e-3))
    while trainer.done < 1:
        trainer.step()
    objective.write(tmp_path / "head", torch.float32)
    drafts = {"num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 3}
    draft = {"method": "dspark", "model": str(ROOT / "vanilla" / "draft")}
    model = DraftModel(given.target, given.config, given.weights)
    head = {"method": "mtp", "model": str(tmp_path / "head")}
    replays: dict[str, tuple[dict[str, Any], Callable[[Sequences], Acceptance]]] = {
        "dspark": (draft, lambda own: evaluate_draft(model, own, 5)),
        "lookup": ({"method": "dspark", "draft": "lookup", **drafts}, lambda own: evaluate_lookup(own, 4, 2, 3)),
        "ngram": ({"method": "ngram", **drafts}, lambda own: evaluate_ngram(own, 4, 2, 3)),
        "mtp": (head, lambda own: evaluate_mtp(given.target, objective.config, objective.weights, own)),
    }
    for method, (spec, evaluate) in replays.items():
        answers, rounds = rounds_of_the_engine(spec)
        assert list(answers) == list(sequences), method
        for row, own in enumerate(rounds):
            tokens, start = sequences[row], int(sequences.starts[row])
            replayed = evaluate(Sequences.of([(tokens[:start], tokens[start:])])).accepted.tolist()
            # At the end of an answer the engine cuts blocks and the replay leaves them out.
            common = min(len(replayed), len(own) - 1)
            assert replayed[:common] == own[:common] and common > 8, (method, row)
        assert any(count for own in rounds for count in own), method
