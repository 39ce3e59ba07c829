"""Kernel 18: the law of the draws, their purity, and the edges of the noise."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import Purpose, gumbel_sample
from kernels import gumbel as kernel
from kernels.noise import (
    LANES,
    MIN_UNIFORM,
    gumbel_noise,
    log2_bound_triton,
    log2_exponential_triton,
    log_exponential,
    log_exponential_torch,
    log_exponential_triton,
)
from kernels.philox import philox, uniform
from kernels.triton_support import launch, tl, triton

pytestmark = pytest.mark.slow  # interpreted kernels

ALL_FORMS = ("loop", "torch", "interpret")
TILE = 4 * LANES
# u = 0 (twice), the smallest positive u, and u -> 1 (twice).
EDGE_WORDS = torch.tensor([0, -1, 1, 2**31 - 1, -(2**31)], dtype=torch.int32)
NEG_INF = float("-inf")
FORMS_OF_TRITON = pytest.mark.parametrize(
    ("form", "device"), [("interpret", "cpu"), pytest.param("triton", "cuda", marks=pytest.mark.gpu)]
)


def sample(
    logits: torch.Tensor,
    *,
    temperature: float = 1.0,
    seed: int = 0,
    position: int = 0,
    purpose: int = Purpose.SAMPLE,
    form: str = "torch",
    **options: bool,
) -> torch.Tensor:
    """Sample every row with one seed, at positions `position`, `position + 1`, ..."""
    n = len(logits)
    return gumbel_sample(
        logits,
        torch.zeros(n, dtype=torch.int32),
        torch.tensor([temperature]),
        torch.tensor([seed]),
        torch.arange(position, position + n),
        purpose=purpose,
        form=form,
        **options,
    )


def exact_scores(logits: torch.Tensor, t: float, seed: int, position: int, purpose: int) -> torch.Tensor:
    """Return logit - t * log E in f64 for one row, straight from the definition."""
    token = torch.arange(len(logits))
    tile, word, lane = token // TILE, token % TILE // LANES, token % LANES
    words = torch.stack(
        philox(
            torch.tensor(seed),
            tile * LANES + lane,
            torch.tensor(position),
            torch.tensor(purpose),
            torch.tensor(position >> 32),
        )
    )
    u = (uniform(words.gather(0, word.unsqueeze(0))[0]) + MIN_UNIFORM).double()
    return logits.double() - t * torch.log(-torch.log1p(-u))


def chi_square_z(counts: torch.Tensor, expected: torch.Tensor) -> float:
    """Return Pearson's statistic as a standard normal deviate (Wilson-Hilferty); rare cells are pooled."""
    order = expected.argsort()
    pool = (expected[order].cumsum(0) // 20).long()
    pooled = [
        torch.zeros(int(pool[-1]) + 1, dtype=torch.float64).index_add_(0, pool, x[order].double())
        for x in (counts, expected)
    ]
    kept = pooled[1] > 0
    statistic = float(((pooled[0] - pooled[1]) ** 2 / pooled[1])[kept].sum())
    df = int(kept.sum()) - 1
    return ((statistic / df) ** (1 / 3) - (1 - 2 / (9 * df))) / math.sqrt(2 / (9 * df))


@triton.jit
def _noise_kernel(words_ptr, out_ptr, n, MIN_UNIFORM: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    words = tl.load(words_ptr + i, mask=i < n, other=0)
    tl.store(out_ptr + i, log_exponential_triton(words.to(tl.uint32, bitcast=True), MIN_UNIFORM), mask=i < n)


@triton.jit
def _bound_kernel(words_ptr, log2_ptr, bound_ptr, n, MIN_UNIFORM: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    words = tl.load(words_ptr + i, mask=i < n, other=0).to(tl.uint32, bitcast=True)
    tl.store(log2_ptr + i, log2_exponential_triton(words, MIN_UNIFORM), mask=i < n)
    tl.store(bound_ptr + i, log2_bound_triton(words, MIN_UNIFORM), mask=i < n)


def noise(words: torch.Tensor, form: str) -> torch.Tensor:
    if form == "torch":
        return log_exponential_torch(words)
    if form == "loop":
        return torch.tensor([log_exponential(word & 0xFFFFFFFF) for word in words.tolist()])
    out = torch.zeros(len(words), device=words.device)
    launch(_noise_kernel, (1,), words, out, len(words), form=form, MIN_UNIFORM=MIN_UNIFORM, BLOCK=1024)
    return out


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


@given(
    seed=st.integers(-(2**63), 2**63 - 1),
    position=st.integers(0, 2**34),
    purpose=st.sampled_from(Purpose),
    vocab=st.sampled_from([1, 2, 255, 257, 1000, TILE, TILE + 1]),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 5.0]),
    apply_temperature=st.booleans(),
)
@settings(max_examples=25)
def test_forms_agree(
    seed: int, position: int, purpose: Purpose, vocab: int, temperature: float, apply_temperature: bool
) -> None:
    logits = torch.randn(2, vocab, generator=torch.Generator().manual_seed(vocab)) * 3
    t = temperature if apply_temperature else float(temperature != 0)
    chosen = {
        form: sample(
            logits,
            temperature=temperature,
            seed=seed,
            position=position,
            purpose=purpose,
            form=form,
            apply_temperature=apply_temperature,
        )
        for form in ALL_FORMS
    }
    for row in range(2):
        scores = exact_scores(logits[row], t, seed, position + row, purpose)
        for form, ids in chosen.items():
            assert ids.dtype == torch.int64
            gap = float(scores.max() - scores[ids[row]])
            assert gap <= 1e-4, f"{form} chose {int(ids[row])}, {gap} below the best"
            if temperature == 0.0:
                assert ids[row] == logits[row].argmax()


@pytest.mark.parametrize("form", ALL_FORMS)
def test_a_choice_depends_on_nothing_but_logits_seed_position_and_purpose(form: str) -> None:
    rows = 6
    logits = torch.randn(rows, 700, generator=torch.Generator().manual_seed(2))
    logits[3:] = logits[:3]
    seeds, temperature = torch.tensor([5, -6, 7, 8]), torch.tensor([1.0, 0.5, 0.0, 2.0])
    idx, positions = torch.tensor([0, 1, 2, 3, 1, 0], dtype=torch.int32), torch.tensor([4, 5, 6, 4, 2**33, 4])
    args = {"purpose": Purpose.RESAMPLE, "apply_temperature": True, "form": form}
    together = gumbel_sample(logits, idx, temperature, seeds, positions, **args)
    shuffle, rename = torch.tensor([4, 2, 0, 5, 3, 1]), torch.tensor([2, 3, 1, 0])
    shuffled = gumbel_sample(
        logits[shuffle].clone(),
        rename[idx.long()][shuffle].int(),
        temperature[rename.argsort()],
        seeds[rename.argsort()],
        positions[shuffle],
        **args,
    )
    assert torch.equal(shuffled, together[shuffle])
    for i in range(rows):
        row = int(idx[i])
        alone = gumbel_sample(
            logits[i : i + 1].clone(),
            torch.zeros(1, dtype=torch.int32),
            temperature[row : row + 1],
            seeds[row : row + 1],
            positions[i : i + 1],
            **args,
        )
        assert alone[0] == together[i]


@pytest.mark.parametrize("form", ALL_FORMS)
def test_every_part_of_the_key_matters(form: str) -> None:
    flat = torch.zeros(1, 1000)
    base = {"seed": 1, "position": 1, "purpose": Purpose.SAMPLE}
    changes = [
        {},
        {"seed": 2},
        {"seed": 1 + 2**32},
        {"seed": -1},
        {"position": 2},
        {"position": 1 + 2**32},
        {"purpose": Purpose.DRAFT},
        {"purpose": Purpose.ACCEPT},
        {"purpose": Purpose.RESAMPLE},
    ]
    ids = [int(sample(flat, form=form, **(base | change))) for change in changes]
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("form", ALL_FORMS)
def test_minus_infinity_is_never_chosen(form: str) -> None:
    logits = torch.full((6, 600), NEG_INF)
    logits[:, 599], logits[:, 3] = -1e30, -2e30
    assert (sample(logits, temperature=1e-3, form=form) == 599).all()
    logits[:, 599] = NEG_INF
    assert (sample(logits, temperature=5.0, form=form, apply_temperature=True) == 3).all()
    logits[:, 3] = NEG_INF
    assert (sample(logits, form=form) == 0).all()
    assert (sample(logits, temperature=0.0, form=form, all_greedy=True) == 0).all()


@pytest.mark.parametrize("vocab", [1, 3, 1000, TILE, TILE + 1, 3 * TILE - 1])
@pytest.mark.parametrize("form", ["torch", "interpret"])
def test_ids_lie_in_the_vocabulary(form: str, vocab: int) -> None:
    # A view of a wider table: what lies past the row would win if it were read.
    table = torch.full((3, vocab + 50), 1e30)
    table[:, :vocab] = -1e30
    ids = sample(table[:, :vocab], seed=4, form=form)
    assert ((ids >= 0) & (ids < vocab)).all()
    table[0, :vocab] = float("nan")
    ids = sample(table[:, :vocab], seed=4, form=form)
    assert ((ids >= 0) & (ids < vocab)).all()


@pytest.mark.parametrize("all_greedy", [False, True])
@pytest.mark.parametrize("form", ALL_FORMS)
def test_greedy_takes_the_lowest_id_of_a_tie(form: str, all_greedy: bool) -> None:
    ties = [(5, 3 + LANES), (3, 5), (LANES, 2 * LANES), (7, TILE + 1), (TILE, TILE + LANES)]
    logits = torch.zeros(len(ties), TILE + 600)
    for row, pair in enumerate(ties):
        logits[row, list(pair)] = 2.5
    ids = sample(logits, temperature=0.0, form=form, all_greedy=all_greedy)
    assert ids.tolist() == [first for first, _ in ties]
    assert (sample(torch.zeros(2, 500), temperature=0.0, form=form, all_greedy=all_greedy) == 0).all()


@pytest.mark.parametrize("form", ALL_FORMS)
def test_greedy_and_random_rows_share_a_batch(form: str) -> None:
    logits = torch.zeros(20, 50)
    logits[:, 20] = 0.5
    idx = (torch.arange(20) % 2).int()
    ids = gumbel_sample(
        logits, idx, torch.tensor([0.0, 1.0]), torch.tensor([1, 2]), torch.arange(20), purpose=Purpose.SAMPLE, form=form
    )
    assert (ids[::2] == 20).all() and len(ids[1::2].unique()) > 5


@pytest.mark.parametrize("temperature", [1e-30, 1e-6, 1e6, 1e30])
def test_extreme_temperatures(temperature: float) -> None:
    logits = torch.linspace(-5, 5, 400).expand(200, -1)
    ids = sample(logits, temperature=temperature, apply_temperature=True)
    if temperature < 1:
        assert (ids == 399).all()
    else:
        assert len(ids.unique()) > 100


def test_no_rows() -> None:
    for form in ALL_FORMS:
        assert sample(torch.zeros(0, 10), form=form).shape == (0,)


def test_an_unknown_purpose_is_refused() -> None:
    with pytest.raises(ValueError, match="4 is not a valid Purpose"):
        sample(torch.zeros(1, 4), purpose=4)


def test_the_noise_that_is_shown_is_the_noise_that_decides() -> None:
    logits, positions = torch.randn(50, 1300), torch.arange(50)
    noise = gumbel_noise(torch.full((50,), 9), positions, 1300, purpose=Purpose.SAMPLE)
    assert noise.shape == logits.shape and float(noise.min()) > -2.83 and float(noise.max()) < 22.2
    assert torch.equal((logits + noise).argmax(-1), sample(logits, seed=9))


def test_many_rows_are_chosen_from_as_few_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program takes several steps through a row where there are many rows; the last step has a mask."""
    rows, vocab = 8, 2 * kernel._TILES * TILE + 700
    logits = torch.randn(4, vocab, generator=torch.Generator().manual_seed(8)).repeat(rows // 4, 1)
    few = sample(logits, seed=3, form="interpret")
    monkeypatch.setattr(kernel, "_PROGRAMS", rows)
    assert torch.equal(sample(logits, seed=3, form="interpret"), few)
    monkeypatch.setattr(kernel, "_PROGRAMS", 2 * rows)
    assert torch.equal(sample(logits, seed=3, form="interpret"), few)
    assert len(few.unique()) > rows // 2
    assert torch.equal(few, sample(logits, seed=3))
