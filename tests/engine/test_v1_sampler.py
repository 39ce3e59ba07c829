"""Runner V1's sampler against plain float64 references: a row's logits, and whole answers."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import LLM, SamplingParams
from engine.device import Device
from engine.hooks import Hooks
from engine.runner_v1.input_batch import CachedRequestState, InputBatch
from engine.runner_v1.sampler import process_logits, sample
from engine.runner_v1.step_sampling import StepSampling, make_step_sampling
from engine.sample.bad_words import forbidden_next_tokens
from engine.sample.filters import apply_grammar_bitmask
from engine.sample.logits_processors import LogitsProcessor, LogitsRows
from engine.sample.penalties import token_counts
from engine.sched_output import GrammarOutput
from tests.engine.engine_helpers import (
    EOS,
    TraceRequest,
    both_loops,
    close,
    greedy,
    ids,
    make_llm,
    prompt_of,
    run_trace,
    tiny_llm,
    tiny_model,
    tokens_of,
)
from tests.engine.hf_reference import hf_logits, hf_model
from tests.engine.sampling_reference import processed

VOCAB = 23


# -- a row of logits ---------------------------------------------------------------------------------------------------


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
    step = make_step_sampling(batch, frozenset(), GrammarOutput(("r1",), bitmask))
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


# -- whole answers -----------------------------------------------------------------------------------------------------


class Favourite(LogitsProcessor):
    """The token whose id is the number of known tokens, modulo, gets a bonus: prompt and output both count."""

    def apply(self, logits: torch.Tensor, rows: LogitsRows) -> torch.Tensor:
        last = rows.token_ids.gather(1, rows.lens.unsqueeze(1) - 1)
        token = (last + rows.lens.unsqueeze(1) * 7 + rows.prompt_lens.unsqueeze(1)) % logits.shape[1]
        return logits.scatter_add(1, token, torch.full_like(token, 3.0, dtype=logits.dtype))

    def reference(self, prompt: list[int], output: list[int], row: np.ndarray) -> None:
        length = len(prompt) + len(output)
        row[((prompt + output)[-1] + length * 7 + len(prompt)) % len(row)] += 3


FAVOURITE = Favourite()
ANSWERS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "presence": {"presence_penalty": 1.7},
    "frequency": {"frequency_penalty": 1.1},
    "repetition": {"repetition_penalty": 1.8},
    "encouraged": {"frequency_penalty": -1.5, "repetition_penalty": 0.6},
    "bias": {"logit_bias": {token: -3.0 - token % 3 for token in range(3, 250)} | {9: 1.0}},
    "allowed": {"allowed_token_ids": list(range(5, 90, 4))},
    "bad words": {"bad_words_token_ids": [[token] for token in range(3, 120)]},
    "all": {
        "presence_penalty": 0.7, "frequency_penalty": 0.4, "repetition_penalty": 1.3, "logit_bias": {20: 2.0},
        "allowed_token_ids": list(range(8, 200, 3)), "bad_words_token_ids": [[11], [14, 17]], "min_tokens": 4,
        "logits_processors": [FAVOURITE],
    },
    "processor": {"logits_processors": [FAVOURITE]},
}  # fmt: skip


@cache
def hf_tiny() -> torch.nn.Module:
    return hf_model(tiny_model())


def _trace(**common: Any) -> list[TraceRequest]:
    return [
        TraceRequest(f"{name}{copy}", tuple(prompt_of(4 + 3 * i + copy, i)), greedy(12, **fields, **common), arrival=i)
        for i, (name, fields) in enumerate(ANSWERS.items())
        for copy in range(2)
    ]


@both_loops
@pytest.mark.parametrize("blocks", [129, 30])
def test_greedy_answers_are_the_references(loop: str, blocks: int) -> None:
    """Every feature beside every other, in chunks, with preemptions: each token is the best one of the processed
    logits of a reference's forward over the same tokens."""
    with tiny_llm("v1", loop, max_num_batched_tokens=20, num_gpu_blocks_override=blocks, max_num_seqs=6) as llm:
        result = run_trace(llm, _trace())
    assert result.num_preemptions > 0 or blocks == 129
    changed = set()
    for one in _trace():
        prompt, answer = list(one.prompt), list(result.tokens(one.request_id))
        assert len(answer) == 12
        logits = hf_logits(hf_tiny(), [*prompt, *answer]).double().numpy()[len(prompt) - 1 :]
        for position, token in enumerate(answer):
            output = answer[:position]
            row = processed(logits[position], one.params, prompt, output, one.params.stop_token_ids)
            if one.params.logits_processors:
                FAVOURITE.reference(prompt, output, row)
            assert row[token] >= row.max() - 1e-4, f"{one.request_id}, output token {position}"
            if logits[position].argmax() != token:
                changed.add(one.request_id[:-1])
    assert changed == ANSWERS.keys() - {"nothing"}, "each feature has to decide something, or nothing was tested"


