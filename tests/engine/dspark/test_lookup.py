"""The weightless draft: the device form against the loop, and what each rule means on small texts."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.dspark.decoder import LookupDecoder
from engine.dspark.lookup import lookup_drafts, lookup_loop
from engine.spec_decode import NO_DRAFT
from tests.kernels.test_no_host_wait import NoHostWait, forbid_waits


def device_form(texts: list[list[int]], k: int, **kwargs: int) -> list[list[int]]:
    """Rows in reverse order, with garbage behind every request's end."""
    r, longest = len(texts), max(map(len, texts), default=0) + 5
    table = torch.full((r + 1, longest), 1, dtype=torch.int32)
    lengths = torch.zeros(r + 1, dtype=torch.int32)
    rows = torch.arange(r - 1, -1, -1, dtype=torch.int32)
    for row, text in zip(rows.tolist(), texts, strict=True):
        table[row, : len(text)] = torch.tensor(text, dtype=torch.int32)
        lengths[row] = len(text)
    return lookup_drafts(table, rows, lengths, k, **kwargs).tolist()


@given(
    texts=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=40), min_size=1, max_size=4),
    k=st.integers(1, 7),
    min_ngram=st.integers(1, 3),
    more=st.integers(0, 3),
    window=st.integers(7, 50),
)
@settings(deadline=None, max_examples=300)
def test_forms_agree(texts: list[list[int]], k: int, min_ngram: int, more: int, window: int) -> None:
    sizes = {"min_ngram": min_ngram, "max_ngram": min_ngram + more, "window": window}
    assert device_form(texts, k, **sizes) == [lookup_loop(text, k, **sizes) for text in texts]


@pytest.mark.parametrize("form", [device_form, lambda texts, k, **kwargs: [lookup_loop(t, k, **kwargs) for t in texts]])
@pytest.mark.parametrize(
    ("text", "sizes", "expected"),
    [
        ([1, 2, 3, 9, 8, 7, 1, 2, 3], {}, [9, 8, 7]),
        # The longest agreement wins over a later, shorter one.
        ([5, 1, 2, 7, 0, 1, 2, 8, 5, 1, 2], {}, [7, 0, 1]),
        # The latest on a tie.
        ([1, 2, 7, 4, 1, 2, 8, 5, 1, 2], {}, [8, 5, 1]),
        # A period goes on.
        ([6, 4, 5, 4, 5], {}, [4, 5, 4]),
        ([6, 3, 3, 3], {}, [3, 3, 3]),
        ([1, 2, 3, 4], {}, [NO_DRAFT] * 3),
        ([1, 2, 3, 1], {}, [NO_DRAFT] * 3),
        ([1, 2, 3, 1], {"min_ngram": 1}, [2, 3, 1]),
        ([1], {"min_ngram": 1}, [NO_DRAFT] * 3),
        # Too far back.
        ([1, 2, 9, 0, 0, 5, 6, 7, 1, 2], {"window": 8}, [NO_DRAFT] * 3),
    ],
)
def test_by_hand(form: object, text: list[int], sizes: dict[str, int], expected: list[int]) -> None:
    assert callable(form)
    assert form([text], 3, **sizes) == [expected]


def test_padding_and_empty_rows_propose_nothing() -> None:
    table = torch.tensor([[1, 2, 1, 2, 1, 2], [3, 4, 3, 4, 3, 4]], dtype=torch.int32)
    rows, lengths = torch.tensor([-1, 1, 0], dtype=torch.int32), torch.tensor([0, 6], dtype=torch.int32)
    assert lookup_drafts(table, rows, lengths, 2).tolist() == [[-1, -1], [3, 4], [-1, -1]]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [({"min_ngram": 0}, "1 <= min <= max"), ({"min_ngram": 5}, "1 <= min <= max"), ({"window": 4}, "can't hold")],
)
def test_numbers_that_make_no_sense(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        lookup_loop([1, 2, 3], 2, **sizes)
    with pytest.raises(ValueError, match=message):
        device_form([[1, 2, 3]], 2, **sizes)
    with pytest.raises(ValueError, match="at least 1, got 0"):
        lookup_loop([1], 0)


def test_no_host_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    table, rows = torch.randint(0, 3, (3, 50)).int(), torch.tensor([2, 0, -1], dtype=torch.int32)
    lengths = torch.tensor([50, 0, 20], dtype=torch.int32)
    with monkeypatch.context() as patch, NoHostWait("cpu"):
        forbid_waits(patch)
        lookup_drafts(table, rows, lengths, 4)


@pytest.mark.slow
def test_the_draft_without_weights() -> None:
    """Rows by idx_mapping; nothing in a prompt, nothing past the model's length."""
    tokens = torch.zeros(4, 12, dtype=torch.int32)
    tokens[2, :7] = torch.tensor([1, 2, 3, 9, 1, 2, 3])
    tokens[0, :6] = torch.tensor([4, 5, 4, 5, 4, 5])
    tokens[3, :11] = torch.tensor([6, 7, 8, 6, 7, 8, 6, 7, 8, 6, 7])
    step = SimpleNamespace(
        idx_mapping=torch.tensor([2, 0, 3], dtype=torch.int32),
        num_sampled=torch.tensor([1, 0, 2], dtype=torch.int32),
        rows=SimpleNamespace(all_token_ids=tokens, total_len=torch.tensor([6, 0, 7, 11], dtype=torch.int32)),
    )
    decoder = LookupDecoder(3, max_model_len=12)
    assert decoder.propose(step).tolist() == [[9, 1, 2], [-1, -1, -1], [8, -1, -1]]  # type: ignore[arg-type]
    assert decoder.draft_logits is None and decoder.kv_bytes_per_token() == 0
    with pytest.raises(ValueError, match="at least 1, got 0"):
        LookupDecoder(0, 12)
