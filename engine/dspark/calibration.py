"""Confidences that mean what they say: how well they do, and the temperatures that make them.

A draft's confidences are judged as they are used: their running product a_k, against whether the first k drafts were
all accepted. Symbols: n blocks, N drafts a block, z confidences before the sigmoid.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

FILE_NAME = "calibration.json"
NUM_BINS = 20
TEMPERATURES = tuple(float(t) for t in np.geomspace(0.2, 5.0, 129))
"""The grid of the search, 1 in its middle."""

Floats = NDArray[np.float64]


class CalibrationError(ValueError):
    """Measurements or a calibration that cannot be used; says what is wrong."""


@dataclass(frozen=True)
class PositionQuality:
    """Of the prefix up to one position: expected calibration error, area under the ROC curve, Brier score.

    ``auroc`` is None where only one outcome was seen.
    """

    ece: float
    auroc: float | None
    brier: float
    acceptance: float


@dataclass(frozen=True)
class Calibration:
    """A temperature for each position: the calibrated confidence is sigmoid(z_k / T_k).

    ``before`` and ``after`` are measured on the blocks of the fit; ``num_blocks`` says how many.
    """

    temperatures: tuple[float, ...]
    num_blocks: int
    before: tuple[PositionQuality, ...]
    after: tuple[PositionQuality, ...]

    def probabilities(self, confidence_logits: Tensor) -> Tensor:
        """Calibrated c [r, k] of z [r, k], k up to the positions that were fitted. On any device, no host wait."""
        k = confidence_logits.shape[1]
        return torch.sigmoid(confidence_logits / self.divisors(confidence_logits.device)[:k])

    def divisors(self, device: torch.device) -> Tensor:
        """T f32 [N]; make it once where a step may not copy."""
        return torch.tensor(self.temperatures, dtype=torch.float32, device=device)

    def save(self, directory: Path) -> None:
        """Write it beside the draft's checkpoint."""
        (directory / FILE_NAME).write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, directory: Path) -> Calibration | None:
        """The calibration beside a draft, None if it has none. Raises CalibrationError if it is damaged."""
        path = directory / FILE_NAME
        if not path.is_file():
            return None
        try:
            return cls._from_dict(json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, TypeError, KeyError) as error:
            raise CalibrationError(
                f"{path}: no calibration of this engine ({error}). Make it anew with `runnerscope dspark calibrate`, "
                "or delete it to use the confidences as they are"
            ) from None

    @classmethod
    def _from_dict(cls, values: dict[str, Any]) -> Calibration:
        before, after = (tuple(PositionQuality(**p) for p in values[name]) for name in ("before", "after"))
        temperatures = tuple(float(t) for t in values["temperatures"])
        if not temperatures or not all(np.isfinite(t) and t > 0 for t in temperatures):
            raise ValueError("temperatures must be positive numbers, one a position")
        return cls(temperatures, int(values["num_blocks"]), before, after)


def fit(confidence_logits: np.ndarray, accepted: np.ndarray) -> Calibration:
    """Sequential temperature scaling, as the DSpark paper describes it.

    Positions from the first to the last: T_k is the temperature of the grid that gives the running product up to k the
    smallest ECE, with the earlier ones fixed; the one closest to 1 on a tie.

    Args:
        confidence_logits: z [n, N].
        accepted: [n, N], whether drafts 1 .. k of the block were all accepted: never rising along a row.

    Raises:
        CalibrationError: shapes that don't fit, no blocks, values that aren't finite, outcomes that rise.
    """
    z = np.asarray(confidence_logits, dtype=np.float64)
    outcomes = np.asarray(accepted, dtype=np.float64)
    _check(z, outcomes)
    product = np.ones(len(z))
    temperatures: list[float] = []
    after = []
    for k in range(z.shape[1]):
        tried = [(ece(product * _sigmoid(z[:, k] / t), outcomes[:, k]), abs(np.log(t)), t) for t in TEMPERATURES]
        best = min(tried)[2]
        temperatures.append(best)
        product = product * _sigmoid(z[:, k] / best)
        after.append(quality(product, outcomes[:, k]))
    return Calibration(tuple(temperatures), len(z), position_qualities(z, outcomes), tuple(after))


