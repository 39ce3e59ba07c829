"""Runner V2's sampling features in the engine: each greedy token is the best one of the documented processing of a
reference model's logits, whatever the loop, the chunks, preemptions and neighbours."""

from __future__ import annotations

import dataclasses
import math
from functools import cache

import pytest
import torch

from engine import SamplingParams
from engine.sample.logits_processors import LogitsProcessor, LogitsRows
from tests.engine.engine_helpers import (
    LOOPS,
    VOCAB,
    TraceRequest,
    both_loops,
    ids,
    prompt_of,
    run_trace,
    tiny_llm,
    tiny_model,
    tokens_of,
)
from tests.engine.hf_reference import hf_logits, hf_model
from tests.engine.sampling_reference import processed


class EvenOnly(LogitsProcessor):
    """After an odd token an even one, and never token 4 in the first three places."""

    def apply(self, logits: torch.Tensor, rows: LogitsRows) -> torch.Tensor:
        odd = torch.arange(logits.shape[1]) % 2 == 1
        last = rows.token_ids.gather(1, rows.lens.unsqueeze(1) - 1)
        logits = logits.masked_fill(odd & (last % 2 == 1), -math.inf)
        logits[:, 4] += torch.where(rows.lens - rows.prompt_lens < 3, -math.inf, 0.0)
        return logits


PROCESSOR = EvenOnly()
FEATURES = {
    "penalties": {"presence_penalty": 0.3, "frequency_penalty": 0.2, "repetition_penalty": 1.2},
    "negative penalties": {"frequency_penalty": -0.3, "repetition_penalty": 0.8},
    "allowed": {"allowed_token_ids": tuple(range(5, 60))},
    "bias": {"logit_bias": {9: 1.5, 11: -2.0, 300: 2.0}},
    "min_tokens": {"min_tokens": 6, "stop_token_ids": tuple(range(100, 228))},
    "processor": {"logits_processors": (PROCESSOR,)},
    "plain": {},
}


@cache
def hf_tiny() -> torch.nn.Module:
    return hf_model(tiny_model())


def params_of(name: str, **kwargs: object) -> SamplingParams:
    return SamplingParams(**({"temperature": 0, "max_tokens": 10, "ignore_eos": True} | FEATURES[name] | kwargs))


def check_tokens(prompt: list[int], params: SamplingParams, tokens: tuple[int, ...]) -> None:
    reference = hf_logits(hf_tiny(), [*prompt, *tokens])
    stop_ids = set(params.stop_token_ids)
    for i, token in enumerate(tokens):
        output = list(tokens[:i])
        expected = torch.tensor(processed(reference[len(prompt) - 1 + i].tolist(), params, prompt, output, stop_ids))
        if params.logits_processors:
            rows = LogitsRows(
                torch.tensor([[*prompt, *output]]), torch.tensor([len(prompt) + i]), torch.tensor([len(prompt)])
            )
            expected = PROCESSOR.apply(expected.unsqueeze(0), rows)[0]
        assert expected[token] > -math.inf and expected[token] >= expected.max() - 1e-3, (i, token, output)


def bad_words_of(prompt: list[int], params: SamplingParams) -> SamplingParams:
    """The request again, forbidding what it said: its first token, and its next pairs and triple."""
    with tiny_llm("v2", "plain") as llm:
        said = llm.generate(ids(*prompt), params, use_tqdm=False)[0].outputs[0].token_ids
    return dataclasses.replace(params, bad_words_token_ids=(said[:1], said[1:3], said[2:5], said[4:6]))


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize(
    "circumstances",
    [{}, {"max_num_batched_tokens": 7, "max_num_seqs": 5}, {"num_gpu_blocks_override": 14}, {"max_num_seqs": 1}],
    ids=["together", "chunks", "few blocks", "one row"],
)
def test_greedy_tokens_are_the_best_of_the_processed_logits(loop: str, circumstances: dict) -> None:
    trace = [
        TraceRequest(name, tuple(prompt_of(6 + 3 * i, i)), params_of(name), arrival=i % 3)
        for i, name in enumerate(FEATURES)
    ]
    prompt = prompt_of(8, 40)
    trace.append(TraceRequest("bad words", tuple(prompt), bad_words_of(prompt, params_of("penalties"))))
    with tiny_llm("v2", loop, **circumstances) as llm:
        result = run_trace(llm, trace)
    for request in trace:
        check_tokens(list(request.prompt), request.params, result.tokens(request.request_id))
        if not request.params.stop_token_ids:
            assert len(result.tokens(request.request_id)) == 10
    assert result.num_preemptions > 0 or "num_gpu_blocks_override" not in circumstances