@both_loops
def test_features_beside_a_request_do_not_touch_it(loop: str) -> None:
    """Seeded sampling with features: the same tokens alone and beside others, cut in chunks, preempted, n of them."""
    features = ANSWERS["all"] | {"min_tokens": 0}
    params = SamplingParams(temperature=1.1, top_p=0.95, seed=7, max_tokens=10, ignore_eos=True, **features)
    with tiny_llm("v1", "plain") as llm:
        alone = llm.generate(ids(*prompt_of(9)), params, use_tqdm=False)[0].outputs[0].token_ids
    trace = [*_trace(), TraceRequest("it", tuple(prompt_of(9)), params, arrival=2)]
    with tiny_llm("v1", loop, max_num_batched_tokens=20, num_gpu_blocks_override=30, max_num_seqs=6) as llm:
        result = run_trace(llm, trace)
        three = llm.generate(ids(*prompt_of(9)), _n(params, 3), use_tqdm=False)[0]
    assert result.tokens("it") == alone
    assert three.outputs[0].token_ids == alone
    assert len({completion.token_ids for completion in three.outputs}) == 3
    for completion in three.outputs:
        assert set(completion.token_ids) <= set(params.allowed_token_ids or ())


@both_loops
def test_a_word_of_several_tokens_never_becomes_whole(loop: str) -> None:
    """Its last token alone is forbidden, and only behind the others: in the overlapped loop those are still on the
    device when the step is made."""
    prompt = prompt_of(9)
    with tiny_llm("v1", loop) as llm:
        free = llm.generate(ids(*prompt), greedy(10), use_tqdm=False)[0].outputs[0].token_ids
        for length in (2, 3, 4):
            for at in (0, 3, 10 - length):
                word = free[at : at + length]
                out = (
                    llm.generate(
                        [ids(*prompt), ids(*prompt_of(5))],
                        [greedy(10, bad_words_token_ids=[word]), greedy(10)],
                        use_tqdm=False,
                    )[0]
                    .outputs[0]
                    .token_ids
                )
                whole = [i for i in range(10 - length + 1) if free[i : i + length] == word]
                assert out[: whole[0] + length - 1] == free[: whole[0] + length - 1]
                assert not any(out[i : i + length] == word for i in range(10 - length + 1))


def _n(params: SamplingParams, n: int) -> SamplingParams:
    import dataclasses

    return dataclasses.replace(params, n=n)


@pytest.mark.parametrize("name", ["nothing", "bias", "allowed", "presence", "bad words", "processor"])
def test_the_host_waits_for_output_tokens_only_if_sampling_looks_at_them(name: str) -> None:
    """Wait F of the overlapped loop: once in each step that follows another, for these features alone."""
    with tiny_llm("v1", "overlapped") as llm:
        llm.generate(ids(*prompt_of(5)), greedy(6, **ANSWERS[name]), use_tqdm=False)
        waits = llm.core.device.waits.inside_step
    assert waits.pop("output token ids", 0) == (5 if name in ("presence", "bad words", "processor") else 0)
    assert waits == {"prepare_inputs": 6}


