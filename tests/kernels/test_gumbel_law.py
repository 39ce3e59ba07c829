"""The law of kernel 18's draws: the softmax, over positions and seeds, and no purpose tells about another."""

import pytest
import torch

from kernels import Purpose, gumbel_sample
from tests.kernels.draws import NEG_INF, chi_square_z, sample

pytestmark = pytest.mark.slow  # interpreted kernels


@pytest.mark.slow
@pytest.mark.parametrize("apply_temperature", [False, True])
def test_frequencies_are_the_softmax(apply_temperature: bool) -> None:
    g = torch.Generator().manual_seed(11)
    logits = torch.randn(1000, generator=g) * 2
    logits[::7] = NEG_INF
    draws, temperature = 100_000 if apply_temperature else 20_000, 0.7
    counts = torch.zeros(len(logits), dtype=torch.int64)
    given_logits = logits if apply_temperature else logits / temperature
    for first in range(0, draws, 250):
        ids = sample(
            given_logits.expand(250, -1),
            temperature=temperature,
            seed=123,
            position=first,
            apply_temperature=apply_temperature,
        )
        counts += ids.bincount(minlength=len(logits))
    law = (logits.double() / temperature).softmax(0)
    assert counts.sum() == draws and not counts[::7].any()
    assert abs(chi_square_z(counts, law * draws)) < 3.3
    assert abs(chi_square_z(counts, (logits.double() / 0.75).softmax(0) * draws)) > 3.3  # the test can tell


def test_frequencies_over_seeds() -> None:
    logits, draws = torch.tensor([[2.0, 1.0, 0.0, -1.0, NEG_INF]]), 10_000
    counts = torch.zeros(5, dtype=torch.int64)
    for first in range(0, draws, 250):
        seeds = torch.arange(first, first + 250)
        ids = gumbel_sample(
            logits.expand(250, -1),
            torch.arange(250).int(),
            torch.ones(250),
            seeds,
            torch.full((250,), 17),
            purpose=Purpose.SAMPLE,
            form="torch",
        )
        counts += ids.bincount(minlength=5)
    assert counts[4] == 0
    assert abs(chi_square_z(counts, logits[0].double().softmax(0) * draws)) < 3.3


def test_purposes_are_independent_streams() -> None:
    """A shared stream made speculative sampling biased: the draft's noise must say nothing about the resample's."""
    logits, draws = torch.zeros(3), 8_000
    columns: list[list[torch.Tensor]] = [[] for _ in Purpose]
    for first in range(0, draws, 250):
        for purpose in Purpose:
            columns[purpose].append(sample(logits.expand(250, -1), seed=9, position=first, purpose=purpose))
    choices = [torch.cat(column) for column in columns]
    for a in Purpose:
        for b in range(a):
            joint = (choices[a] * 3 + choices[b]).bincount(minlength=9)
            assert abs(chi_square_z(joint, torch.full((9,), draws / 9))) < 3.3, (a, b)
