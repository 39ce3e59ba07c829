"""The vectorised forms do what the loop form says, on random batches and past every block size."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kernels
from tests.kernels.batches import NEVER_WRITTEN, random_batch, run_step

FAST_FORMS = ("torch", "interpret")


def i32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@given(seed=st.integers(0, 2**31), num_reqs=st.integers(0, 6), num_drafts=st.integers(0, 4))
@settings(max_examples=25)
def test_a_whole_step(seed: int, num_reqs: int, num_drafts: int) -> None:
    batch = random_batch(seed, num_reqs=num_reqs, num_drafts=num_drafts)
    expected = run_step(batch, "loop")
    for form in FAST_FORMS:
        out = run_step(batch, form)
        for name, value in expected.items():
            assert torch.equal(out[name], value), f"{form}: {name}"


@given(seed=st.integers(0, 2**31), num_reqs=st.integers(0, 24), num_drafts=st.integers(0, 9))
@settings(max_examples=40)
def test_a_whole_step_of_many_requests_in_torch(seed: int, num_reqs: int, num_drafts: int) -> None:
    batch = random_batch(seed, num_reqs=num_reqs, max_reqs=24, num_drafts=num_drafts)
    expected, out = run_step(batch, "loop", num_tokens=1024), run_step(batch, "torch", num_tokens=1024)
    for name, value in expected.items():
        assert torch.equal(out[name], value), name


@pytest.mark.parametrize("form", FAST_FORMS)
def test_prefill_longer_than_a_block(form: str) -> None:
    def prepare(form: str) -> tuple[torch.Tensor, ...]:
        tokens = torch.arange(2 * 3000, dtype=torch.int32).view(2, 3000)
        idx, starts, computed = i32(1, 0), i32(0, 2500, 2501), i32(2999, 7)
        ids, following = torch.zeros(3000, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
        positions, seq_lens = torch.zeros(3000, dtype=torch.int64), torch.full((1500,), 9, dtype=torch.int32)
        table, slots = torch.arange(2 * 188).view(2, 188).int(), torch.zeros(4600, dtype=torch.int64)
        kernels.prepare_prefill_inputs(ids, following, idx, starts, tokens, i32(3000, 2600), computed, form=form)
        kernels.prepare_pos_seq_lens(idx, starts, computed, positions, seq_lens, form=form)
        padded = torch.cat([positions, torch.full((1600,), 10**6)])  # stale positions past the tokens of the step
        kernels.compute_slot_mappings(idx, starts, padded, table, 16, slots, 4500, form=form)
        return ids, following, positions, seq_lens, slots

    for got, expected in zip(prepare(form), prepare("loop"), strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("form", ["loop", *FAST_FORMS])
def test_gathering_and_zeroing_rows_wider_than_a_block(form: str) -> None:
    table = torch.arange(3 * 1500, dtype=torch.int32).view(3, 1500)
    out = torch.full((4, 1500), NEVER_WRITTEN, dtype=torch.int32)
    kernels.gather_block_tables(i32(2, 0), table, i32(1, 0, 1400), out, 3, form=form)
    assert torch.equal(out[0, :1400], table[2, :1400]) and (out[0, 1400:] == NEVER_WRITTEN).all()
    assert out[1, 0] == 0 and (out[1, 1:] == NEVER_WRITTEN).all()
    assert (out[2] == 0).all() and (out[3] == NEVER_WRITTEN).all()


@pytest.mark.parametrize("form", ["loop", *FAST_FORMS])
def test_more_logits_rows_than_a_block(form: str) -> None:
    idx, cu = i32(1, 0), i32(0, 40, 41)
    rows, local = kernels.expand_idx_mapping(idx, 41, cu, form=form)
    assert rows.tolist() == [1] * 40 + [0] and local.tolist() == [*range(40), 0]
    ids, drafts = torch.zeros(60, dtype=torch.int32), torch.arange(200, 278).view(2, 39)
    slots = kernels.combine_sampled_and_draft_tokens(
        ids, idx, torch.tensor([[7], [8]]), i32(0, 40, 41), i32(60, 6), i32(5, 20), drafts, cu, 41, form=form
    )
    assert slots.tolist() == list(range(41))
    assert ids.tolist() == [8, *range(239, 278), 7, *[0] * 19]


@pytest.mark.parametrize("form", ["loop", *FAST_FORMS])
def test_combining_leaves_prompt_tokens_alone(form: str) -> None:
    # Rows: within the prompt; the last chunk; the last-sampled slot still a prompt token; the first decode.
    seq_lens, prefill_len = i32(5, 8, 9, 9), i32(8, 8, 8, 8)
    cu, starts = i32(0, 1, 3, 5, 6), i32(0, 2, 4, 6, 7)
    ids = torch.full((8,), NEVER_WRITTEN, dtype=torch.int32)
    slots = kernels.combine_sampled_and_draft_tokens(
        ids,
        i32(0, 1, 2, 3),
        torch.tensor([[10], [11], [12], [13]]),
        starts,
        seq_lens,
        prefill_len,
        torch.tensor([[20], [21], [22], [23]]),
        cu,
        6,
        form=form,
    )
    assert slots.tolist() == [1, 2, 3, 4, 5, 6]
    assert ids.tolist() == [-7, -7, -7, -7, -7, 22, 13, -7]


@pytest.mark.parametrize("form", FAST_FORMS)
def test_counts_of_more_requests_than_a_block(form: str) -> None:
    g = torch.Generator().manual_seed(1)
    sampled = torch.randint(1, 4, (300,), generator=g).int()
    seq_lens, prefill_len = (torch.randint(1, 5, (300,), generator=g).int() for _ in range(2))
    idx, cu = torch.randperm(300, generator=g).int(), (torch.arange(301) * 4).int()
    expected_sampled, got_sampled = sampled.clone(), sampled.clone()
    expected = kernels.get_num_sampled_and_rejected(expected_sampled, seq_lens, cu, idx, prefill_len, form="loop")
    got = kernels.get_num_sampled_and_rejected(got_sampled, seq_lens, cu, idx, prefill_len, form=form)
    assert torch.equal(got, expected) and torch.equal(got_sampled, expected_sampled)
    assert 0 in got_sampled and 3 in got_sampled


@pytest.mark.parametrize("form", ["loop", *FAST_FORMS])
def test_padding_slots_are_written_from_the_actual_token_count(form: str) -> None:
    """T8: three decodes padded to a graph of four; what the last step left in the fourth slot must not survive."""
    slots = torch.tensor([3, 3, 3, 3, 3])
    kernels.compute_slot_mappings(
        i32(2, 0, 1),
        i32(0, 1, 2, 3),
        torch.tensor([5, 0, 9, 8]),
        i32(4, -1, 6, 7, 8, 9).view(3, 2),
        8,
        slots,
        4,
        form=form,
    )
    assert slots.tolist() == [8 * 8 + 5, 4 * 8 + 0, 7 * 8 + 1, kernels.PAD_SLOT_ID, 3]


@pytest.mark.parametrize("with_counts", [True, False])
@pytest.mark.parametrize("form", ["loop", *FAST_FORMS])
def test_post_update_skips_repeats_and_stops_at_the_last_column(form: str, with_counts: bool) -> None:
    state = {"computed": i32(3, 5, 7), "total": i32(4, 6, 5)}
    last, tokens = torch.tensor([[100], [101], [102]]), torch.zeros(3, 7, dtype=torch.int32)
    counts = torch.zeros(3, 50, dtype=torch.int32) if with_counts else None
    garbage = 2**40
    # Batch: a skipped request that shares row 0 once clamped, row 0, row 1 at the end of its columns.
    kernels.post_update(
        i32(-1, 0, 1),
        state["computed"],
        last,
        state["total"],
        tokens,
        torch.tensor([[1, 2, 3], [9, 9, garbage], [40, 41, 42]]),
        i32(3, 2, 3),
        i32(0, 1, 0),
        i32(0, 3, 6, 9),
        counts,
        form=form,
    )
    assert last.flatten().tolist() == [9, 42, 102]
    assert state["computed"].tolist() == [3 + 3 - 1, 5 + 3, 7] and state["total"].tolist() == [6, 9, 5]
    assert tokens.tolist() == [[0, 0, 0, 0, 9, 9, 0], [0, 0, 0, 0, 0, 0, 40], [0] * 7]
    if counts is not None:
        assert counts.nonzero().tolist() == [[0, 9], [1, 40], [1, 41], [1, 42]]
        assert counts[0, 9] == 2


@pytest.mark.parametrize("form", ["loop", *FAST_FORMS])
def test_a_request_that_sampled_nothing_keeps_its_last_token(form: str) -> None:
    computed, total, last = i32(2), i32(8), torch.tensor([[77]])
    tokens = torch.zeros(1, 10, dtype=torch.int32)
    kernels.post_update(
        i32(0), computed, last, total, tokens, torch.tensor([[5]]), i32(0), i32(0), i32(0, 3), form=form
    )
    assert (int(computed), int(total), int(last)) == (5, 8, 77) and not tokens.any()


@pytest.mark.parametrize("form", ("loop", *FAST_FORMS))
def test_a_padded_batch_whose_rows_of_logits_are_bounded(form: str) -> None:
    """Two decodes with two and no drafts, a request that isn't there, and rows of logits that are nobody's."""
    input_ids = torch.arange(100, 108, dtype=torch.int32)
    idx, start, cu = i32(1, 0, 2), i32(0, 3, 4, 4), i32(0, 3, 4, 5)
    last, drafts = torch.tensor([[7], [9], [55]]), torch.tensor([[31, 32], [41, 42], [51, 52]])
    indices = kernels.combine_sampled_and_draft_tokens(
        input_ids, idx, last, start, i32(13, 6, 0), i32(2, 5, 0), drafts, cu, 7, form=form
    )
    assert input_ids.tolist() == [9, 41, 42, 7, 104, 105, 106, 107]
    assert indices.tolist() == [0, 1, 2, 3, 3, 0, 0]
    rows, local = kernels.expand_idx_mapping(idx, 7, cu, form=form)
    assert rows.tolist() == [1, 1, 1, 0, 2, -1, -1] and local.tolist() == [0, 1, 2, 0, 0, 0, 0]