# -- prompt logprobs ---------------------------------------------------------------------------------------------------


def _prompt_logprobs(llm: LLM, prompt: list[int], k: int, **fields: Any) -> Any:
    return llm.generate(ids(*prompt), greedy(3, prompt_logprobs=k, **fields), use_tqdm=False)[0].prompt_logprobs


@both_loops
@pytest.mark.parametrize("budget", [13, 64])
@pytest.mark.parametrize("k", [0, 3, -1])
def test_t23_prompt_logprobs_are_the_models(loop: str, budget: int, k: int) -> None:
    prompt = prompt_of(40, 2)
    reference = hf_logits(hf_tiny(), prompt).log_softmax(-1)
    with tiny_llm("v1", loop, max_num_batched_tokens=budget) as llm:
        # The second time the whole prompt is in the prefix cache, and all 39 are wanted still.
        for _ in range(2):
            got = _prompt_logprobs(llm, prompt, k)
            assert len(got) == 40 and got[0] is None
            for position in range(1, 40):
                right = reference[position - 1]
                order = right.argsort(descending=True).tolist()
                count = len(order) if k == -1 else k
                assert set(got[position]) == {prompt[position], *order[:count]}
                assert next(iter(got[position])) == prompt[position]
                for token, entry in got[position].items():
                    assert entry.logprob == pytest.approx(right[token].item(), abs=2e-4)
                    # Tokens that all but tie may stand the other way round.
                    at_rank = right[order[(entry.rank or 0) - 1]]
                    assert at_rank.item() == pytest.approx(right[token].item(), abs=2e-4)
        assert llm.generate(ids(*prompt), greedy(3), use_tqdm=False)[0].prompt_logprobs is None


@both_loops
def test_prompt_logprobs_beside_others_after_preemption_and_for_n(loop: str) -> None:
    """Two requests and n = 3 that ask, others that don't, few blocks: each gets its own prompt's, once."""
    asking = {f"p{i}": prompt_of(17 + 5 * i, i) for i in range(3)}
    trace = [TraceRequest(f"o{i}", tuple(prompt_of(6, 9 + i)), greedy(20), arrival=i) for i in range(4)]
    for i, (name, prompt) in enumerate(asking.items()):
        params = SamplingParams(
            temperature=1, seed=i, n=1 + 2 * (i == 2), max_tokens=9, prompt_logprobs=2, ignore_eos=True
        )
        trace.append(TraceRequest(name, tuple(prompt), params, arrival=1 + i))
    with tiny_llm("v1", loop, max_num_batched_tokens=11, num_gpu_blocks_override=22) as llm:
        result = run_trace(llm, trace)
    assert result.num_preemptions > 0
    for name, prompt in asking.items():
        reference = hf_logits(hf_tiny(), prompt).log_softmax(-1)
        got = result.outputs[name].prompt_logprobs
        assert got is not None and len(got) == len(prompt)
        for position in range(1, len(prompt)):
            entry = got[position][prompt[position]]  # type: ignore[index]
            assert entry.logprob == pytest.approx(reference[position - 1, prompt[position]].item(), abs=2e-4)
    assert all(result.outputs[f"o{i}"].prompt_logprobs is None for i in range(4))


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


def test_a_prompt_of_one_token_has_no_logprobs() -> None:
    llm = make_llm("v1", "overlapped")
    assert _prompt_logprobs(llm, [EOS + 5], 2) == (None,)
    close(llm)


def test_asking_for_prompt_logprobs_changes_no_token() -> None:
    with tiny_llm("v1", "overlapped", max_num_batched_tokens=9) as llm:
        prompts = [ids(*prompt_of(20 + i, i)) for i in range(4)]
        with_them = llm.generate(prompts, [greedy(6, prompt_logprobs=i) for i in range(4)], use_tqdm=False)
        without = llm.generate(prompts, greedy(6), use_tqdm=False)
    assert tokens_of(with_them) == tokens_of(without)
