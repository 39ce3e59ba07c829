"""The end of a captured step in one launch: as its parts, and its output in two places by turns."""

from collections.abc import Iterable

import pytest
import torch

from kernels import (
    OutputPlaces,
    Race,
    SampledStep,
    StateRows,
    finish_step,
    get_num_sampled_and_rejected,
    post_update,
)

pytestmark = pytest.mark.slow  # interpreted kernels

FORMS = ("torch", "loop", "interpret")
ROWS, LENGTH = 9, 12


def i32(high: int, *shape: int, low: int = 0) -> torch.Tensor:
    return torch.randint(low, high, shape).int()


def a_step(num_reqs: int, width: int, with_counts: bool = True) -> tuple[SampledStep, StateRows]:
    """Requests inside their prompts and decodes, of which the last is at the end of its row, and two of padding."""
    idx = torch.cat((torch.randperm(ROWS - 1)[: num_reqs - 2], torch.full((2,), ROWS - 1))).int()
    starts = torch.cat((i32(width + 3, num_reqs - 2, low=width), torch.zeros(2, dtype=torch.int32)))
    logits = i32(width + 1, num_reqs, low=1)
    query_start_loc, cu_num_logits = (torch.cat((x.new_zeros(1), x.cumsum(0))).int() for x in (starts, logits))
    seq_lens = i32(9, num_reqs)
    seq_lens[-2:] = 0
    num_sampled = torch.minimum(i32(width + 1, num_reqs, low=1), logits)
    step = SampledStep(
        idx, query_start_loc, seq_lens, cu_num_logits, torch.randint(0, 99, (num_reqs, width)),
        num_sampled if with_counts else None,
    )  # fmt: skip
    total_len = i32(LENGTH - width, ROWS)
    total_len[idx[-3]] = LENGTH - 1
    return step, StateRows(
        i32(9, ROWS), torch.randint(0, 99, (ROWS, 1)), total_len, i32(99, ROWS, LENGTH), i32(6, ROWS, low=1)
    )


def some_places(num_reqs: int, width: int, num_confidences: int = 0) -> OutputPlaces:
    n = num_confidences
    of_rows = (torch.zeros(2, num_reqs, n), torch.rand(ROWS, n)) if n else ()
    words = torch.full((2, num_reqs * width + 9), -7)
    sampled = words[:, : num_reqs * width].unflatten(1, (num_reqs, width))
    counts = words[:, num_reqs * width :].view(torch.int32)[:, :num_reqs]
    return OutputPlaces(torch.zeros(2, dtype=torch.int32), sampled, counts, *of_rows)


def copied(values: Iterable) -> list:
    return [value.clone() if isinstance(value, torch.Tensor) else value for value in values]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("width", "num_confidences"), [(1, 0), (4, 0), (8, 7)])
def test_as_kernels_9_and_10(width: int, num_confidences: int, form: str) -> None:
    torch.manual_seed(width)
    step, rows = a_step(7, width, with_counts=width > 1)
    places = some_places(7, width, num_confidences)
    expected = StateRows(*copied(rows))
    counts = torch.ones(7, dtype=torch.int32) if step.num_sampled is None else step.num_sampled.clone()
    idx, starts, seq_lens, cu, sampled, *_ = step
    rejected = get_num_sampled_and_rejected(counts, seq_lens, cu, idx, expected.prefill_len, form="loop")
    post_update(idx, *expected[:4], sampled, counts, rejected, starts, form="loop")

    out = finish_step(SampledStep(*copied(step)), rows, places, form=form)
    assert torch.equal(out[0], counts) and torch.equal(out[1], rejected) and 0 in counts
    for got, wanted, name in zip(rows, expected, StateRows._fields, strict=True):
        assert torch.equal(got, wanted), name
    assert torch.equal(places.sampled[0], sampled) and (places.sampled[1] == -7).all()
    assert torch.equal(places.num_sampled[0], counts) and places.turn.tolist() == [1, 0]
    if places.confidences is not None and places.confidence_rows is not None:
        assert torch.equal(places.confidences[0], places.confidence_rows[idx.long()])
        assert not places.confidences[1].any()


@pytest.mark.parametrize("form", FORMS)
def test_the_race_for_the_last_token_ends_here(form: str) -> None:
    torch.manual_seed(5)
    step, rows = a_step(6, 4)
    tile_max = torch.randint(0, 3, (6, 5)).float()
    tile_max[1] = float("-inf")
    tile_argmax = torch.arange(5).flip(0) * 100 + torch.arange(6).unsqueeze(1)
    assert step.num_sampled is not None
    expected = step.sampled.clone()
    for i, (maxima, tokens) in enumerate(zip(tile_max.tolist(), tile_argmax.tolist(), strict=True)):
        best = [token for value, token in zip(maxima, tokens, strict=True) if value == max(maxima)]
        expected[i, step.num_sampled[i] - 1] = min(best)
    places = some_places(6, 4)
    finish_step(step._replace(race=Race(tile_max, tile_argmax)), rows, places, form=form)
    assert torch.equal(places.sampled[0], expected)
    drawn = places.num_sampled[0] > 0
    last = expected.gather(1, (places.num_sampled[0].long() - 1).clamp(min=0).unsqueeze(1))
    assert torch.equal(rows.last_sampled_tokens[step.idx_mapping.long()][drawn], last[drawn]) and drawn.any()


@pytest.mark.parametrize("form", FORMS)
def test_the_places_take_turns(form: str) -> None:
    torch.manual_seed(0)
    places = some_places(5, 2)
    steps = [a_step(5, 2) for _ in range(4)]
    for number, (step, rows) in enumerate(steps):
        finish_step(step, rows, places, form=form)
        assert places.turn.tolist() == [(number + 1) % 2, 0]
        assert torch.equal(places.sampled[number % 2], step.sampled)
        assert number == 0 or torch.equal(places.sampled[(number + 1) % 2], steps[number - 1][0].sampled)


def test_a_place_of_another_size_is_refused() -> None:
    step, rows = a_step(5, 2)
    with pytest.raises(ValueError, match="a place must be of 5 adjacent rows of 2"):
        finish_step(step, rows, some_places(5, 3))


@pytest.mark.gpu
def test_compiled() -> None:
    """Three steps, so that both places have been written and the turn has come back."""
    torch.manual_seed(3)
    results = []
    steps = [a_step(7, 4) for _ in range(3)]
    race = Race(torch.randn(7, 48), torch.randint(0, 99, (7, 48)))
    confidences = torch.rand(ROWS, 3)
    for device, form in (("cpu", "loop"), ("cuda", "triton")):
        turn = torch.zeros(2, dtype=torch.int32, device=device)
        words = torch.full((2, 40), -7, device=device)
        sampled = words[:, :28].unflatten(1, (7, 4))
        counts = words[:, 28:].view(torch.int32)[:, :7]
        places = OutputPlaces(turn, sampled, counts, torch.zeros(2, 7, 3, device=device), confidences.to(device))
        for step, rows in steps:
            own = SampledStep(*(x.to(device) for x in copied(step[:6])), Race(*(x.to(device) for x in race)))
            table = StateRows(*(x.to(device) for x in copied(rows)))
            seen = [*finish_step(own, table, places, form=form), *table, *places]
        results.append([x.cpu() for x in seen])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