@both_loops
def test_a_sampled_token_with_features_depends_on_the_request_alone(loop: str) -> None:
    params = [params_of(name, temperature=0.9, seed=i, top_k=50) for i, name in enumerate(FEATURES)]
    prompts = [prompt_of(5 + i, i) for i in range(len(params))]
    with tiny_llm("v2", loop, num_gpu_blocks_override=16) as llm:
        together = tokens_of(llm.generate([ids(*p) for p in prompts], params, use_tqdm=False))
    for prompt, own, tokens in zip(prompts, params, together, strict=True):
        with tiny_llm("v2", "plain") as llm:
            assert tokens_of(llm.generate(ids(*prompt), own, use_tqdm=False)) == [tokens]


@both_loops
def test_few_and_all_logprobs_in_one_batch(loop: str) -> None:
    asks = [2, VOCAB, None, -1, 0, 40]
    params = [SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=k) for k in asks]
    prompt = prompt_of(9, 5)
    with tiny_llm("v2", loop, max_num_batched_tokens=16) as llm:
        outputs = llm.generate([ids(*prompt)] * len(asks), params, use_tqdm=False)
    for k, output in zip(asks, outputs, strict=True):
        completion = output.outputs[0]
        if k is None:
            assert completion.logprobs is None
            continue
        right = hf_logits(hf_tiny(), [*prompt, *completion.token_ids]).log_softmax(-1)
        assert completion.logprobs is not None and len(completion.logprobs) == 4
        for i, (token, entry) in enumerate(zip(completion.token_ids, completion.logprobs, strict=True)):
            assert len(entry) == (VOCAB if k == -1 else max(k, 1)) and next(iter(entry)) == token
            for other, logprob in entry.items():
                assert logprob.logprob == pytest.approx(right[len(prompt) - 1 + i][other].item(), abs=2e-4)


@pytest.mark.parametrize("chunk", [64, 13, 7])
@both_loops
def test_prompt_logprobs_leave_with_the_output(loop: str, chunk: int) -> None:
    """T23: the parts of every step, in order, are the whole prompt's, beside requests that didn't ask."""
    prompt, entries = prompt_of(40, 2), []
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, prompt_logprobs=3)
    with tiny_llm("v2", loop, max_num_batched_tokens=chunk, max_num_seqs=4) as llm:
        for request_id, own in (("plain", dataclasses.replace(params, prompt_logprobs=None)), ("asks", params)):
            llm.add(ids(*prompt_of(5, 9)) if request_id == "plain" else ids(*prompt), own, request_id=request_id)
        process = llm.core.scheduler.update_from_output

        def watched(scheduled: object, output: object, *args: object, **kwargs: object) -> object:
            for req_id, part in (output.prompt_logprobs or {}).items():
                assert req_id.startswith("asks") and part.start == len(entries) + 1
                entries.extend(part.entries)
            return process(scheduled, output, *args, **kwargs)

        llm.core.scheduler.update_from_output = watched
        while llm.core.has_unfinished() or llm.core.in_flight:
            llm.step()
    right = hf_logits(hf_tiny(), prompt).log_softmax(-1)
    assert len(entries) == 39
    for i, entry in enumerate(entries):
        order = right[i].argsort(descending=True).tolist()
        assert set(entry) == {prompt[i + 1], *order[:3]} and next(iter(entry)) == prompt[i + 1]
        for token, (logprob, rank) in entry.items():
            assert logprob == pytest.approx(right[i][token].item(), abs=2e-4) and rank == order.index(token) + 1
