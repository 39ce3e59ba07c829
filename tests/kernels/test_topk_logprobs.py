"""Kernels 19 and 20: logprobs of the chosen and the best tokens, ranks, and what a prompt's logprobs are of."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kernels
from kernels.topk_logprobs import _topk
from tests.kernels.batches import random_batch

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
ALL_FORMS = ("loop", "torch", "interpret")
NEG_INF = float("-inf")


@given(
    seed=st.integers(0, 2**31),
    vocab=st.sampled_from([1, 2, 100, 4096, 4097, 1300]),
    rows=st.integers(0, 4),
    k=st.sampled_from([0, 1, 5, 10**6]),
    scale=st.sampled_from([0.1, 3.0, 1e4]),
)
@settings(max_examples=20)
def test_topk_logprobs(seed: int, vocab: int, rows: int, k: int, scale: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocab, generator=generator) * scale
    logits[torch.rand(rows, vocab, generator=generator) < 0.2] = NEG_INF
    tokens = torch.randint(0, vocab, (rows,), generator=generator)
    logits[torch.arange(rows), tokens] = torch.randn(rows, generator=generator)
    right = logits.double().log_softmax(-1)
    for form in ALL_FORMS:
        ids, logprobs, ranks = kernels.topk_logprobs(logits, tokens, k, form=form)
        assert ids.shape == logprobs.shape == (rows, 1 + min(k, vocab))
        assert (ids.dtype, logprobs.dtype, ranks.dtype) == (torch.int64, torch.float32, torch.int64)
        assert torch.equal(ids[:, 0], tokens)
        torch.testing.assert_close(logprobs.double(), right.gather(1, ids), rtol=1e-5, atol=2e-6 * max(scale, 1.0))
        best = logits.sort(dim=-1, descending=True).values[:, : min(k, vocab)]
        assert torch.equal(logits.gather(1, ids[:, 1:]), best), "not the best, or not best first"
        assert all(len(set(row)) == len(row) for row in ids[:, 1:].tolist())
        assert ranks.tolist() == [int((row >= row[t]).sum()) for row, t in zip(logits, tokens, strict=True)]


@pytest.mark.parametrize("form", ALL_FORMS)
def test_ranks_count_ties_and_columns_follow_the_order(form: str) -> None:
    ids, _, ranks = kernels.topk_logprobs(torch.tensor([[9.0, 8, 7, 6]] * 4), torch.arange(4), 3, form=form)
    assert ranks.tolist() == [1, 2, 3, 4] and ids[3].tolist() == [3, 0, 1, 2]
    ties = torch.tensor([[5.0, 5, 3]] * 3)
    assert kernels.topk_logprobs(ties, torch.arange(3), 0, form=form)[2].tolist() == [2, 2, 3]


@given(
    seed=st.integers(0, 2**31),
    vocab=st.sampled_from([5120, 5121, 6143]),
    k=st.integers(1, 5),
    levels=st.sampled_from([1, 2, 5, 10**6]),
    wider=st.booleans(),
)
@settings(max_examples=60)
def test_the_best_are_found_by_tiles(seed: int, vocab: int, k: int, levels: int, wider: bool) -> None:
    """With ties across tiles, a row that is no whole number of tiles, rows of a wider table, -inf in whole tiles."""
    generator = torch.Generator().manual_seed(seed)
    table = torch.randint(0, levels, (4, vocab + 40), generator=generator).float()
    logits = table[:, :vocab] if wider else table[:, :vocab].contiguous()
    logits[1, : vocab // 2] = NEG_INF
    logits[2, 3:] = NEG_INF
    logits[3, :-3] = NEG_INF
    if wider:
        table[:, vocab:] = 1e30
    best, ids = _topk(logits, k)
    assert 8 * k <= vocab // 128, "not by tiles"
    assert torch.equal(best, logits.topk(k, dim=-1).values)
    assert torch.equal(logits.gather(1, ids), best)
    assert all(len(set(row)) == k for row in ids.tolist())


@pytest.mark.parametrize("form", ["torch", "interpret"])
def test_a_maximum_that_comes_late_and_one_that_comes_early(form: str) -> None:
    """Over several blocks: what was summed before a larger logit has to be scaled down, what comes after is small."""
    rising = torch.linspace(-20, 20, 13_000)
    logits = torch.stack([rising, rising.flip(0), torch.cat([rising[::2], rising[1::2]])])
    tokens = torch.tensor([12_999, 5000, 3])
    _, logprobs, ranks = kernels.topk_logprobs(logits, tokens, 1, form=form)
    right = logits.double().log_softmax(-1).gather(1, tokens.unsqueeze(1))
    torch.testing.assert_close(logprobs[:, :1].double(), right, rtol=1e-5, atol=1e-5)
    assert ranks.tolist() == [1, 5001, int((logits[2] >= logits[2, 3]).sum())]


@pytest.mark.parametrize("form", ALL_FORMS)
def test_a_row_of_minus_infinity_but_one(form: str) -> None:
    logits = torch.full((1, 5000), NEG_INF)
    logits[0, 4999] = -1e30
    _, logprobs, ranks = kernels.topk_logprobs(logits, torch.tensor([4999]), 2, form=form)
    assert logprobs.tolist() == [[0.0, 0.0, NEG_INF]] and ranks.tolist() == [1]


def test_a_negative_k_says_what_to_give() -> None:
    with pytest.raises(ValueError, match="k must be 0 or more, got -1: for all tokens give the vocabulary's size, 7"):
        kernels.topk_logprobs(torch.zeros(1, 7), torch.tensor([0]), -1)


def test_no_log_softmax_is_made() -> None:
    """The scratch of the torch form is a fraction of the logits."""
    from tests.kernels.live_bytes import LiveBytes

    logits, tokens = torch.randn(256, 20_000), torch.zeros(512, dtype=torch.int64)
    with LiveBytes() as live:
        kernels.topk_logprobs(logits, tokens, 5, form="torch")
    assert 0 < live.peak < logits.nbytes / 4


@given(seed=st.integers(0, 2**31), num_reqs=st.integers(0, 6))
@settings(max_examples=20)
def test_prompt_logprobs_token_ids(seed: int, num_reqs: int) -> None:
    batch = random_batch(seed, num_reqs=num_reqs)
    starts, size = batch["query_start_loc"], int(batch["query_start_loc"][-1]) + 3
    expected = [0] * size
    for i, row in enumerate(batch["idx_mapping"].tolist()):
        for at in range(int(starts[i]), int(starts[i + 1])):
            position = int(batch["num_computed_tokens"][row]) + at - int(starts[i])
            expected[at] = int(batch["all_token_ids"][row, min(position + 1, 63)])
    for form in ALL_FORMS:
        got = kernels.prompt_logprobs_token_ids(
            batch["idx_mapping"], starts, batch["all_token_ids"], batch["num_computed_tokens"], size, form=form
        )
        assert got.dtype == torch.int64 and got.tolist() == expected, form
