"""Logprobs against a reference's forward, on both runners."""

from __future__ import annotations

import math
from functools import cache

import pytest
import torch

from engine import SamplingParams
from tests.engine.engine_helpers import (
    both_loops,
    both_runners,
    greedy,
    ids,
    prompt_of,
    tiny_llm,
    tiny_model,
)
from tests.engine.hf_reference import hf_logits, hf_model

PROMPT = [3, 7, 5, 4, 8]


@cache
def hf_tiny() -> torch.nn.Module:
    return hf_model(tiny_model())


@both_runners
@both_loops
@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_logprobs_are_those_of_the_model(runner: str, loop: str, temperature: float) -> None:
    """log_softmax of a reference's logits, whatever the temperature and filters; ranks count from 1."""
    prompt = prompt_of(13, 3)
    asks = [0, 1, 5, None]
    common = {"temperature": temperature, "top_k": 50, "max_tokens": 6, "ignore_eos": True}
    params = [SamplingParams(**common, seed=k, logprobs=k) for k in asks]
    # Forbidding stop ids for a while is no change of the model's own distribution either.
    params[2] = SamplingParams(**common, seed=5, logprobs=5, min_tokens=6, stop_token_ids=list(range(3, 120)))
    with tiny_llm(runner, loop, max_num_batched_tokens=9, num_gpu_blocks_override=14) as llm:
        outputs = llm.generate([ids(*prompt)] * 4, params, use_tqdm=False)
    assert outputs[3].outputs[0].logprobs is None
    for k, output in zip(asks[:3], outputs, strict=False):
        completion = output.outputs[0]
        reference = hf_logits(hf_tiny(), [*prompt, *completion.token_ids]).log_softmax(-1)
        assert completion.logprobs is not None and len(completion.logprobs) == len(completion.token_ids)
        for position, (token, entry) in enumerate(zip(completion.token_ids, completion.logprobs, strict=True)):
            right = reference[len(prompt) - 1 + position]
            order = right.argsort(descending=True).tolist()
            assert set(entry) == {token, *order[:k]}
            assert next(iter(entry)) == token
            for other, logprob in entry.items():
                assert logprob.logprob == pytest.approx(right[other].item(), abs=2e-4)
                assert logprob.rank == order.index(other) + 1


@both_runners
def test_logprobs_of_the_whole_vocabulary_sum_to_one(runner: str) -> None:
    with tiny_llm(runner) as llm:
        vocab = llm.loaded.config.vocab_size
        entry = llm.generate(ids(*PROMPT), greedy(1, logprobs=vocab), use_tqdm=False)[0].outputs[0].logprobs[0]
        assert len(entry) == vocab
        assert sum(math.exp(value.logprob) for value in entry.values()) == pytest.approx(1, abs=1e-4)
        assert sorted(value.rank for value in entry.values()) == list(range(1, vocab + 1))


def test_a_rank_counts_ties() -> None:
    """Logits 9, 8, 7, 6 have ranks 1 to 4; of two that tie, both have the lower place."""
    from engine.sample.logprobs import compute_logprobs

    ranks = compute_logprobs(torch.tensor([[9.0, 8, 7, 6]] * 4), torch.arange(4), 0).ranks
    assert ranks.tolist() == [1, 2, 3, 4]
    ties = compute_logprobs(torch.tensor([[5.0, 5, 3]] * 3), torch.arange(3), 1)
    assert ties.ranks.tolist() == [2, 2, 3]
    assert ties.logprobs[:, 0].tolist() == pytest.approx(torch.tensor([5.0, 5, 3]).log_softmax(-1).tolist())
