"""Kernels 12, 13, 15, 16 and 22: every form gives what a plain float64 reference gives, drafts and padding included."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kernels
from kernels import BadWordsTables, LogitBiasTables, MaxLengths, PenaltyTables
from tests.kernels.sampling_batches import (
    MAX_WORDS,
    SamplingBatch,
    bad_words_tables,
    bias_tables,
    longest,
    penalty_tables,
    sampling_batch,
)

# The interpreter's NumPy says so where a GPU is silent: -inf minus -inf.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
ALL_FORMS = ("loop", "torch", "interpret")
NEG_INF = float("-inf")
VOCABS = st.sampled_from([1, 5, 31, 32, 33, 100, 4097])
SEEDS = st.integers(0, 2**31)


def i32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def check(batch: SamplingBatch, expected: np.ndarray, run: Callable[[torch.Tensor, str], None]) -> None:
    for form in ALL_FORMS:
        if form == "loop" and batch.logits.shape[1] > 1000:
            continue
        logits = batch.logits.clone()
        run(logits, form)
        assert torch.equal(logits[-1], batch.logits[-1]), f"{form}: padding was changed"
        np.testing.assert_allclose(logits[:-1].double().numpy(), expected[:-1], rtol=1e-6, atol=1e-5, err_msg=form)


@given(seed=SEEDS, vocab=VOCABS, num_reqs=st.integers(0, 6), max_drafts=st.integers(0, 3))
@settings(max_examples=15)
def test_logit_bias(seed: int, vocab: int, num_reqs: int, max_drafts: int) -> None:
    batch = sampling_batch(seed, vocab=vocab, num_reqs=num_reqs, max_drafts=max_drafts)
    t = bias_tables(seed, vocab=vocab)
    expected = batch.logits.double().numpy()
    for i, row in enumerate(batch.expanded_idx_mapping.tolist()[:-1]):
        allowed = set(t.allowed_ids[row, : t.num_allowed[row]].tolist())
        for token in range(vocab):
            if allowed and token not in allowed:
                expected[i, token] = NEG_INF
        for b in range(int(t.num_biases[row])):
            expected[i, t.bias_ids[row, b]] += t.biases[row, b]
        for token in t.stop_ids[row, : t.num_stop_ids[row]].tolist():
            if batch.positions[i] < t.min_len[row] and token < vocab:
                expected[i, token] = NEG_INF
    check(
        batch,
        expected,
        lambda logits, form: kernels.apply_logit_bias(
            logits, batch.expanded_idx_mapping, batch.positions, t, max_lengths=longest(t), form=form
        ),
    )


@pytest.mark.parametrize("form", ALL_FORMS)
def test_the_order_within_logit_bias(form: str) -> None:
    """A bias does not bring a forbidden token back; a stop id is forbidden whatever its bias, up to min_len."""
    tables = LogitBiasTables(
        i32(2), i32(1, 3).view(1, 2), i32(3), i32(0, 1, 3).view(1, 3), torch.tensor([[9.0, 1.0, 2.0]]), i32(1),
        i32(3).view(1, 1), i32(5),
    )  # fmt: skip
    logits = torch.zeros(3, 5)
    kernels.apply_logit_bias(
        logits, i32(0, 0, 0), torch.tensor([4, 5, 6]), tables, max_lengths=MaxLengths(2, 3, 1), form=form
    )
    assert logits.tolist() == [
        [NEG_INF, 1.0, NEG_INF, NEG_INF, NEG_INF],
        *[[NEG_INF, 1.0, NEG_INF, 2.0, NEG_INF]] * 2,
    ]


def penalised(logit: float, in_prompt: bool, count: int, repetition: float, frequency: float, presence: float) -> float:
    if in_prompt or count:
        logit = logit / repetition if logit > 0 else logit * repetition
    return logit - count * frequency - (count > 0) * presence


@given(seed=SEEDS, vocab=VOCABS, num_reqs=st.integers(0, 6), max_drafts=st.integers(0, 3))
@settings(max_examples=15)
def test_penalties(seed: int, vocab: int, num_reqs: int, max_drafts: int) -> None:
    batch = sampling_batch(seed, vocab=vocab, num_reqs=num_reqs, max_drafts=max_drafts)
    t = penalty_tables(seed, vocab=vocab)
    expected = batch.logits.double().numpy()
    for i, row in enumerate(batch.expanded_idx_mapping.tolist()[:-1]):
        words = t.prompt_bin_mask[row].tolist()
        penalties = [float(x[row]) for x in t[:3]]
        for token in range(vocab):
            count = int(t.output_bin_counts[row, token]) + batch.drafts[i].count(token)
            expected[i, token] = penalised(
                expected[i, token], bool(words[token // 32] >> token % 32 & 1), count, *penalties
            )

    def run(logits: torch.Tensor, form: str) -> None:
        kernels.apply_penalties(
            logits, batch.expanded_idx_mapping, batch.expanded_local_pos, batch.token_ids, t,
            max_drafts=max_drafts, form=form,
        )  # fmt: skip

    check(batch, expected, run)


@pytest.mark.parametrize("form", ALL_FORMS)
def test_each_draft_counts_the_drafts_before_it(form: str) -> None:
    """The token two drafts back counts too, one of another request does not, and the last sampled one not twice."""
    tables = PenaltyTables(
        torch.ones(2), torch.ones(2), torch.zeros(2), torch.zeros(2, 1, dtype=torch.int32),
        torch.tensor([[1, 0, 0, 0], [0, 0, 0, 7]], dtype=torch.int32),
    )  # fmt: skip
    logits = torch.zeros(5, 4)
    kernels.apply_penalties(
        logits, i32(0, 0, 0, 1, 1), i32(0, 1, 2, 0, 1), i32(0, 2, 2, 3, 1), tables, max_drafts=2, form=form
    )
    assert logits.neg().tolist() == [[1, 0, 0, 0], [1, 0, 1, 0], [1, 0, 2, 0], [0, 0, 0, 7], [0, 1, 0, 7]]


def test_penalty_tables_of_another_vocabulary_are_refused() -> None:
    tables = penalty_tables(0, vocab=100)
    with pytest.raises(ValueError, match="logits have 99 tokens, output_bin_counts 100"):
        kernels.apply_penalties(torch.zeros(1, 99), i32(0), i32(0), i32(0), tables, max_drafts=0)


@given(seed=SEEDS, vocab=VOCABS, num_reqs=st.integers(0, 6), max_drafts=st.integers(0, 3))
@settings(max_examples=25)
def test_bad_words(seed: int, vocab: int, num_reqs: int, max_drafts: int) -> None:
    batch = sampling_batch(seed, vocab=vocab, num_reqs=num_reqs, max_drafts=max_drafts)
    t = bad_words_tables(seed, vocab=vocab)
    expected = batch.logits.double().numpy()
    for i, row in enumerate(batch.expanded_idx_mapping.tolist()[:-1]):
        output = batch.output_before(i)
        for w in range(int(t.num_words[row])):
            word = t.word_token_ids[row, t.offsets[row, w] : t.offsets[row, w + 1]].tolist()
            if [*output, word[-1]][-len(word) :] == word:
                expected[i, word[-1]] = NEG_INF

    def run(logits: torch.Tensor, form: str) -> None:
        kernels.apply_bad_words(
            logits, batch.expanded_idx_mapping, batch.expanded_local_pos, batch.token_ids, batch.positions,
            batch.all_token_ids, batch.prompt_len, t, max_words=MAX_WORDS, form=form,
        )  # fmt: skip

    check(batch, expected, run)


@pytest.mark.parametrize("form", ALL_FORMS)
def test_bad_words_match_across_the_drafts_but_not_into_the_prompt(form: str) -> None:
    tokens = torch.arange(10, dtype=torch.int32).view(1, 10)
    offsets, ids = i32(0, 3, 5, 6, 6).view(1, 5), i32(8, 9, 2, 5, 3, 1, 0, 0).view(1, 8)
    words = BadWordsTables(i32(3), offsets, ids)
    # Prompt 0 .. 5, output 6 7, drafts 8 9 at rows 1 and 2; then a row whose output is nothing yet, behind a 5.
    logits = torch.zeros(4, 12)
    kernels.apply_bad_words(
        logits, i32(0, 0, 0, 0), i32(0, 1, 2, 0), i32(7, 8, 9, 5), torch.tensor([8, 9, 10, 6]), tokens, i32(6), words,
        max_words=3, form=form,
    )  # fmt: skip
    assert [row.nonzero().flatten().tolist() for row in torch.isinf(logits)] == [[1], [1], [1, 2], [1]]


@pytest.mark.parametrize("form", ALL_FORMS)
def test_a_bad_word_longer_than_a_block(form: str) -> None:
    word = torch.arange(70, dtype=torch.int32)
    words = BadWordsTables(i32(1, 1), i32(0, 70, 0, 70).view(2, 2), word.expand(2, -1).contiguous())
    tokens = torch.zeros(2, 100, dtype=torch.int32)
    tokens[:, 20:89] = word[:69]
    tokens[1, 55] = 3
    logits = torch.zeros(2, 80)
    kernels.apply_bad_words(
        logits, i32(0, 1), i32(0, 0), i32(0, 0), torch.tensor([89, 89]), tokens, i32(5, 5), words, max_words=1,
        form=form,
    )  # fmt: skip
    assert torch.isinf(logits).nonzero().tolist() == [[0, 69]]


@given(seed=SEEDS, vocab=VOCABS, num_reqs=st.integers(0, 6))
@settings(max_examples=10)
def test_temperature(seed: int, vocab: int, num_reqs: int) -> None:
    batch = sampling_batch(seed, vocab=vocab, num_reqs=num_reqs)
    temperature = torch.tensor([0.0, 1.0, 0.3, 2.5, 1e-5, 7.0])
    t = temperature.double()[batch.expanded_idx_mapping.clamp(min=0).long()]
    expected = batch.logits.double() / torch.where(t == 0, 1, t).unsqueeze(1)
    check(
        batch,
        expected.numpy(),
        lambda logits, form: kernels.apply_temperature(logits, batch.expanded_idx_mapping, temperature, form=form),
    )


@given(seed=SEEDS, vocab=VOCABS, num_rows=st.integers(0, 5))
@settings(max_examples=15)
def test_grammar_bitmask(seed: int, vocab: int, num_rows: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(6, vocab, generator=generator)
    rows = torch.randperm(6, generator=generator)[:num_rows].int()
    # A word more than needed, as a grammar library may give.
    bitmask = torch.randint(-(2**31), 2**31, (num_rows, -(-vocab // 32) + 1), generator=generator).int()
    expected = logits.clone()
    for i, row in enumerate(rows.tolist()):
        bits = "".join(f"{word & 0xFFFFFFFF:032b}"[::-1] for word in bitmask[i].tolist())
        for token in range(vocab):
            if bits[token] == "0":
                expected[row, token] = NEG_INF
    for form in ALL_FORMS:
        if form == "loop" and vocab > 1000:
            continue
        got = logits.clone()
        kernels.apply_grammar_bitmask(got, rows, bitmask, form=form)
        assert torch.equal(got, expected), form


def test_a_short_bitmap_is_refused() -> None:
    with pytest.raises(ValueError, match="room for 32 tokens, the vocabulary has 33: give each row 2 words"):
        kernels.apply_grammar_bitmask(torch.zeros(1, 33), i32(0), i32(-1).view(1, 1))


@pytest.mark.parametrize("form", ALL_FORMS)
def test_a_row_does_not_depend_on_its_batch(form: str) -> None:
    """Bit for bit: the same request alone, at another state row, gives the same logits."""
    vocab = 300
    batch = sampling_batch(5, vocab=vocab, num_reqs=6, max_drafts=0)
    bias, penalties = bias_tables(5, vocab=vocab), penalty_tables(5, vocab=vocab)

    def run(logits: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, b: list, p: list) -> torch.Tensor:
        zeros = torch.zeros(len(rows), dtype=torch.int32)
        kernels.apply_logit_bias(logits, rows, positions, LogitBiasTables(*b), max_lengths=longest(bias), form=form)
        kernels.apply_penalties(logits, rows, zeros, zeros, PenaltyTables(*p), max_drafts=0, form=form)
        return logits

    together = run(batch.logits.clone(), batch.expanded_idx_mapping, batch.positions, list(bias), list(penalties))
    for i, row in enumerate(batch.expanded_idx_mapping.tolist()[:-1]):
        alone = run(
            batch.logits[i : i + 1].clone(),
            i32(0),
            batch.positions[i : i + 1],
            [x[row : row + 1] for x in bias],
            [x[row : row + 1] for x in penalties],
        )
        assert torch.equal(alone[0], together[i])
