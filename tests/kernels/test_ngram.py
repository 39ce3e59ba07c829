"""Drafts looked up in a request's own tokens: the rule by cases, and its forms against a plain loop."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import propose_ngram
from tests.kernels.test_compile import I32, I64, interpret_first, test_compiles_for_hopper
from tests.kernels.test_no_host_wait import NoHostWait, forbid_waits

__all__ = ["interpret_first"]  # the fixture
compiles_for_hopper = test_compiles_for_hopper
del test_compiles_for_hopper
ALL_FORMS = ("loop", "torch", "interpret")
TOKENS = [3, 6, 2, 3, 8, 1, 2, 3, 7, 1, 2, 3]


def propose(requests: list[list[int]], form: str, *, k: int, low: int, high: int, max_len: int = 40) -> list[list[int]]:
    """Each request's drafts; rows of the table are used from the last one up, and hold other tokens behind theirs."""
    rows = list(range(len(requests), 0, -1))
    table = torch.randint(0, 4, (len(requests) + 2, max_len)).int()
    total_len = torch.zeros(len(requests) + 2, dtype=torch.int32)
    for row, tokens in zip(rows, requests, strict=True):
        table[row, : len(tokens)] = torch.tensor(tokens)
        total_len[row] = len(tokens)
    drafts = propose_ngram(
        torch.tensor(rows, dtype=torch.int32), table, total_len, num_drafts=k, min_ngram=low, max_ngram=high,
        max_total_len=max(map(len, requests), default=None), form=form,
    )  # fmt: skip
    assert drafts.shape == (len(requests), k) and drafts.dtype == torch.int64
    result = [[token for token in row if token >= 0] for row in drafts.tolist()]
    assert all(row[len(own) :] == [-1] * (k - len(own)) for row, own in zip(drafts.tolist(), result, strict=True))
    return result


@pytest.mark.parametrize("form", ALL_FORMS)
@pytest.mark.parametrize(
    ("tokens", "low", "high", "k", "drafts"),
    [
        (TOKENS, 1, 1, 1, [6]),
        (TOKENS, 1, 2, 1, [8]),
        (TOKENS, 1, 3, 1, [7]),
        (TOKENS, 1, 3, 3, [7, 1, 2]),
        (TOKENS, 1, 3, 9, [7, 1, 2, 3]),  # what followed ends where the tokens end
        ([5, 6, 1, 5, 6, 2, 5, 6], 2, 2, 1, [1]),  # a tie: the earliest
        ([1, 2, 3, 4], 1, 3, 2, []),
        ([1, 2, 5, 2], 2, 3, 2, []),  # a match of one alone
        ([7, 7, 7], 1, 2, 3, [7]),  # the place may overlap with the end
        ([7], 1, 1, 2, []),
        ([7, 7], 1, 5, 2, [7]),
    ],
)
def test_cases(form: str, tokens: list[int], low: int, high: int, k: int, drafts: list[int]) -> None:
    assert propose([tokens], form, k=k, low=low, high=high) == [drafts]


@pytest.mark.parametrize("form", ALL_FORMS)
def test_no_draft_reaches_past_the_longest_request(form: str) -> None:
    assert propose([TOKENS], form, k=4, low=1, high=3, max_len=14) == [[7, 1]]
    assert propose([TOKENS], form, k=4, low=1, high=3, max_len=12) == [[]]


@pytest.mark.parametrize("form", ALL_FORMS)
def test_each_request_gets_its_own(form: str) -> None:
    requests = [[1, 2, 3], [4, 5, 4], [9], [2, 2, 8, 2, 2]]
    assert propose(requests, form, k=2, low=1, high=2) == [[], [5, 4], [], [8, 2]]
    assert propose([], form, k=2, low=1, high=2) == []
    table, total = torch.zeros(1, 9, dtype=torch.int32), torch.tensor([5], dtype=torch.int32)
    padding = torch.tensor([-1], dtype=torch.int32)
    drafts = propose_ngram(padding, table, total, num_drafts=2, min_ngram=1, max_ngram=1, form=form)
    assert drafts.tolist() == [[-1, -1]]


@pytest.mark.parametrize("form", ALL_FORMS)
def test_a_request_longer_than_the_host_said_gets_none(form: str) -> None:
    """One inside its prompt has all of its tokens in the table already."""
    table, total = torch.tensor([TOKENS, TOKENS], dtype=torch.int32), torch.tensor([12, 8], dtype=torch.int32)
    drafts = propose_ngram(
        torch.arange(2).int(), table, total, num_drafts=1, min_ngram=1, max_ngram=3, max_total_len=9, form=form
    )
    assert drafts.tolist() == [[-1], [8]]


REQUESTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=39), min_size=1, max_size=4)
RANGES = st.tuples(st.integers(1, 4), st.integers(0, 3)).map(lambda pair: (pair[0], sum(pair)))


@pytest.mark.parametrize("form", ["torch", "interpret"])
@given(requests=REQUESTS, ngrams=RANGES, k=st.integers(1, 5))
@settings(max_examples=60)
def test_forms_agree(form: str, requests: list[list[int]], ngrams: tuple[int, int], k: int) -> None:
    low, high = ngrams
    assert propose(requests, form, k=k, low=low, high=high) == propose(requests, "loop", k=k, low=low, high=high)


def test_tokens_over_several_blocks() -> None:
    generator = torch.Generator().manual_seed(0)
    requests = [torch.randint(0, 30, (n,), generator=generator).tolist() for n in (1023, 1024, 1025, 2500, 4000)]
    expected = propose(requests, "loop", k=4, low=1, high=4, max_len=4096)
    for form in ("torch", "interpret"):
        assert propose(requests, form, k=4, low=1, high=4, max_len=4096) == expected
    assert any(expected)


@pytest.mark.parametrize("sizes", [(0, 1, 1), (2, 1, 1), (1, 1, 0)])
def test_bad_sizes(sizes: tuple[int, int, int]) -> None:
    low, high, k = sizes
    with pytest.raises(ValueError, match=f"min_ngram={low}, max_ngram={high}, num_drafts={k}: 1 <= min_ngram <= max"):
        propose([TOKENS], "torch", k=k, low=low, high=high)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_torch_form_never_waits(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, table, total = (torch.ones(shape, dtype=torch.int32, device=device) for shape in ((2,), (3, 9), (3,)))
    with monkeypatch.context() as patch, NoHostWait(device):
        forbid_waits(patch)
        propose_ngram(rows, table, total, num_drafts=2, min_ngram=1, max_ngram=3, form="torch")


def test_compiles(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    types, constexprs = (I32, I32, "i32", "i32", I32, "i32", I64, "i32"), {"MIN_NGRAM": 2, "MAX_NGRAM": 4}
    compiles_for_hopper(
        "ngram", "_propose_ngram_kernel", types, {**constexprs, "DRAFTS": 4, "BLOCK": 1024}, tmp_path_factory,
        monkeypatch,
    )  # fmt: skip


@pytest.mark.gpu
def test_compiled_kernel() -> None:
    generator = torch.Generator().manual_seed(0)
    table, total = torch.randint(0, 20, (40, 5000), generator=generator).int(), torch.arange(40).int() * 125 + 1
    sizes = {"num_drafts": 5, "min_ngram": 2, "max_ngram": 4}
    expected = propose_ngram(torch.arange(40).int(), table, total, **sizes, form="torch")
    got = propose_ngram(torch.arange(40).int().cuda(), table.cuda(), total.cuda(), **sizes, form="triton")
    assert torch.equal(got.cpu(), expected)
