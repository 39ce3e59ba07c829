"""What confidences said and what happened, before calibration and after: the reliability diagram and its measures.

A draft's confidences are judged as they are used: the product of the first k of a block, against whether these k drafts
were all accepted. Symbols: c a confidence as it was used, z the head's own before the sigmoid, T_k the temperature of
position k. As c = sigmoid(z / T_k), what the head said itself is sigmoid(T_k logit(c)).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.dspark.calibration import NUM_BINS, PositionQuality, ece, quality, reliability

from .acceptance_numbers import Round

Floats = NDArray[np.float64]
FEW = 200
"""Blocks; with fewer the view says what chance alone does."""


def uncalibrated(confidences: Floats, temperatures: Floats) -> Floats:
    """What the head said itself, of c [..., k] and T [k]: 0 and 1 stay."""
    with np.errstate(divide="ignore"):
        z = (np.log(confidences) - np.log1p(-confidences)) * temperatures
    return np.asarray(0.5 * (1.0 + np.tanh(0.5 * z)))


def expected_ece(probabilities: Floats, num_bins: int = NUM_BINS) -> float:
    """The ECE that right probabilities would have by chance, about: a bin's share of n outcomes strays from its mean p
    by sqrt(2 p (1 - p) / (pi n)) on average."""
    counts, means, _ = reliability(probabilities, np.zeros_like(probabilities), num_bins)
    stray = np.sqrt(2 * means * (1 - means) / (np.pi * np.maximum(counts, 1)))
    return float((counts * stray).sum() / len(probabilities))


def confidence_reliability(rounds: Sequence[Round], calibration: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """What the view shows of confidences, None without any.

    `stages`: before calibration and after, or the one there is: name, `points` [mean said, share accepted, count] of
    each bin that is not empty, `bars` the counts of all bins, `ece`. `head` and `rows`: a table, a line a position.

    Args:
        calibration: as a recording's meta has it (`engine.snapshot.SpeculationView`), None where there is none.
    """
    judged = [one for one in rounds if one.proposed.confidences]
    if not judged:
        return None
    temperatures = None if calibration is None else np.array(calibration["temperatures"], dtype=np.float64)
    said: dict[str, list[Floats]] = {"as the head says it": []}
    if temperatures is not None:
        said = {"before calibration": [], "after calibration": []}
    for one in judged:
        used = np.array(one.proposed.confidences, dtype=np.float64)
        own = used if temperatures is None else uncalibrated(used, temperatures[: len(used)])
        for products, confidences in zip(said.values(), (own, used), strict=False):
            products.append(np.cumprod(confidences, dtype=np.float64))
    outcomes = [np.arange(len(one.proposed.token_ids)) < one.verified.num_accepted for one in judged]
    stages = [_stage(name, np.concatenate(products), np.concatenate(outcomes)) for name, products in said.items()]
    return {
        "say": _say(len(judged), np.concatenate([*said.values()][-1])),
        "stages": stages,
        "head": ["k", "n", "ECE", "AUROC", "Brier", *(["ECE at the fit"] if calibration else [])],
        "rows": _by_position([*said.values()], outcomes, calibration),
        "note": _fitted(calibration),
    }  # fmt: skip


def _stage(name: str, products: Floats, outcomes: NDArray[np.bool_]) -> dict[str, Any]:
    happened = outcomes.astype(np.float64)
    counts, means, shares = reliability(products, happened)
    points = zip(means.round(4).tolist(), shares.round(4).tolist(), counts.tolist(), strict=True)
    return {
        "name": name,
        "points": [list(point) for point in points if point[2]],
        "bars": counts.tolist(),
        "ece": round(ece(products, happened), 4),
    }


def _by_position(
    stages: Sequence[Sequence[Floats]], outcomes: Sequence[NDArray[np.bool_]], calibration: Mapping[str, Any] | None
) -> list[list[str]]:
    rows = []
    for k in range(max(len(own) for own in outcomes)):
        there = [i for i, own in enumerate(outcomes) if len(own) > k]
        happened = np.array([float(outcomes[i][k]) for i in there])
        found = [quality(np.array([products[i][k] for i in there]), happened) for products in stages]
        fit = [] if calibration is None else [_change([calibration[name][k]["ece"] for name in ("before", "after")])]
        rows.append([str(k + 1), str(len(there)), *_measures(found), *fit])
    return rows


def _measures(found: Sequence[PositionQuality]) -> list[str]:
    return [
        _change([one.ece for one in found]),
        _change([one.auroc for one in found]),
        _change([q.brier for q in found]),
    ]


def _change(values: Sequence[float | None]) -> str:
    return " → ".join("–" if value is None else f"{value:.3f}" for value in values)


def _say(num_blocks: int, products: Floats) -> str:
    say = f"{len(products):,} prefixes of {num_blocks:,} blocks; 20 bins"
    if num_blocks < FEW:
        say += f". Few: with right confidences chance alone would make an ECE of about {expected_ece(products):.3f}"
    return say


def _fitted(calibration: Mapping[str, Any] | None) -> str:
    if calibration is None:
        return "this draft has no calibration: `runnerscope dspark calibrate` fits one"
    temperatures = ", ".join(f"{t:.2f}" for t in calibration["temperatures"])
    return f"temperatures {temperatures}, fitted on {calibration['num_blocks']:,} blocks"
