"""Runner V1's sampler against a plain float64 reference, row by row."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import SamplingParams
from engine.device import Device
from engine.hooks import Hooks
from engine.runner_v1.input_batch import CachedRequestState, InputBatch
from engine.runner_v1.sampler import process_logits, sample
from engine.runner_v1.step_sampling import StepSampling, make_step_sampling
from engine.sample.bad_words import forbidden_next_tokens
from engine.sample.filters import apply_grammar_bitmask, apply_top_k_top_p
from engine.sample.penalties import token_counts
from engine.sched_output import GrammarOutput
from tests.engine.engine_helpers import greedy
from tests.engine.sampling_reference import processed

VOCAB = 23


def _state(index: int, prompt: list[int], output: list[int], params: SamplingParams) -> CachedRequestState:
    return CachedRequestState(
        req_id=f"r{index}", prompt_token_ids=prompt, output_token_ids=output, block_ids=[1], num_computed_tokens=0,
        sampling_params=params, stop_token_ids=frozenset(params.stop_token_ids), generator=None,
    )  # fmt: skip


def _batch(states: list[CachedRequestState]) -> InputBatch:
    batch = InputBatch(Device(torch.device("cpu"), Hooks("v1")), len(states), 32, 4, vocab_size=VOCAB)
    for state in states:
        batch.add_request(state)
    batch.refresh_metadata()
    batch.device.drain()
    return batch


tokens = st.integers(0, VOCAB - 1)
# None of the forbidding features may take the last token, so that something is always left.
FEATURES: dict[str, st.SearchStrategy[Any]] = {
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2),
    "repetition_penalty": st.floats(0.3, 3),
    "logit_bias": st.dictionaries(tokens, st.floats(-20, 20), min_size=1, max_size=4),
    "allowed_token_ids": st.lists(tokens, max_size=5).map(lambda some: [*some, VOCAB - 1]),
    "bad_words_token_ids": st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3), min_size=1, max_size=5),
    "min_tokens": st.integers(1, 4),
}


@st.composite
def request(draw: st.DrawFn) -> tuple[list[int], list[int], SamplingParams]:
    used = draw(st.sets(st.sampled_from(sorted(FEATURES))))
    fields = {name: draw(FEATURES[name]) for name in sorted(used)}
    stop_ids = draw(st.lists(st.integers(0, 5), max_size=3))
    prompt = draw(st.lists(tokens, min_size=1, max_size=6))
    output = draw(st.lists(st.integers(0, 4), max_size=6))
    return prompt, output, SamplingParams(temperature=0, stop_token_ids=stop_ids, **fields)


@settings(max_examples=150, deadline=None)
@given(st.lists(request(), min_size=1, max_size=5), st.integers(0, 2**31))
def test_processed_logits_are_the_references(requests: list[Any], seed: int) -> None:
    """Any subset of the features in any batch: every row is what one request alone would get."""
    batch = _batch([_state(i, *one) for i, one in enumerate(requests)])
    assert batch.sampling_metadata is not None
    logits = torch.randn(len(requests), VOCAB, generator=torch.Generator().manual_seed(seed)) * 5
    before = logits.clone()
    got = process_logits(logits, batch.sampling_metadata, make_step_sampling(batch, frozenset()))
    assert torch.equal(logits, before), "the logits themselves are needed for logprobs"
    for row, (prompt, output, params) in enumerate(requests):
        right = processed(before[row].double().tolist(), params, prompt, output, params.stop_token_ids)
        assert np.array_equal(np.isinf(got[row].numpy()), np.isinf(right))
        finite = ~np.isinf(right)
        np.testing.assert_allclose(got[row].numpy()[finite], right[finite], rtol=2e-5, atol=2e-5)
    batch.device.close()


def test_a_batch_that_uses_nothing_is_not_even_copied() -> None:
    batch = _batch([_state(i, [3, 4], [5], SamplingParams(temperature=0)) for i in range(3)])
    assert batch.sampling_metadata is not None
    logits = torch.randn(3, VOCAB)
    step = make_step_sampling(batch, frozenset())
    assert step == StepSampling()
    assert process_logits(logits, batch.sampling_metadata, step) is logits
    batch.device.close()


def test_parameters_follow_their_row_when_it_moves() -> None:
    requests = [
        ([1], [2], greedy(presence_penalty=1.5)),
        ([1], [], greedy(allowed_token_ids=[4, 5])),
        ([1], [7, 8], greedy(bad_words_token_ids=[[8, 9]])),
        ([1, 1], [], greedy(logit_bias={3: 50})),
    ]
    batch = _batch([_state(i, *one) for i, one in enumerate(requests)])
    batch.remove_request("r0")
    batch.condense()
    batch.swap_states(0, 2)
    batch.refresh_metadata()
    batch.device.drain()
    assert batch.sampling_metadata is not None
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(3))
    got = process_logits(logits, batch.sampling_metadata, make_step_sampling(batch, frozenset()))
    for row, req_id in enumerate(batch.req_ids):
        prompt, output, params = requests[int(str(req_id)[1])]
        right = processed(logits[row].double().tolist(), params, prompt, output)
        np.testing.assert_allclose(got[row].numpy(), right, rtol=1e-5, atol=1e-5)
    assert batch.sampling_metadata.penalties is None, "the only one with penalties has gone"
    batch.device.close()


def test_a_grammar_narrows_logits_and_logprobs() -> None:
    batch = _batch([_state(i, [3], [], SamplingParams(temperature=0, logprobs=2)) for i in range(3)])
    allowed = [2, 7, 22]
    bitmask = np.array([[sum(1 << token for token in allowed)]], dtype=np.int32)
    step = make_step_sampling(batch, frozenset(), GrammarOutput(("r1",), bitmask, (1,)))
    assert batch.sampling_metadata is not None
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(5))
    right = logits.double().clone()
    right[1, [token for token in range(VOCAB) if token not in allowed]] = -np.inf
    output = sample(logits.clone(), batch.sampling_metadata, step, torch.Generator())
    assert output.sampled[:, 0].tolist() == right.argmax(-1).tolist()
    assert output.logprobs is not None
    expected = right.log_softmax(-1).gather(1, output.logprobs.token_ids)
    torch.testing.assert_close(output.logprobs.logprobs.double(), expected, rtol=1e-5, atol=1e-5)
    batch.device.close()


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 64, 100])
def test_bits_of_a_bitmask(vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    allowed = rng.random((2, vocab)) < 0.5
    words = np.zeros((2, -(-vocab // 32)), dtype=np.int64)
    for row, token in zip(*np.nonzero(allowed), strict=True):
        words[row, token // 32] |= 1 << (token % 32)
    bitmask = torch.from_numpy(words.astype(np.uint32).view(np.int32))
    got = apply_grammar_bitmask(torch.zeros(4, vocab), torch.tensor([3, 1]), bitmask)
    assert np.array_equal(got.numpy()[[3, 1]] == 0, allowed)
    assert (got[[0, 2]] == 0).all()


def test_counts_leave_padding_out() -> None:
    counts = token_counts(torch.tensor([[0, 2, 2, 3], [3, 3, 3, 3]]), 3)
    assert counts.tolist() == [[1, 0, 2], [0, 0, 0]]
    assert token_counts(torch.empty(2, 0, dtype=torch.int64), 3).tolist() == [[0, 0, 0]] * 2


def test_bad_words_match_within_the_output() -> None:
    words = [(5,), (1, 2), (2, 1, 2), (9, 9)]
    assert forbidden_next_tokens(words, []) == [5]
    assert forbidden_next_tokens(words, [1]) == [5, 2]
    assert forbidden_next_tokens(words, [2, 1]) == [5, 2, 2]
    assert forbidden_next_tokens(words, [1, 9]) == [5, 9]


@pytest.mark.parametrize("rows", [1, 7, 16, 40])
def test_t23_logits_exist_for_few_positions_at_a_time(rows: int) -> None:
    from engine.sample.prompt_logprobs import compute_prompt_logprobs

    weight = torch.randn(50, 8, generator=torch.Generator().manual_seed(1))
    hidden = torch.randn(39, 8, generator=torch.Generator().manual_seed(2))
    targets = torch.arange(39) % 50
    made: list[int] = []

    def compute_logits(states: torch.Tensor) -> torch.Tensor:
        made.append(states.shape[0])
        return states @ weight.T

    got = compute_prompt_logprobs(hidden, targets, 2, compute_logits, logits_rows=rows)
    assert max(made) <= rows and sum(made) == 39
    right = (hidden @ weight.T).log_softmax(-1)
    torch.testing.assert_close(got.logprobs, right.gather(1, got.token_ids))
    assert got.token_ids[:, 0].tolist() == targets.tolist()
    assert torch.equal(got.ranks, (right >= right.gather(1, targets.unsqueeze(1))).sum(-1))


def test_top_p_of_a_neighbour_cuts_nothing_from_a_row_without() -> None:
    logits = torch.randn(2, 4096, generator=torch.Generator().manual_seed(0)) * 6
    got = apply_top_k_top_p(logits.clone(), None, torch.tensor([1.0, 0.9]))
    assert torch.equal(got[0], logits[0])
    assert int((got[1] > float("-inf")).sum()) < 4096
