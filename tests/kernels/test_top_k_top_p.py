"""Min-p, top-k and top-p: what is kept, that the draw is the masked draw, and every way a row's cut is found."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.sample.filters import apply_min_p, apply_top_k_top_p
from kernels import Purpose, gumbel_sample
from kernels import top_k_top_p as module
from kernels.top_k_top_p import mask_top_k_top_p, sample_top_k_top_p
from tests.kernels.test_no_host_wait import NoHostWait, forbid_waits

# The interpreter's NumPy says so where a GPU is silent: -inf - -inf, exp of what is too large.
pytestmark = [pytest.mark.filterwarnings("ignore::RuntimeWarning"), pytest.mark.slow]
ALL_FORMS = ("loop", "torch", "interpret")
NEG_INF, INF, NAN = float("-inf"), float("inf"), float("nan")
# How far a probability and a logit at the border may be from where float64 puts it.
P_ROUNDING, LOGIT_ROUNDING = 1e-6, 1e-5
Filters = tuple[int, float, float]


@contextmanager
def small_blocks() -> Iterator[None]:
    """Tiles of 16, 32 candidates: rows of a few hundred tokens then go every way that a real vocabulary can."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "_TILE": 16,
            "_TILES": 4,
            "_CAP": 32,
            "_CAP_TILES": 2,
            "_SEARCH_ROWS": 2,
            "_SEARCH_LANES": 128,
        }.items():
            patch.setattr(module, name, value)
        yield


def num_kept(row: np.ndarray, top_k: int, top_p: float, min_p: float, slack: float) -> int:
    """How many tokens are kept in float64, with the limits moved by `slack` roundings so that more (or fewer) are."""
    x = np.sort(row[row > NEG_INF].astype(np.float64))[::-1]
    if min_p > 0 and len(x):
        x = x[x >= x[0] + np.log(min_p) - slack * LOGIT_ROUNDING]
    x = x[: max(1, (x >= x[min(top_k, len(x)) - 1]).sum())] if len(x) else x
    if top_p >= 1 or not len(x):
        return len(x)
    mass = np.where(x == x[0], 1.0, np.exp(x - x[0]))
    before = (mass.cumsum() - mass) / mass.sum()
    return max(1, int((before < top_p + slack * P_ROUNDING).sum()))


def check_row(before: torch.Tensor, after: torch.Tensor, filters: Filters) -> None:
    """A row was masked as its filters say."""
    top_k, top_p, min_p = filters
    x, y = before.numpy(), after.numpy()
    if top_k >= len(x) and top_p >= 1 and min_p <= 0:
        assert np.array_equal(x.view(np.int32), y.view(np.int32)), "a row without a filter was changed"
        return
    kept = y > NEG_INF
    assert np.isneginf(y[~kept]).all()
    assert np.array_equal(y[kept], x[kept])
    order = np.lexsort((np.arange(len(x)), -np.where(np.isnan(x), NEG_INF, x)))
    assert kept[order[: kept.sum()]].all(), "what is kept isn't the best, or not in order of ids"
    least, most = (num_kept(x, *filters, slack) for slack in (-1, 1))
    assert least <= kept.sum() <= most, (kept.sum(), least, most, filters)


