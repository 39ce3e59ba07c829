"""Training: the loss by hand, steps that learn, runs that are taken up again, hidden states kept on disk."""

import dataclasses
import math
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from engine.dspark import read_draft
from engine.dspark.data import Sequences
from engine.dspark.design import draft_config_for, spread_layers
from engine.dspark.evaluate import DraftModel, evaluate_draft
from engine.dspark.hidden_states import HiddenStates, stored_layers
from engine.dspark.loss import Blocks, LossWeights, StepReport, block_labels, block_losses, sample_anchors, slot_weights
from engine.dspark.objectives import DraftObjective, MtpObjective, TrainingError, shared_weights
from engine.dspark.target import prefill_with_hidden
from engine.dspark.training import Trainer, TrainingSettings, train
from engine.models import CausalLM, LoadedModel, load_model
from engine.spec_decode.mtp_checkpoint import mtp_config, read_mtp
from engine.spec_decode.mtp_training import mtp_loss
from tests.engine.dspark.golden import golden
from tests.engine.engine_helpers import VOCAB, greedy, tiny_llm
from tests.kernels.test_no_host_wait import forbid_waits


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@cache
def loaded_target() -> LoadedModel:
    """A random target with something to learn: its branches weigh little, so what comes next is mostly decided by the
    last token, and a little by those before it."""
    loaded = load_model("tiny-qwen2", dtype=torch.float32, device=torch.device("cpu"), load_format="dummy", seed=3)
    for layer in loaded.model.layers:
        for linear in (layer.self_attn.o_proj, layer.mlp.down_proj):
            assert linear.weight is not None
            linear.weight.mul_(0.1)
            linear.packed = None
    return loaded


def target() -> CausalLM:
    return loaded_target().model


@cache
def greedy_sequences(count: int, seed: int) -> Sequences:
    """The tiny target's own greedy answers to random prompts."""
    rng = np.random.default_rng(seed)
    prompts = [[int(t) for t in rng.integers(3, VOCAB, size=3)] for _ in range(count)]
    with tiny_llm(loaded=loaded_target(), max_num_seqs=32) as llm:
        outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], greedy(40), use_tqdm=False)
    return Sequences.of([(o.prompt_token_ids, o.outputs[0].token_ids) for o in outputs])


def draft_of(trainer: Trainer) -> DraftObjective:
    assert isinstance(trainer.objective, DraftObjective)
    return trainer.objective


SETTINGS = TrainingSettings(steps=300, batch_size=16, num_anchors=8, learning_rate=3e-3)


def trainer_on(
    path: Path,
    sequences: Sequences,
    settings: TrainingSettings = SETTINGS,
    max_bytes: int = 1 << 24,
    memory_bytes: int = 0,
) -> Trainer:
    config = draft_config_for(target().config, {"block_size": 4, "markov_rank": 16, "intermediate_size": 64})
    objective = DraftObjective(target(), config, settings.num_anchors, settings.seed, settings.loss)
    hidden = HiddenStates(
        target(), config.target_layer_ids, sequences, path / "hidden", max_bytes, "tiny", memory_bytes
    )
    return Trainer(objective, sequences, hidden, settings)


def mtp_trainer_on(
    path: Path, sequences: Sequences, settings: TrainingSettings = SETTINGS, memory_bytes: int = 0
) -> Trainer:
    objective = MtpObjective(target(), settings.seed, settings.loss, stored_layers(path / "hidden"))
    hidden = HiddenStates(target(), objective.layer_ids, sequences, path / "hidden", 1 << 24, "tiny", memory_bytes)
    return Trainer(objective, sequences, hidden, settings)


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


def test_states_in_memory_are_those_of_the_disk(tmp_path: Path) -> None:
    sequences = greedy_sequences(24, 2)
    kept, stored = (trainer_on(tmp_path / str(n), sequences, memory_bytes=n) for n in (0, 1 << 24))
    for indices in ([6, 1, 4], [4, 0]):
        for one, other in zip(kept.hidden.batch(indices), stored.hidden.batch(indices), strict=True):
            assert torch.equal(one, other)
    assert stored.hidden.num_computed == 4 and not (tmp_path / str(1 << 24) / "hidden").exists()
    one, other = kept.step().report(SETTINGS.loss), stored.step().report(SETTINGS.loss)
    assert one.loss == pytest.approx(other.loss, rel=1e-5)


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


