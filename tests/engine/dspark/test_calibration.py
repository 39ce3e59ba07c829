"""The measures against plain references, and a fit that finds the temperatures that were hidden in the data."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.dspark import calibration
from engine.dspark.calibration import Calibration, CalibrationError


def ece_by_hand(probabilities: list[float], outcomes: list[float], bins: int) -> float:
    total = 0.0
    for b in range(bins):
        members = [i for i, p in enumerate(probabilities) if min(int(p * bins), bins - 1) == b]
        if members:
            confidence = sum(probabilities[i] for i in members) / len(members)
            accuracy = sum(outcomes[i] for i in members) / len(members)
            total += len(members) / len(probabilities) * abs(confidence - accuracy)
    return total


def auroc_by_hand(probabilities: list[float], outcomes: list[float]) -> float:
    pairs = [
        1.0 if p > q else 0.5 if p == q else 0.0
        for p, y in zip(probabilities, outcomes, strict=True)
        for q, x in zip(probabilities, outcomes, strict=True)
        if y == 1 and x == 0
    ]
    return sum(pairs) / len(pairs)


@given(seed=st.integers(0, 2**31), n=st.integers(2, 60), coarse=st.booleans())
@settings(deadline=None)
def test_measures_against_plain_loops(seed: int, n: int, coarse: bool) -> None:
    rng = np.random.default_rng(seed)
    probabilities = rng.random(n)
    if coarse:
        probabilities = probabilities.round(1)
    outcomes = (rng.random(n) < probabilities).astype(float)
    p, y = probabilities.tolist(), outcomes.tolist()
    assert calibration.ece(probabilities, outcomes) == pytest.approx(ece_by_hand(p, y, 20))
    assert calibration.ece(probabilities, outcomes, 7) == pytest.approx(ece_by_hand(p, y, 7))
    found = calibration.quality(probabilities, outcomes)
    assert found.brier == pytest.approx(sum((a - b) ** 2 for a, b in zip(p, y, strict=True)) / n)
    assert found.acceptance == pytest.approx(sum(y) / n)
    if 0 < sum(y) < n:
        assert found.auroc == pytest.approx(auroc_by_hand(p, y))
    else:
        assert found.auroc is None


def test_values_by_hand() -> None:
    p, y = np.array([0.2, 0.8, 1.0, 0.0]), np.array([0.0, 1.0, 1.0, 0.0])
    assert calibration.auroc(p, y) == 1.0 and calibration.auroc(p, 1 - y) == 0.0
    assert calibration.ece(p, y) == pytest.approx((0.2 + 0.2 + 0 + 0) / 4)
    counts, confidence, accuracy = calibration.reliability(p, y, 2)
    assert (counts.tolist(), accuracy.tolist()) == ([2, 2], [0.0, 1.0])
    assert confidence.tolist() == pytest.approx([0.1, 0.9])


def blocks(true_temperatures: tuple[float, ...], n: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """z and outcomes of blocks whose draft k is accepted with chance sigmoid(z_k / T_k) after the ones before it."""
    rng = np.random.default_rng(seed)
    z = rng.normal(1.0, 2.5, (n, len(true_temperatures)))
    chance = 1 / (1 + np.exp(-z / np.array(true_temperatures)))
    return z, np.cumprod(rng.random(z.shape) < chance, axis=1)


def test_the_fit_finds_the_temperatures_of_every_position() -> None:
    true = (2.0, 0.7, 1.4)
    z, accepted = blocks(true, 60_000)
    found = calibration.fit(z, accepted)
    assert found.temperatures == pytest.approx(true, rel=0.12)
    for before, after in zip(found.before, found.after, strict=True):
        assert after.ece < 0.012 < before.ece
        assert after.brier < before.brier
    # A temperature keeps the order of one position's confidences.
    assert found.after[0].auroc == pytest.approx(found.before[0].auroc)
    again, outcomes = blocks(true, 60_000, seed=1)
    held_out = calibration.position_qualities(again, outcomes, found.temperatures)
    assert all(q.ece < 0.015 for q in held_out)


def test_what_is_calibrated_already_stays() -> None:
    z, accepted = blocks((1.0, 1.0), 60_000)
    assert calibration.fit(z, accepted).temperatures == pytest.approx((1.0, 1.0), rel=0.08)
    z = np.full((50, 2), 3.0)
    assert calibration.fit(z, np.ones((50, 2))).temperatures[0] < 1.0


def test_it_is_stored_beside_the_checkpoint(tmp_path: Path) -> None:
    assert Calibration.load(tmp_path) is None
    z, accepted = blocks((2.0, 0.5), 500)
    found = calibration.fit(z, accepted)
    found.save(tmp_path)
    read = Calibration.load(tmp_path)
    assert read == found
    logits = torch.tensor([[1.0, -1.0], [0.0, 4.0]])
    expected = torch.sigmoid(logits / torch.tensor(found.temperatures))
    torch.testing.assert_close(read.probabilities(logits), expected)
    torch.testing.assert_close(read.probabilities(logits[:, :1]), expected[:, :1])


@pytest.mark.parametrize(
    "text", ["{", "{}", json.dumps({"temperatures": [0], "num_blocks": 1, "before": [], "after": []})]
)
def test_a_damaged_file_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / calibration.FILE_NAME).write_text(text)
    with pytest.raises(CalibrationError, match=r"calibration\.json.*dspark calibrate"):
        Calibration.load(tmp_path)


@pytest.mark.parametrize(
    ("z", "accepted", "message"),
    [
        (np.zeros((0, 3)), np.zeros((0, 3)), "not empty"),
        (np.zeros((2, 3)), np.zeros((2, 2)), "one shape"),
        (np.full((1, 2), np.nan), np.zeros((1, 2)), "not finite"),
        (np.zeros((1, 2)), np.array([[0, 1]]), "never rise"),
        (np.zeros((1, 1)), np.array([[0.5]]), "0 or 1"),
    ],
)
def test_bad_measurements(z: np.ndarray, accepted: np.ndarray, message: str) -> None:
    with pytest.raises(CalibrationError, match=message):
        calibration.fit(z, accepted)