def tensors(filters: list[Filters]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    k, p, m = zip(*filters, strict=True)
    return torch.tensor(k, dtype=torch.int32), torch.tensor(p), torch.tensor(m)


def masked(logits: torch.Tensor, filters: list[Filters], form: str, rows: torch.Tensor | None = None) -> torch.Tensor:
    out = logits.clone()
    rows = torch.arange(len(logits)) if rows is None else rows
    mask_top_k_top_p(out, rows.int(), *tensors(filters), form=form)
    return out


def make_row(kind: str, vocab: int, generator: torch.Generator) -> torch.Tensor:
    x = torch.randn(vocab, generator=generator)
    some = torch.rand(vocab, generator=generator) < 0.3
    rows = {
        "flat": x * 0.05,
        "usual": x * 3,
        "peaked": x * 30,
        "bfloat16": x.bfloat16().float(),
        "few values": (x * 2).round() - 1,
        "equal": torch.full((vocab,), -7.25),
        "zeros": torch.where(some, -0.0, 0.0),
        "masked": torch.where(some, x, NEG_INF),
        "nothing": torch.full((vocab,), NEG_INF),
        "nan": torch.where(some, NAN, x),
        "infinite": torch.where(some, INF, torch.where(x > 0, NEG_INF, x)),
        "huge": x * 1e38,
        "tiny": x * 1e-42,
        "ascending": torch.arange(vocab) * 0.01,
        "clustered": torch.where(torch.arange(vocab) < 40, x * 0.1 + 5, x),
        "outlier": torch.where(torch.arange(vocab) == vocab // 2, 1e6, x),
    }
    return rows[kind]


KINDS = (
    "flat", "usual", "peaked", "bfloat16", "few values", "equal", "zeros", "masked", "nothing", "nan", "infinite",
    "huge", "tiny", "ascending", "clustered", "outlier",
)  # fmt: skip


@given(
    seed=st.integers(0, 2**31),
    vocab=st.sampled_from([1, 2, 15, 16, 17, 33, 200, 513]),
    kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=3),
    top_k=st.sampled_from([1, 2, 5, 31, 33, 100, 10**6]),
    top_p=st.sampled_from([0.0, 1e-6, 0.1, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 1e-30, 0.01, 0.3, 1.0]),
)
@settings(max_examples=25)
def test_what_is_kept(seed: int, vocab: int, kinds: list[str], top_k: int, top_p: float, min_p: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.stack([make_row(kind, vocab, generator) for kind in kinds])
    filters = [(top_k, top_p, min_p)] * len(kinds)
    with small_blocks():
        for form in ALL_FORMS:
            out = masked(logits, filters, form)
            for row, kind in enumerate(kinds):
                with np.errstate(over="ignore", invalid="ignore"):
                    check_row(logits[row], out[row], filters[row])
                assert out[row].isnan().sum() == 0 or not (top_k < vocab or top_p < 1 or min_p > 0), (form, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_row_under_every_filter(kind: str) -> None:
    """As above in torch and the loop form, where all of them are cheap."""
    logits = make_row(kind, 400, torch.Generator().manual_seed(3)).unsqueeze(0)
    for filters in itertools.product((1, 7, 399, 400), (0.0, 0.3, 0.95, 1.0), (0.0, 0.05, 1.0)):
        for form in ("torch", "loop"):
            with np.errstate(over="ignore", invalid="ignore"):
                check_row(logits[0], masked(logits, [filters], form)[0], filters)


def test_known_rows() -> None:
    half = torch.tensor([[0.5, 0.25, 0.125, 0.125]]).log()
    cases = [
        ((4, 0.5, 0.0), [0]),
        ((4, 0.51, 0.0), [0, 1]),
        ((4, 0.8, 0.0), [0, 1, 2]),  # of two ties the lower id
        ((4, 0.9, 0.0), [0, 1, 2, 3]),
        ((3, 1.0, 0.0), [0, 1, 2, 3]),  # the fourth ties with the third
        ((2, 0.67, 0.0), [0, 1]),  # two thirds of what top-k left is the first alone
        ((2, 0.66, 0.0), [0]),
        ((4, 0.6, 0.3), [0]),  # min-p comes first: two thirds again
        ((4, 1.0, 0.3), [0, 1]),
        ((4, 0.0, 0.0), [0]),
    ]
    for filters, kept in cases:
        for form in ALL_FORMS:
            out = masked(half, [filters], form)[0]
            assert (out > NEG_INF).nonzero().flatten().tolist() == kept, (filters, form)


# What settles a row's cut: (kind of row, filters, status after the search; see top_k_top_p_cut.py)
WAYS = [
    ("usual", (10**6, 1.0, 0.0), 0),
    ("nothing", (5, 0.5, 0.0), 2),
    ("usual", (5, 0.9, 0.0), 3),
    ("usual", (10**6, 0.3, 0.0), 3),
    ("usual", (10**6, 1.0, 0.2), 3),
    ("usual", (10**6, 0.9, 0.2), 3),
    ("flat", (10**6, 0.9, 0.0), 2),  # more than the candidates come to
    ("flat", (10**6, 0.3, 1e-3), 2),  # min-p keeps more than there is room for
    ("usual", (300, 1.0, 0.0), 2),  # too large a k
    ("usual", (300, 0.9, 0.0), 2),
    ("equal", (5, 1.0, 0.0), 2),  # too many ties
    ("equal", (10**6, 0.4, 0.0), 2),  # ties that top-p must part
    ("few values", (10**6, 0.8, 0.0), 2),
    ("ascending", (5, 0.5, 0.0), 2),  # the best lie side by side, and so few tiles bound them badly
    ("flat", (10**6, 1.0, 0.2), 2),
]


@pytest.mark.parametrize(("kind", "filters", "status"), WAYS)
def test_every_way_to_a_cut(kind: str, filters: Filters, status: int) -> None:
    logits = make_row(kind, 600, torch.Generator().manual_seed(8)).unsqueeze(0)
    row, seeds, temperature = torch.zeros(1, dtype=torch.int32), torch.tensor([5]), torch.ones(1)
    with small_blocks():
        sampled = torch.empty(1, dtype=torch.int64)
        draw = (seeds, torch.tensor([9]), int(Purpose.SAMPLE), sampled)
        _, cut = module._find_cuts(logits, (row, *tensors([filters]), temperature), draw, False, "interpret")
        assert cut[0, 0] == status
        check_row(logits[0], masked(logits, [filters], "interpret")[0], filters)


def draws(
    logits: torch.Tensor, filters: list[Filters], temperature: list[float], rows: list[int], form: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens drawn by the fused form, and by dividing, masking and drawing one after the other."""
    idx, t = torch.tensor(rows, dtype=torch.int32), torch.tensor(temperature)
    keys = (t, torch.arange(len(filters)) * 2**40 - 3, torch.arange(len(rows)) * 2**31 + 5)
    fused = sample_top_k_top_p(
        logits, idx, *tensors(filters), *keys, purpose=Purpose.SAMPLE, apply_temperature=True, form=form
    )
    by_row = t[idx.clamp(min=0).long()].unsqueeze(1)
    divided = logits / torch.where(by_row == 0, 1, by_row)
    mask_top_k_top_p(divided, idx, *tensors(filters), form=form)
    drawn = gumbel_sample(divided, idx.clamp(min=0), *keys, purpose=Purpose.SAMPLE, form=form)
    return fused, drawn.masked_fill(idx < 0, 0)


@given(
    seed=st.integers(0, 2**31),
    vocab=st.sampled_from([1, 17, 200, 1030]),
    kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=3),
    filters=st.tuples(
        st.sampled_from([1, 5, 40, 10**6]), st.sampled_from([0.1, 0.9, 1.0]), st.sampled_from([0.0, 0.1])
    ),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7, 1e30]),
)
@settings(max_examples=15)
def test_the_draw_is_that_of_masked_logits(
    seed: int, vocab: int, kinds: list[str], filters: Filters, temperature: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.stack([make_row(kind, vocab, generator) for kind in kinds])
    untouched = logits.clone()
    with small_blocks():
        for form in ALL_FORMS:
            fused, drawn = draws(logits, [filters], [temperature], [0] * len(kinds), form)
            assert fused.dtype == torch.int64 and torch.equal(fused, drawn), form
    assert torch.equal(logits.view(torch.int32), untouched.view(torch.int32))


@pytest.mark.parametrize("form", ALL_FORMS)
def test_rows_of_all_sorts_share_a_batch(form: str) -> None:
    filters = [(5, 0.9, 0.0), (10**6, 1.0, 0.0), (10**6, 0.95, 0.0), (40, 1.0, 0.1), (3, 0.5, 0.0)]
    temperature, rows = [1.0, 0.7, 1.0, 2.0, 0.0], [3, -1, 0, 1, 2, 4, -1, 2, 0]
    generator = torch.Generator().manual_seed(1)
    logits = torch.stack([make_row(kind, 500, generator) for kind in KINDS[: len(rows)]])
    with small_blocks():
        fused, drawn = draws(logits, filters, temperature, rows, form)
        assert torch.equal(fused, drawn)
        assert fused[1] == fused[6] == 0
        assert fused[5] == int(logits[5].argmax())  # greedy: of ties the lowest id
        out = masked(logits, filters, form, torch.tensor(rows))
        for i, row in enumerate(rows):
            check_row(logits[i], out[i], filters[row] if row >= 0 else (10**6, 1.0, 0.0))
            if row in (0, 2):
                alone = masked(logits[i : i + 1], [filters[row]], form)
                assert torch.equal(alone.view(torch.int32), out[i : i + 1].view(torch.int32)), "the batch matters"


@pytest.mark.parametrize("form", ALL_FORMS)
def test_nothing_past_a_row_is_read_or_written(form: str) -> None:
    table = torch.full((3, 330), 1e30)
    table[:, :301] = torch.randn(3, 301, generator=torch.Generator().manual_seed(2))
    logits = table[:, :301]
    before = logits.clone()
    with small_blocks():
        fused, drawn = draws(logits, [(4, 0.9, 0.0), (10**6, 0.9, 0.0), (10**6, 1.0, 0.0)], [1.0] * 3, [0, 1, 2], form)
        assert torch.equal(fused, drawn) and (fused < 301).all()
        mask_top_k_top_p(logits, torch.arange(3).int(), *tensors([(4, 0.9, 0.0)] * 3), form=form)
    assert (table[:, 301:] == 1e30).all()
    for row in range(3):
        check_row(before[row], logits[row], (4, 0.9, 0.0))


@pytest.mark.slow
def test_a_real_vocabulary() -> None:
    generator = torch.Generator().manual_seed(6)
    logits = torch.stack([make_row(kind, 151_936, generator) for kind in ("usual", "usual", "flat")])
    filters = [(50, 0.95, 0.0), (10**6, 0.3, 0.0), (1500, 0.95, 0.0)]
    for form in ("torch", "interpret"):
        out = masked(logits, filters, form)
        for row in range(3):
            check_row(logits[row], out[row], filters[row])
    fused, drawn = draws(logits, filters, [1.0, 0.8, 1.5], [0, 1, 2], "interpret")
    assert torch.equal(fused, drawn)


def test_the_sorting_filters_keep_the_same() -> None:
    logits = torch.randn(6, 900, generator=torch.Generator().manual_seed(4)) * 2
    filters = [(50, 0.95, 0.0), (900, 0.9, 0.0), (20, 1.0, 0.0), (900, 1.0, 0.1), (30, 0.8, 0.05), (900, 1.0, 0.0)]
    k, p, m = tensors(filters)
    sorting = apply_top_k_top_p(apply_min_p(logits.clone(), m), k, p)
    for form in ALL_FORMS:
        assert torch.equal(masked(logits, filters, form), sorting), form


def test_no_rows() -> None:
    for form in ALL_FORMS:
        assert masked(torch.zeros(0, 10), [(1, 0.5, 0.0)], form).shape == (0, 10)
        empty = torch.zeros(0, dtype=torch.int64)
        ids = sample_top_k_top_p(
            torch.zeros(0, 10), empty.int(), *tensors([(1, 0.5, 0.0)]), torch.ones(1), empty + 1, empty,
            purpose=0, form=form,
        )  # fmt: skip
        assert ids.shape == (0,) and ids.dtype == torch.int64


def test_bad_arguments_are_named() -> None:
    k, p, m = tensors([(1, 0.5, 0.0)])
    rows = torch.zeros(2, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"logits must have dtype torch.float32, got torch.bfloat16"):
        mask_top_k_top_p(torch.zeros(2, 5).bfloat16(), rows, k, p, m)
    with pytest.raises(ValueError, match=r"expanded_idx_mapping needs at least 3 row"):
        mask_top_k_top_p(torch.zeros(3, 5), rows, k, p, m)
    with pytest.raises(ValueError, match=r"top_k must have dtype torch.int32, got torch.int64"):
        mask_top_k_top_p(torch.zeros(2, 5), rows, k.long(), p, m)
    with pytest.raises(ValueError, match="4 is not a valid Purpose"):
        sample_top_k_top_p(torch.zeros(2, 5), rows, k, p, m, p, rows.long(), rows.long(), purpose=4)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_torch_form_makes_no_host_wait(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    logits, rows = torch.randn(3, 50, device=device), torch.tensor([0, -1, 1], dtype=torch.int32).to(device)
    filters = [x.to(device) for x in tensors([(5, 0.9, 0.1), (50, 1.0, 0.0)])]
    draw = [torch.ones(2, device=device), *(torch.arange(n, device=device) for n in (2, 3))]
    with monkeypatch.context() as patch, NoHostWait(device):
        forbid_waits(patch)
        mask_top_k_top_p(logits, rows, *filters, form="torch")
        sample_top_k_top_p(logits, rows, *filters, *draw, purpose=0, apply_temperature=True, form="torch")