def test_hidden_states_are_the_targets_whether_kept_or_not(tmp_path: Path) -> None:
    sequences = greedy_sequences(24, 2)
    ids, d = (-1, 0), target().config.hidden_size
    row_bytes = 3 * d * 4
    bound = row_bytes * (int(sequences.lengths[:5].sum()) + 3)

    def states() -> HiddenStates:
        return HiddenStates(target(), ids, sequences, tmp_path, bound, "tiny")

    hidden = states()
    for _ in range(2):
        chosen, last = hidden.batch([6, 1, 4])
        for row, index in enumerate((6, 1, 4)):
            expected_last, expected = prefill_with_hidden(target(), [sequences[index]], ids)
            length = int(sequences.lengths[index])
            torch.testing.assert_close(chosen[row, :length], expected[0], rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(last[row, :length], expected_last[0], rtol=1e-4, atol=1e-4)
            assert not chosen[row, length:].any()
    # Sequence 6 lies past the bound, and is computed each time.
    assert hidden.num_computed == 4
    assert (tmp_path / "hidden.bin").stat().st_size <= bound
    unsynced = states()
    unsynced.batch([1])
    assert unsynced.num_computed == 1
    hidden.sync()
    again = states()
    again.batch([1, 4])
    assert again.num_computed == 0
    other = HiddenStates(target(), (-1,), sequences, tmp_path, bound, "tiny")
    other.batch([1])
    assert other.num_computed == 1


def test_no_cache_no_file(tmp_path: Path) -> None:
    hidden = HiddenStates(target(), (0,), greedy_sequences(24, 2), tmp_path / "none", 0, "tiny")
    hidden.batch([0])
    hidden.sync()
    assert hidden.num_computed == 1 and not (tmp_path / "none").exists()


def test_anchors() -> None:
    lengths, starts = np.array([10, 4, 5, 30]), np.array([3, 3, 2, 1])
    anchors, real = sample_anchors(lengths, starts, 6, np.random.default_rng(0))
    assert real.sum(1).tolist() == [6, 0, 2, 6]
    for row in range(4):
        chosen = anchors[row][real[row]]
        assert (np.diff(chosen) > 0).all() and (chosen >= starts[row]).all() and (chosen < lengths[row] - 1).all()
    assert anchors[2][real[2]].tolist() == [2, 3] and sorted(anchors[0]) == [3, 4, 5, 6, 7, 8]
    counts = np.zeros(30)
    for seed in range(2000):
        chosen, _ = sample_anchors(lengths[3:], starts[3:], 6, np.random.default_rng(seed))
        counts[chosen[0]] += 1
    assert counts[0] == 0 and counts[29] == 0
    assert abs(counts[1:29] / 2000 - 6 / 28).max() < 5 * (6 / 28 / 2000) ** 0.5


def test_labels_stay_inside_the_sequence() -> None:
    tokens = torch.tensor([[10, 11, 12, 13, 14, 15], [20, 21, 22, 0, 0, 0]], dtype=torch.int32)
    before, labels, valid = block_labels(
        tokens, torch.tensor([6, 3]), torch.tensor([[1, 4], [1, 0]]), torch.tensor([[True, True], [True, False]]), 3
    )
    assert before[0].tolist() == [[11, 12, 13], [14, 15, 15]] and labels[0, 0].tolist() == [12, 13, 14]
    assert labels[1, 0, 0] == 22
    assert valid.tolist() == [[[1, 1, 1], [1, 0, 0]], [[1, 0, 0], [0, 0, 0]]]


def test_the_loss_by_hand() -> None:
    given = golden("gated")
    g = torch.Generator().manual_seed(0)
    hidden, target_hidden = torch.randn(2, 5, 64, generator=g), torch.randn(2, 5, 64, generator=g)
    before, labels = torch.randint(0, 256, (2, 2, 5), generator=g).unbind(0)
    valid = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]], dtype=torch.bool)
    head = given.weights["lm_head.weight"]
    sums = block_losses(
        given.config, given.weights, head, Blocks(hidden, target_hidden, before, labels, valid), decay=4.0
    )
    ce = l1 = bce = 0.0
    accept = torch.zeros(2, 5)
    w = given.weights
    for i in range(2):
        for k in range(5):
            if not valid[i, k]:
                continue
            e = w["markov_head.markov_w1.weight"][before[i, k]]
            gate = w["markov_head.gate_proj.weight"] @ torch.cat((hidden[i, k], e)) + w["markov_head.gate_proj.bias"]
            logits = head @ hidden[i, k] + w["markov_head.markov_w2.weight"] @ (torch.sigmoid(gate) * e)
            q, p = logits.softmax(-1), (head @ target_hidden[i, k]).softmax(-1)
            c = w["confidence_head.proj.weight"][0] @ torch.cat((hidden[i, k], e)) + w["confidence_head.proj.bias"][0]
            accept[i, k] = torch.minimum(p, q).sum()
            scale = math.exp(-k / 4)
            ce += scale * -float(q[labels[i, k]].log())
            l1 += scale * float((q - p).abs().sum())
            bce += scale * float(F.binary_cross_entropy(torch.sigmoid(c), accept[i, k]))
    assert float(sums.ce) == pytest.approx(ce, rel=1e-4)
    assert float(sums.l1) == pytest.approx(l1, rel=1e-4)
    assert float(sums.confidence) == pytest.approx(bce, rel=1e-3)
    torch.testing.assert_close(sums.accept, accept.sum(0), rtol=1e-3, atol=1e-5)
    assert float(sums.tau) == pytest.approx(2 + float(accept.cumprod(1).sum()), rel=1e-3)
    assert float(sums.total(LossWeights())) == pytest.approx(0.1 * ce + 0.9 * l1 + bce, rel=1e-3)
    expected = sum(math.exp(-k / 4) for k in range(3)) + sum(math.exp(-k / 4) for k in range(5))
    assert float(slot_weights(valid, 4.0).sum()) == pytest.approx(expected)


def test_the_step_is_the_gradient_of_the_mean_loss(tmp_path: Path) -> None:
    """In one chunk or many: the logits of a batch are never in memory together."""
    import engine.dspark.objectives as objectives

    sequences = greedy_sequences(24, 2)
    gradients = []
    for rows in (1024, 8):
        trainer = trainer_on(tmp_path, sequences, dataclasses.replace(SETTINGS, batch_size=4))
        before = dict(objectives._ROWS_AT_ONCE)
        objectives._ROWS_AT_ONCE["cpu"] = rows
        try:
            trainer.objective.backward(trainer._batch())
        finally:
            objectives._ROWS_AT_ONCE.update(before)
        gradients.append({name: w.grad for name, w in trainer.weights.items()})
    for name, grad in gradients[0].items():
        assert grad is not None
        torch.testing.assert_close(gradients[1][name], grad, rtol=1e-4, atol=1e-6)
    assert gradients[0]["fc.weight"] is not None and gradients[0]["fc.weight"].abs().sum() > 0


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
