"""Kernel 1: ragged slices land where they were staged, whatever their length and dtype."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import apply_write

ALL_FORMS = ("loop", "torch", "interpret")


def stage(writes: list[tuple[int, int, list[int]]], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    rows, starts, values = ([write[part] for write in writes] for part in range(3))
    lengths = torch.tensor([0, *map(len, values)], dtype=torch.int32)
    return (
        torch.tensor(rows, dtype=torch.int32),
        torch.tensor(starts, dtype=torch.int32),
        lengths.cumsum(0, dtype=torch.int32),
        torch.tensor([v for vs in values for v in vs], dtype=dtype),
    )


@st.composite
def distinct_writes(draw: st.DrawFn) -> list[tuple[int, int, list[int]]]:
    """Zero to three slices a row of 12 columns, in any order, none overlapping another."""
    writes = []
    for row in range(4):
        cuts = sorted(draw(st.lists(st.integers(0, 12), max_size=6)))
        for begin, end in zip(cuts[::2], cuts[1::2], strict=False):
            values = draw(st.lists(st.integers(1, 100), min_size=end - begin, max_size=end - begin))
            writes.append((row, begin, values))
    return draw(st.permutations(writes))


@given(writes=distinct_writes(), dtype=st.sampled_from([torch.int32, torch.int64, torch.float32, torch.float16]))
@settings(max_examples=30)
def test_ragged_slices(writes: list[tuple[int, int, list[int]]], dtype: torch.dtype) -> None:
    expected = torch.zeros(4, 12, dtype=dtype)
    for row, start, values in writes:
        expected[row, start : start + len(values)] = torch.tensor(values, dtype=dtype)
    for form in ALL_FORMS:
        target = torch.zeros(4, 12, dtype=dtype)
        apply_write(target, *stage(writes, dtype), form=form)
        assert torch.equal(target, expected), form


@pytest.mark.parametrize("form", ALL_FORMS)
def test_a_slice_longer_than_a_block_in_a_strided_target(form: str) -> None:
    table = torch.zeros(3, 4000, dtype=torch.int32)
    target, values = table[:, :3000], torch.arange(2500, dtype=torch.int32)
    rows, starts = torch.tensor([2, 0], dtype=torch.int32), torch.tensor([450, 1], dtype=torch.int32)
    apply_write(target, rows, starts, torch.tensor([0, 2499, 2500], dtype=torch.int32), values, form=form)
    assert torch.equal(target[2, 450:2949], values[:2499]) and target[0, 1] == 2499
    assert table.count_nonzero() == 2499  # value 0 of the first slice is no non-zero


@pytest.mark.parametrize("form", ALL_FORMS)
def test_a_vector_counts_as_one_column(form: str) -> None:
    target = torch.arange(5, dtype=torch.float32)
    apply_write(target, *stage([(3, 0, [30]), (0, 0, [7])], torch.float32), form=form)
    assert target.tolist() == [7, 1, 2, 30, 4]


@pytest.mark.parametrize("form", ALL_FORMS)
def test_nothing_staged(form: str) -> None:
    target = torch.ones(2, 3, dtype=torch.int32)
    apply_write(target, *stage([], torch.int32), form=form)
    assert (target == 1).all()


@pytest.mark.parametrize(
    ("writes", "message"),
    [
        ([(1, 0, [1, 2]), (1, 1, [3])], r"write 1 covers \(row, column\) \(1, 1\) that an earlier write covers too"),
        ([(2, 0, [1])], r"write 0 covers row 2, columns 0..0: outside of a target of shape \(2, 3\)"),
        ([(0, 2, [1, 2])], "columns 2..3: outside"),
    ],
)
def test_the_loop_form_refuses_overlaps_and_overruns(writes: list[tuple[int, int, list[int]]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        apply_write(torch.zeros(2, 3, dtype=torch.int32), *stage(writes, torch.int32), form="loop")


def test_contents_of_another_dtype_are_refused() -> None:
    with pytest.raises(ValueError, match=r"contents must have dtype torch.int32, got torch.int64"):
        apply_write(torch.zeros(2, 3, dtype=torch.int32), *stage([(0, 0, [1])], torch.int64))
