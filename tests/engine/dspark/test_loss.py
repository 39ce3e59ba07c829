"""The loss by hand: anchors, labels, its parts, and the step that is its gradient."""

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from engine.dspark.loss import Blocks, LossWeights, block_labels, block_losses, sample_anchors, slot_weights
from tests.engine.dspark.golden import golden
from tests.engine.dspark.trainers import SETTINGS, greedy_sequences, trainer_on

pytestmark = pytest.mark.usefixtures("one_thread")


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
