"""Kernel 18: its forms agree, a choice depends on its key alone, greedy rows, and ids that may be chosen."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import Purpose, gumbel_sample
from kernels import gumbel as kernel
from kernels.noise import LANES
from tests.kernels.draws import ALL_FORMS, NEG_INF, TILE, exact_scores, sample

pytestmark = pytest.mark.slow  # interpreted kernels


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
