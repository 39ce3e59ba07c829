"""Speculative sampling's rule as a plain specification, and the exact law of what it gives.

Nothing here runs in a step: it is what views and tutorials compute with, and what the kernels are held to. Laws are
lists of V probabilities; a `Model` gives the law behind any tokens.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

from kernels.rejection_loop import (
    Law,
    acceptance_probabilities,
    num_accepted,
    one_hot,
    prefix_masses,
    residual,
)

__all__ = [
    "Law",
    "Model",
    "acceptance_probabilities",
    "conditional_rates",
    "num_accepted",
    "one_hot",
    "output_law",
    "prefix_masses",
    "rates_of_mean_length",
    "residual",
    "residual_law",
]
Model = Callable[[tuple[int, ...]], Law]


def residual_law(target: Law, draft: Law, mass: float = 1.0) -> list[float]:
    """The law of the token behind a rejected draft: (mass * target - draft)+, normalised."""
    weights = residual(target, draft, mass)
    return [weight / sum(weights) for weight in weights]


def output_law(target: Model, draft: Model, num_drafts: int, method: str) -> dict[tuple[int, ...], float]:
    """The exact joint law of the next `num_drafts + 1` tokens: what one round gives, then the target's own.

    By enumeration of all V ** num_drafts drafts, so for small vocabularies. `method` is "standard" or "block"; for both
    it is the target's law, whatever the draft.
    """
    vocab = len(target(()))
    law: dict[tuple[int, ...], float] = {}
    for tokens in itertools.product(range(vocab), repeat=num_drafts):
        targets = [target(tokens[:j]) for j in range(num_drafts + 1)]
        drafts = [draft(tokens[:j]) for j in range(num_drafts)]
        drawn = math.prod(q[token] for q, token in zip(drafts, tokens, strict=True))
        if drawn == 0.0:
            continue
        ends = _ends(acceptance_probabilities(targets[:-1], drafts, tokens, method), method)
        masses = prefix_masses(targets[:-1], drafts, tokens, method)
        for accepted, probability in enumerate(ends):
            if probability <= 0.0:
                continue
            own = targets[accepted]
            if accepted < num_drafts:
                own = residual_law(own, drafts[accepted], masses[accepted])
            for token, share in enumerate(own):
                _continue(law, target, (*tokens[:accepted], token), drawn * probability * share, num_drafts + 1)
    return law


def _ends(probabilities: Sequence[float], method: str) -> list[float]:
    """How likely 0 .. k drafts are accepted."""
    k = len(probabilities)
    if method == "block":
        ends = [h * math.prod(1 - other for other in probabilities[j + 1 :]) for j, h in enumerate(probabilities)]
        return [1 - sum(ends), *ends]
    survives = [math.prod(probabilities[:j]) for j in range(k + 1)]
    return [survives[j] - survives[j + 1] for j in range(k)] + [survives[k]]


def _continue(
    law: dict[tuple[int, ...], float], target: Model, tokens: tuple[int, ...], probability: float, length: int
) -> None:
    if probability == 0.0:
        return
    if len(tokens) == length:
        law[tokens] = law.get(tokens, 0.0) + probability
        return
    for token, share in enumerate(target(tokens)):
        _continue(law, target, (*tokens, token), probability * share, length)


def conditional_rates(unconditional: Sequence[float]) -> list[float]:
    """How often a draft is accepted if those before it were, from how often it is accepted at all: 0 behind a 0."""
    before = [1.0, *unconditional]
    return [rate / prior if prior else 0.0 for prior, rate in itertools.pairwise(before)]


def rates_of_mean_length(mean_length: float, num_drafts: int) -> list[float]:
    """Unconditional rates c, c^2, ... of drafts that are all accepted alike, so that a round gives `mean_length` tokens
    on average, 1 .. num_drafts + 1."""
    low, high = 0.0, 1.0
    for _ in range(60):
        rate = (low + high) / 2
        low, high = (rate, high) if sum(rate**j for j in range(num_drafts + 1)) < mean_length else (low, rate)
    return [high ** (j + 1) for j in range(num_drafts)]
