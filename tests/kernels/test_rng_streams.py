"""One stream a purpose: no key is used twice, and speculative sampling from them has the law of the target.

An engine whose drafter drew with the key of the residual's draw had another law: given a rejection, that noise is no
longer independent. The experiment is done both ways here, so that it is seen to tell one from the other.
"""

import itertools

import pytest
import torch

from kernels import Purpose, gumbel_sample
from kernels import noise as module
from kernels.philox import philox, uniform
from tests.kernels.draws import chi_square_z

DRAFT_LAW, TARGET_LAW = torch.tensor([0.70, 0.25, 0.05]), torch.tensor([0.10, 0.45, 0.45])


def test_no_key_is_used_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """What every purpose draws at some positions for some seeds: all counters of a seed are different."""
    seen: list[tuple[torch.Tensor, ...]] = []

    def record(*parts: torch.Tensor) -> tuple[torch.Tensor, ...]:
        seen.append(torch.broadcast_tensors(*parts))
        return philox(*parts)

    monkeypatch.setattr(module, "philox", record)
    seeds, positions = torch.tensor([3, -3, 2**40]), torch.tensor([0, 1, 2, 2**32, 2**32 + 1])
    pairs = list(itertools.product(range(len(seeds)), positions.tolist()))
    rows, at = (torch.tensor(column) for column in zip(*pairs, strict=True))
    for purpose in Purpose:
        gumbel_sample(torch.zeros(len(rows), 1500), rows.int(), torch.ones(3), seeds, at, purpose=purpose, form="torch")
    keys = torch.cat([torch.stack([part.flatten() & 0xFFFFFFFF for part in (*p[1:], p[0])], dim=1) for p in seen])
    used = 2 * module.LANES * len(rows) * len(Purpose)
    assert len(keys) == used
    assert len(keys.unique(dim=0)) == used


def first_tokens(trials: int, draft_purpose: Purpose) -> torch.Tensor:
    """The first token of many speculative steps, one a seed: a sampled draft, or the residual's where it's rejected."""
    seeds, rows, position = torch.arange(trials), torch.arange(trials, dtype=torch.int32), 20

    def draw(law: torch.Tensor, purpose: Purpose) -> torch.Tensor:
        at = torch.full((trials,), position)
        return gumbel_sample(
            law.log().expand(trials, -1), rows, torch.ones(trials), seeds, at, purpose=purpose, form="torch"
        )

    draft = draw(DRAFT_LAW, draft_purpose)
    zero = torch.zeros_like(seeds)
    words = philox(seeds, zero, zero + position, zero + int(Purpose.ACCEPT), zero)
    accepted = uniform(words[0]) * DRAFT_LAW[draft] < TARGET_LAW[draft]
    residual = (TARGET_LAW - DRAFT_LAW).clamp(min=0)
    return torch.where(accepted, draft, draw(residual / residual.sum(), Purpose.RESAMPLE))


def test_speculative_sampling_has_the_law_of_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    trials = 100_000
    monkeypatch.setattr(module, "LANES", 1)  # three tokens need no tile of 1,024
    tokens, biased = (first_tokens(trials, purpose) for purpose in (Purpose.DRAFT, Purpose.RESAMPLE))
    assert abs(chi_square_z(tokens.bincount(minlength=3), TARGET_LAW * trials)) < 3.3
    assert chi_square_z(biased.bincount(minlength=3), TARGET_LAW * trials) > 3.3, "a shared key has to show"
