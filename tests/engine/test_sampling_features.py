"""Whole answers with every sampling feature, and logprobs of prompts, against a reference's forward."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from engine import LLM, SamplingParams
from engine.sample.logits_processors import LogitsProcessor, LogitsRows
from tests.engine.engine_helpers import (
    EOS,
    TraceRequest,
    both_loops,
    both_runners,
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

pytestmark = pytest.mark.slow


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


@both_runners
@both_loops
@pytest.mark.parametrize("blocks", [129, 30])
def test_greedy_answers_are_the_references(runner: str, loop: str, blocks: int) -> None:
    """Every feature beside every other, in chunks, with preemptions: each token is the best one of the processed
    logits of a reference's forward over the same tokens."""
    with tiny_llm(runner, loop, max_num_batched_tokens=20, num_gpu_blocks_override=blocks, max_num_seqs=6) as llm:
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


@both_runners
@both_loops
def test_features_beside_a_request_do_not_touch_it(runner: str, loop: str) -> None:
    """Seeded sampling with features: the same tokens alone and beside others, cut in chunks, preempted, n of them."""
    features = ANSWERS["all"] | {"min_tokens": 0}
    params = SamplingParams(temperature=1.1, top_p=0.95, seed=7, max_tokens=10, ignore_eos=True, **features)
    with tiny_llm(runner, "plain") as llm:
        alone = llm.generate(ids(*prompt_of(9)), params, use_tqdm=False)[0].outputs[0].token_ids
    trace = [*_trace(), TraceRequest("it", tuple(prompt_of(9)), params, arrival=2)]
    with tiny_llm(runner, loop, max_num_batched_tokens=20, num_gpu_blocks_override=30, max_num_seqs=6) as llm:
        result = run_trace(llm, trace)
        three = llm.generate(ids(*prompt_of(9)), dataclasses.replace(params, n=3), use_tqdm=False)[0]
    assert result.tokens("it") == alone
    assert three.outputs[0].token_ids == alone
    assert len({completion.token_ids for completion in three.outputs}) == 3
    for completion in three.outputs:
        assert set(completion.token_ids) <= set(params.allowed_token_ids or ())


@both_runners
@both_loops
def test_a_word_of_several_tokens_never_becomes_whole(runner: str, loop: str) -> None:
    """Its last token alone is forbidden, and only behind the others: in the overlapped loop those are still on the
    device when the step is made."""
    prompt = prompt_of(9)
    with tiny_llm(runner, loop) as llm:
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


@both_runners
@both_loops
@pytest.mark.parametrize("budget", [13, 64])
@pytest.mark.parametrize("k", [0, 3, -1])
def test_t23_prompt_logprobs_are_the_models(runner: str, loop: str, budget: int, k: int) -> None:
    prompt = prompt_of(40, 2)
    reference = hf_logits(hf_tiny(), prompt).log_softmax(-1)
    with tiny_llm(runner, loop, max_num_batched_tokens=budget) as llm:
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


@both_runners
@both_loops
def test_prompt_logprobs_beside_others_after_preemption_and_for_n(runner: str, loop: str) -> None:
    """Two requests and n = 3 that ask, others that don't, few blocks: each gets its own prompt's, once."""
    asking = {f"p{i}": prompt_of(17 + 5 * i, i) for i in range(3)}
    trace = [TraceRequest(f"o{i}", tuple(prompt_of(6, 9 + i)), greedy(20), arrival=i) for i in range(4)]
    for i, (name, prompt) in enumerate(asking.items()):
        params = SamplingParams(
            temperature=1, seed=i, n=1 + 2 * (i == 2), max_tokens=9, prompt_logprobs=2, ignore_eos=True
        )
        trace.append(TraceRequest(name, tuple(prompt), params, arrival=1 + i))
    with tiny_llm(runner, loop, max_num_batched_tokens=11, num_gpu_blocks_override=22) as llm:
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


@both_runners
def test_a_prompt_of_one_token_has_no_logprobs(runner: str) -> None:
    llm = make_llm(runner, "overlapped")
    assert _prompt_logprobs(llm, [EOS + 5], 2) == (None,)
    close(llm)


@both_runners
def test_asking_for_prompt_logprobs_changes_no_token(runner: str) -> None:
    with tiny_llm(runner, "overlapped", max_num_batched_tokens=9) as llm:
        prompts = [ids(*prompt_of(20 + i, i)) for i in range(4)]
        with_them = llm.generate(prompts, [greedy(6, prompt_logprobs=i) for i in range(4)], use_tqdm=False)
        without = llm.generate(prompts, greedy(6), use_tqdm=False)
    assert tokens_of(with_them) == tokens_of(without)
