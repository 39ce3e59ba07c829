"""A few tokens as decodes: every form says what the loop says."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.token_rows import token_rows


@given(
    lengths=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 40)), min_size=1, max_size=80),
    pad=st.integers(0, 3),
    width=st.sampled_from((1, 3, 1100)),
)
@settings(max_examples=30, deadline=None)
def test_the_forms_agree(lengths: list[tuple[int, int]], pad: int, width: int) -> None:
    """Requests of no token too, more than are looked at together, and rows longer than a read."""
    lengths = lengths[: 80 if width == 1 else 6]
    starts = torch.tensor([0, *(n for n, _ in lengths)], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    seq_lens = torch.tensor([n + before for n, before in lengths], dtype=torch.int32)
    table = torch.arange(len(lengths) * (width + 2), dtype=torch.int32).view(len(lengths), -1)[:, :width]
    num_tokens = int(starts[-1]) + pad
    expected = token_rows(starts, seq_lens, table, num_tokens, form="loop")
    assert not expected[1][num_tokens - pad :].any()
    for form in ("torch", "interpret"):
        rows, seen = token_rows(starts, seq_lens, table, num_tokens, form=form)
        assert torch.equal(rows, expected[0]) and torch.equal(seen, expected[1]) and seen.dtype == torch.int32, form


def test_the_last_token_sees_all_the_one_before_one_fewer() -> None:
    starts, seq_lens = torch.tensor([0, 3, 4], dtype=torch.int32), torch.tensor([9, 5], dtype=torch.int32)
    table = torch.tensor([[7, 8], [1, 2]], dtype=torch.int32)
    rows, seen = token_rows(starts, seq_lens, table, 5)
    assert seen.tolist() == [7, 8, 9, 5, 0]
    assert rows.tolist() == [[7, 8], [7, 8], [7, 8], [1, 2], [1, 2]]
    with pytest.raises(ValueError, match="seq_lens needs at least 1 row"):
        token_rows(starts[:1], seq_lens[:0], table[:0], 2)


@pytest.mark.gpu
def test_compiled() -> None:
    starts = torch.tensor([0, 8, 9, 9, 17], dtype=torch.int32)
    seq_lens, table = torch.tensor([50, 3, 7, 900], dtype=torch.int32), torch.arange(4 * 64).view(4, 64).int()
    expected = token_rows(starts, seq_lens, table, 20, form="loop")
    got = token_rows(starts.cuda(), seq_lens.cuda(), table.cuda(), 20, form="triton")
    assert all(torch.equal(a.cpu(), b) for a, b in zip(got, expected, strict=True))
