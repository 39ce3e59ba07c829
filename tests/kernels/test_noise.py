"""The noise of kernel 18: exact and finite at its edges, below its bound, and the one that decides."""

import pytest
import torch

from kernels import Purpose, gumbel_sample
from kernels import gumbel as kernel
from kernels.noise import MIN_UNIFORM, gumbel_noise, log2_bound_triton, log2_exponential_triton
from kernels.philox import uniform
from kernels.triton_support import launch, tl, triton
from tests.kernels.draws import ALL_FORMS, EDGE_WORDS, NEG_INF, TILE, noise, sample

pytestmark = pytest.mark.slow  # interpreted kernels
FORMS_OF_TRITON = pytest.mark.parametrize(
    ("form", "device"), [("interpret", "cpu"), pytest.param("triton", "cuda", marks=pytest.mark.gpu)]
)


@triton.jit
def _bound_kernel(words_ptr, log2_ptr, bound_ptr, n, MIN_UNIFORM: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    words = tl.load(words_ptr + i, mask=i < n, other=0).to(tl.uint32, bitcast=True)
    tl.store(log2_ptr + i, log2_exponential_triton(words, MIN_UNIFORM), mask=i < n)
    tl.store(bound_ptr + i, log2_bound_triton(words, MIN_UNIFORM), mask=i < n)


@pytest.mark.parametrize("form", ALL_FORMS)
def test_noise_is_finite_and_exact_at_every_uniform(form: str) -> None:
    small = 2 ** torch.arange(31)
    spread = torch.randint(-(2**31), 2**31, (900,), generator=torch.Generator().manual_seed(5))
    words = torch.cat([EDGE_WORDS, small.int(), spread.int()])
    got = noise(words, form).double()
    u = (uniform(words) + MIN_UNIFORM).double()
    assert torch.isfinite(got).all()
    assert got.min() > -22.2 and got.max() < 2.82
    torch.testing.assert_close(got, torch.log(-torch.log1p(-u)), rtol=2e-6, atol=2e-6)


@FORMS_OF_TRITON
def test_the_bound_is_one_and_near_where_it_must_be(form: str, device: str) -> None:
    spread = torch.randint(-(2**31), 2**31, (900,), generator=torch.Generator().manual_seed(6)).int()
    words = torch.cat([EDGE_WORDS, 2 ** torch.arange(31).int(), spread]).to(device)
    log2, bound = torch.zeros(2, len(words), device=device)
    launch(_bound_kernel, (1,), words, log2, bound, len(words), form=form, MIN_UNIFORM=MIN_UNIFORM, BLOCK=1024)
    # What the hardware's log2 may be wrong by, in both; here both are exact.
    allowed = 2.0**-22 * (log2.abs() + bound.abs()) + 1e-6 if form == "interpret" else 0.0
    assert (log2 - bound >= allowed).all()
    near = uniform(words) < 1e-4
    assert near.sum() > 10 and (log2 - bound)[near].max() < 2e-4


@FORMS_OF_TRITON
@pytest.mark.parametrize("tile", [1, kernel._TILES])
def test_all_scores_are_taken_where_bounds_do_not_decide(
    tile: int, form: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two tokens of one lane, in one step or in two: the one with the larger bound has not always the better score."""
    vocab, tokens, logits = (tile + 1) * TILE, torch.tensor([7, 7 + tile * TILE]), torch.tensor([0.0, 0.4])
    position = torch.arange(200)
    noise = gumbel_noise(torch.full((200,), 3), position, vocab, purpose=Purpose.SAMPLE)[:, tokens]
    bounds = logits - torch.log(-torch.expm1(-torch.exp(-noise.double())))
    best = (logits + noise).argmax(1)
    position = position[best != bounds.argmax(1)][:8]
    assert (logits + noise <= bounds).all() and len(position) == 8
    rows = torch.full((8, vocab), NEG_INF)
    rows[:, tokens] = logits
    monkeypatch.setattr(kernel, "_PROGRAMS", 1)
    idx, temperature, seeds = torch.zeros(8, dtype=torch.int32), torch.ones(1), torch.tensor([3])
    batch = [x.to(device) for x in (rows, idx, temperature, seeds, position)]
    assert torch.equal(gumbel_sample(*batch, purpose=Purpose.SAMPLE, form=form).cpu(), tokens[best[position]])


def test_the_noise_that_is_shown_is_the_noise_that_decides() -> None:
    logits, positions = torch.randn(50, 1300), torch.arange(50)
    noise = gumbel_noise(torch.full((50,), 9), positions, 1300, purpose=Purpose.SAMPLE)
    assert noise.shape == logits.shape and float(noise.min()) > -2.83 and float(noise.max()) < 22.2
    assert torch.equal((logits + noise).argmax(-1), sample(logits, seed=9))
