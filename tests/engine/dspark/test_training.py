"""Training: steps that learn, runs that are taken up again, no waits, and settings that make no sense."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from engine.dspark import read_draft
from engine.dspark.data import Sequences
from engine.dspark.design import draft_config_for, spread_layers
from engine.dspark.evaluate import DraftModel, evaluate_draft
from engine.dspark.objectives import TrainingError, shared_weights
from engine.dspark.training import Trainer, TrainingSettings, train
from tests.engine.dspark.trainers import SETTINGS, draft_of, greedy_sequences, mtp_trainer_on, target, trainer_on
from tests.kernels.test_no_host_wait import forbid_waits

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.slow
def test_a_few_hundred_steps_raise_the_accepted_length(tmp_path: Path) -> None:
    sequences = greedy_sequences(96, 0)
    trainer = trainer_on(tmp_path, sequences)
    before = evaluate_draft(
        DraftModel(target(), draft_of(trainer).config, trainer.weights), sequences, 4
    ).accepted_length
    reports = []
    train(trainer, tmp_path, dtype=torch.float32, progress=False, on_step=lambda step, report: reports.append(report))
    after = evaluate_draft(DraftModel(target(), *read_draft(tmp_path)), sequences, 4)
    assert after.accepted_length > before + 0.3
    assert reports[-1].loss < 0.85 * reports[0].loss and reports[-1].tau > reports[0].tau + 0.3
    assert reports[-1].confidence_error < 0.2
    # Unseen answers of the same target.
    held_out = evaluate_draft(DraftModel(target(), *read_draft(tmp_path)), greedy_sequences(24, 1), 4)
    assert held_out.accepted_length > before + 0.1


@pytest.mark.parametrize("make", [trainer_on, mtp_trainer_on])
def test_an_interrupted_run_ends_where_an_uninterrupted_one_does(
    make: Callable[[Path, Sequences, TrainingSettings], Trainer], tmp_path: Path
) -> None:
    sequences = greedy_sequences(24, 2)
    settings = dataclasses.replace(SETTINGS, steps=6, batch_size=4)
    whole = make(tmp_path / "a", sequences, settings)
    train(whole, tmp_path / "a", dtype=torch.float32, progress=False)
    first = make(tmp_path / "b", sequences, settings)

    def stop(step: int, report: object) -> None:
        if step == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(first, tmp_path / "b", dtype=torch.float32, progress=False, on_step=stop)
    second = make(tmp_path / "b", sequences, settings)
    assert second.resume(tmp_path / "b") and second.step_number == 3
    train(second, tmp_path / "b", dtype=torch.float32, progress=False)
    for name, weight in whole.weights.items():
        torch.testing.assert_close(second.weights[name], weight, rtol=1e-5, atol=1e-6)
    assert second.hidden.num_computed < len(sequences)


def test_a_step_does_not_wait_for_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once the states are there, nothing in a step reads back from it."""
    sequences = greedy_sequences(24, 2)
    settings = dataclasses.replace(SETTINGS, batch_size=24)
    for make in (trainer_on, mtp_trainer_on):
        trainer = make(tmp_path, sequences, settings, memory_bytes=1 << 24)
        trainer.step()
        with monkeypatch.context() as patch:
            forbid_waits(patch)
            trainer.objective.backward(trainer._batch())


def test_another_training_is_not_taken_up(tmp_path: Path) -> None:
    sequences = greedy_sequences(24, 2)
    settings = dataclasses.replace(SETTINGS, steps=1, batch_size=2)
    first = trainer_on(tmp_path, sequences, settings)
    assert not first.resume(tmp_path)
    train(first, tmp_path, dtype=torch.float32, progress=False)
    other = trainer_on(tmp_path, sequences, dataclasses.replace(settings, num_anchors=3))
    with pytest.raises(TrainingError, match="another training: settings was .*'num_anchors': 8.*is .*'num_anchors': 3"):
        other.resume(tmp_path)


def test_the_target_stays_as_it_is(tmp_path: Path) -> None:
    embedding, head = shared_weights(target())
    before = embedding.clone(), head.clone()
    trainer = trainer_on(tmp_path, greedy_sequences(24, 2), dataclasses.replace(SETTINGS, batch_size=2))
    trainer.step()
    after = shared_weights(target())
    assert torch.equal(after[0], before[0]) and torch.equal(after[1], before[1])


def test_learning_rate() -> None:
    settings = TrainingSettings(steps=100, learning_rate=1.0, warmup=0.04)
    rates = [settings.rate((step + 0.5) / 100) for step in range(100)]
    assert rates[:4] == pytest.approx([0.125, 0.375, 0.625, 0.875]) and settings.rate(0.04) == 1.0
    assert all(a > b for a, b in zip(rates[4:], rates[5:], strict=False)) and rates[-1] < 0.001
    assert settings.rate(1.0) == pytest.approx(0.0) and TrainingSettings(warmup=0.0).rate(0.0) == 6e-4


def test_bad_settings_and_data(tmp_path: Path) -> None:
    for bad in (
        {"steps": 0},
        {"minutes": 0.0},
        {"batch_size": 0},
        {"num_anchors": 0},
        {"learning_rate": 0.0},
        {"warmup": 1.0},
    ):
        with pytest.raises(TrainingError, match="must be"):
            TrainingSettings(**bad)
    with pytest.raises(TrainingError, match="nothing to draw an anchor from"):
        trainer_on(tmp_path, Sequences.of([([3, 4], [5])]))


def test_injected_layers_are_spread_like_the_published_ones() -> None:
    assert spread_layers(36, 5) == (1, 9, 17, 25, 33)
    assert spread_layers(40, 5) == (1, 10, 19, 28, 37)
    for layers in range(1, 12):
        config = draft_config_for(dataclasses.replace(target().config, num_hidden_layers=layers), {})
        assert config.target_layer_ids
