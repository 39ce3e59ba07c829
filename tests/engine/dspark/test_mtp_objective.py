"""Training of one more head: its loss' gradients, and the states that it shares with a draft."""

import dataclasses
from pathlib import Path

import pytest
import torch

from engine.dspark.loss import StepReport
from engine.dspark.objectives import shared_weights
from engine.dspark.training import train
from engine.spec_decode.mtp_checkpoint import mtp_config, read_mtp
from engine.spec_decode.mtp_training import mtp_loss
from tests.engine.dspark.trainers import SETTINGS, greedy_sequences, mtp_trainer_on, target, trainer_on

pytestmark = pytest.mark.usefixtures("one_thread")


def test_the_mtp_heads_training_has_the_gradients_of_its_loss_and_learns(tmp_path: Path) -> None:
    sequences = greedy_sequences(24, 2)
    trainer = mtp_trainer_on(tmp_path, sequences, dataclasses.replace(SETTINGS, steps=40, batch_size=8))
    batch, weights = trainer._batch(), trainer.weights
    outcome = trainer.objective.backward(batch)
    got = {name: w.grad.clone() for name, w in weights.items() if w.grad is not None}
    for weight in weights.values():
        weight.grad = None
    place = torch.arange(batch.tokens.shape[1])
    counts = (place > torch.from_numpy(batch.starts)[:, None]) & (place < torch.from_numpy(batch.lengths)[:, None])
    config = mtp_config(target().config)
    loss = mtp_loss(config, weights, *shared_weights(target()), batch.last, batch.tokens, counts)
    loss.total.backward()
    assert got.keys() == weights.keys()
    for name, weight in weights.items():
        assert weight.grad is not None
        torch.testing.assert_close(got[name], weight.grad, rtol=1e-3, atol=1e-6)
    report = outcome.report(SETTINGS.loss)
    assert report.loss == pytest.approx(float(loss.total.detach()), rel=1e-4)
    assert report.accept_rate == pytest.approx([float(loss.accept_rate)], rel=1e-4)
    assert report.tau == pytest.approx(1 + float(loss.accept_rate), rel=1e-4)
    reports: list[StepReport] = []
    train(trainer, tmp_path, dtype=torch.float32, progress=False, on_step=lambda step, report: reports.append(report))
    assert reports[-1].loss < 0.95 * reports[0].loss and reports[-1].tau > reports[0].tau + 0.1
    config, read = read_mtp(tmp_path)
    assert all(torch.equal(read[name], weight) for name, weight in weights.items())


def test_the_mtp_heads_training_shares_the_drafts_states(tmp_path: Path) -> None:
    sequences = greedy_sequences(24, 2)
    draft = trainer_on(tmp_path, sequences, dataclasses.replace(SETTINGS, batch_size=24))
    draft.step()
    draft.hidden.sync()
    head = mtp_trainer_on(tmp_path, sequences, dataclasses.replace(SETTINGS, batch_size=24))
    head.step()
    assert head.hidden.num_computed == 0 and head.hidden.layer_ids == draft.hidden.layer_ids
    alone = mtp_trainer_on(tmp_path / "alone", sequences)
    assert alone.hidden.width == target().config.hidden_size