def position_qualities(
    confidence_logits: np.ndarray, accepted: np.ndarray, temperatures: Sequence[float] | None = None
) -> tuple[PositionQuality, ...]:
    """How good the running products are at each position; arguments as of `fit`, uncalibrated without temperatures."""
    z = np.asarray(confidence_logits, dtype=np.float64)
    outcomes = np.asarray(accepted, dtype=np.float64)
    _check(z, outcomes)
    scale = np.ones(z.shape[1]) if temperatures is None else np.asarray(temperatures)
    products: Floats = np.cumprod(_sigmoid(z / scale), axis=1, dtype=np.float64)
    return tuple(quality(products[:, k], outcomes[:, k]) for k in range(z.shape[1]))


def quality(probabilities: Floats, outcomes: Floats) -> PositionQuality:
    """All measures of one position; [n] and [n] of 0 and 1."""
    return PositionQuality(
        ece(probabilities, outcomes),
        auroc(probabilities, outcomes),
        float(np.mean((probabilities - outcomes) ** 2)),
        float(outcomes.mean()),
    )


def reliability(
    probabilities: Floats, outcomes: Floats, num_bins: int = NUM_BINS
) -> tuple[NDArray[np.int64], Floats, Floats]:
    """The reliability diagram: of each of ``num_bins`` equal bins its count, mean probability and mean outcome.

    An empty bin has 0 for all three. A probability on an edge belongs to the bin above it, 1 to the last.
    """
    which = np.clip((probabilities * num_bins).astype(np.int64), 0, num_bins - 1)
    counts = np.bincount(which, minlength=num_bins)
    safe = np.maximum(counts, 1)
    mean_probability = np.bincount(which, weights=probabilities, minlength=num_bins) / safe
    mean_outcome = np.bincount(which, weights=outcomes, minlength=num_bins) / safe
    return counts, mean_probability, mean_outcome


def ece(probabilities: Floats, outcomes: Floats, num_bins: int = NUM_BINS) -> float:
    """Expected calibration error: the gap between the two means of a bin, weighed with its count."""
    counts, confidence, accuracy = reliability(probabilities, outcomes, num_bins)
    return float((counts * np.abs(confidence - accuracy)).sum() / len(probabilities))


def auroc(probabilities: Floats, outcomes: Floats) -> float | None:
    """The chance that an accepted prefix has a larger probability than a rejected one, ties counted half; exact."""
    positives = int(outcomes.sum())
    negatives = len(outcomes) - positives
    if not positives or not negatives:
        return None
    _, inverse, counts = np.unique(probabilities, return_inverse=True, return_counts=True)
    mean_ranks = np.cumsum(counts) - (counts - 1) / 2.0
    rank_sum = float(mean_ranks[inverse.reshape(-1)][outcomes > 0.5].sum())
    return (rank_sum - positives * (positives + 1) / 2) / (positives * negatives)


def _sigmoid(x: Floats) -> Floats:
    return np.asarray(0.5 * (1.0 + np.tanh(0.5 * x)))


def _check(z: Floats, outcomes: Floats) -> None:
    if z.ndim != 2 or z.shape != outcomes.shape or not z.size:
        raise CalibrationError(
            "confidences and outcomes must be [blocks, drafts] of one shape and not empty, "
            f"got {z.shape} and {outcomes.shape}"
        )
    if not np.isfinite(z).all():
        raise CalibrationError("some confidences are not finite: the draft's weights or its hidden states are damaged")
    if not np.isin(outcomes, (0.0, 1.0)).all() or (np.diff(outcomes, axis=1) > 0).any():
        raise CalibrationError(
            "outcomes must be 0 or 1 and never rise along a block: draft k counts if all before it do"
        )
