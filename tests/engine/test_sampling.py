"""The law of sampled tokens, what they may depend on, and logprobs, on both runners."""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter
from functools import cache
from typing import Any

import pytest
import torch

from engine import SamplingParams
from engine.models import LoadedModel, load_model
from tests.engine.engine_helpers import (
    LOOPS,
    TraceRequest,
    both_loops,
    both_runners,
    greedy,
    ids,
    prompt_of,
    replaced_model,
    run_trace,
    tiny_llm,
    tiny_model,
    tokens_of,
)
from tests.engine.hf_reference import hf_logits, hf_model

PROMPT = [3, 7, 5, 4, 8]
NUM_DRAWS = 2000


@pytest.fixture(scope="module")
def small_vocabulary(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """A model over eleven tokens, so that a law can be counted."""
    path = tmp_path_factory.mktemp("small")
    config = tiny_model().config.to_hf() | {"vocab_size": 11, "eos_token_id": None, "bos_token_id": None}
    (path / "config.json").write_text(json.dumps(config))
    return load_model(path, dtype=torch.float32, device=torch.device("cpu"), load_format="dummy", seed=4)


@cache
def hf_tiny() -> torch.nn.Module:
    return hf_model(tiny_model())


# -- the law ---------------------------------------------------------------------------------------------------------


def law(logits: list[float], params: SamplingParams) -> list[float]:
    """The specification: temperature, then min_p, then top_k, then top_p of what is left."""
    scaled = [x / params.temperature for x in logits]
    best = max(scaled)
    weights = [math.exp(x - best) for x in scaled]
    kept = {i for i, w in enumerate(weights) if w >= params.min_p}
    if params.top_k > 0:
        kth = sorted((weights[i] for i in kept), reverse=True)[: params.top_k][-1]
        kept = {i for i in kept if weights[i] >= kth}
    total, mass, nucleus = sum(weights[i] for i in kept), 0.0, set()
    for i in sorted(kept, key=lambda i: -weights[i]):
        nucleus.add(i)
        mass += weights[i] / total
        if mass >= params.top_p:
            break
    total = sum(weights[i] for i in nucleus)
    return [weights[i] / total if i in nucleus else 0.0 for i in range(len(weights))]


def chi_square_p(counts: Counter[int], probabilities: list[float]) -> float:
    """The probability of a deviation at least as large; tokens that hardly occur are counted as one."""
    n = sum(counts.values())
    assert all(p > 0 for token, p in enumerate(probabilities) if counts[token]), f"impossible tokens: {counts}"
    cells = [(counts[token], n * p) for token, p in enumerate(probabilities) if n * p >= 5]
    rest = sum(n * p for p in probabilities if 0 < n * p < 5)
    if rest >= 1:
        cells.append((n - sum(o for o, _ in cells), rest))
    if len(cells) == 1:
        return 1.0
    statistic = sum((o - e) ** 2 / e for o, e in cells)
    return torch.special.gammaincc(torch.tensor((len(cells) - 1) / 2), torch.tensor(statistic / 2)).item()


LAWS = {
    "temperature": {"temperature": 5.0},
    "top_k": {"temperature": 6.0, "top_k": 4},
    "top_p": {"temperature": 5.0, "top_p": 0.7},
    "min_p": {"temperature": 5.0, "min_p": 0.3},
    "all": {"temperature": 8.0, "top_k": 6, "top_p": 0.85, "min_p": 0.2},
    "nothing left but the best": {"temperature": 5.0, "top_k": 1},
}


@both_runners
@pytest.mark.parametrize("name", LAWS)
def test_the_law_is_the_specified_one(runner: str, name: str, small_vocabulary: LoadedModel) -> None:
    params = SamplingParams(max_tokens=1, detokenize=False, **LAWS[name])
    with tiny_llm(runner, loaded=small_vocabulary, max_num_seqs=256, max_num_batched_tokens=2048) as llm:
        outputs = llm.generate([ids(*PROMPT)] * NUM_DRAWS, params, use_tqdm=False)
    counts = Counter(tokens[0] for tokens in tokens_of(outputs))
    logits = hf_logits(hf_model(small_vocabulary), PROMPT)[-1].tolist()
    probabilities = law(logits, params)
    assert sum(p * NUM_DRAWS >= 5 for p in probabilities) >= (1 if "best" in name else 2), "the law says too little"
    assert sum(counts.values()) == NUM_DRAWS
    assert chi_square_p(counts, probabilities) > 1e-3, (counts, probabilities)


def test_the_chi_square_test_can_fail() -> None:
    probabilities = [0.5, 0.3, 0.2]
    assert chi_square_p(Counter({0: 1000, 1: 600, 2: 400}), probabilities) > 0.9
    assert chi_square_p(Counter({0: 1085, 1: 555, 2: 360}), probabilities) < 1e-3


@both_runners
@pytest.mark.parametrize("temperature", [1e-300, 1e-38, 1e-6, 1.1e-5, 1e-3])
def test_a_temperature_near_zero_is_greedy(runner: str, temperature: float) -> None:
    with tiny_llm(runner) as llm:
        expected = llm.generate(ids(*PROMPT), greedy(6), use_tqdm=False)
        params = SamplingParams(temperature=temperature, max_tokens=6, ignore_eos=True)
        assert tokens_of(llm.generate(ids(*PROMPT), params, use_tqdm=False)) == tokens_of(expected)


# -- what a sampled token may depend on ------------------------------------------------------------------------------


def _sampled(seed: int | None, index: int) -> SamplingParams:
    filters = [{}, {"top_k": 9}, {"top_p": 0.8}, {"min_p": 0.02}, {"top_k": 20, "top_p": 0.9}][index % 5]
    return SamplingParams(temperature=1.2, seed=seed, max_tokens=8 + index, ignore_eos=True, **filters)


def _trace(seeded: bool) -> list[TraceRequest]:
    return [
        TraceRequest(
            f"r{i}", tuple([*prompt_of(8), *prompt_of(3 + 2 * i, i)]), _sampled(100 + i if seeded else None, i)
        )
        for i in range(5)
    ]


CIRCUMSTANCES: dict[str, dict[str, Any]] = {
    "chunks": {"max_num_batched_tokens": 7, "max_num_seqs": 5},
    "few rows": {"max_num_seqs": 2},
    "one row": {"max_num_seqs": 1},
    "few blocks": {"num_gpu_blocks_override": 12},
    "no cache": {"enable_prefix_caching": False},
    "small blocks": {"block_size": 1, "num_gpu_blocks_override": 400},
}


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("name", CIRCUMSTANCES)
def test_v2_sampled_tokens_depend_on_the_request_alone(loop: str, name: str) -> None:
    """Not on its row, its neighbours, chunks, preemptions, the loop or the cache; with a seed of its own or without."""
    for seeded in (True, False):
        with tiny_llm("v2", "plain") as llm:
            expected = run_trace(llm, _trace(seeded))
        with tiny_llm("v2", loop, **CIRCUMSTANCES[name]) as llm:
            result = run_trace(llm, _trace(seeded))
        assert {k: o.outputs[0].token_ids for k, o in result.outputs.items()} == {
            k: o.outputs[0].token_ids for k, o in expected.outputs.items()
        }
        assert result.num_preemptions > 0 or name != "few blocks"


@both_runners
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("name", ["chunks", "one row", "few blocks"])
def test_a_seed_makes_it_reproducible(runner: str, loop: str, name: str) -> None:
    """V1's generator of its own and V2's counters both: alone, beside others, cut in chunks, preempted."""
    with tiny_llm(runner, loop, **CIRCUMSTANCES[name]) as llm:
        together = run_trace(llm, _trace(seeded=True))
    for request in _trace(seeded=True):
        with tiny_llm(runner, "plain") as llm:
            alone = llm.generate(ids(*request.prompt), request.params, use_tqdm=False)[0]
        assert together.tokens(request.request_id) == alone.outputs[0].token_ids
    assert together.num_preemptions > 0 or name != "few blocks"


@both_runners
def test_a_seed_is_kept_through_a_failed_step(runner: str) -> None:
    params = _sampled(seed=11, index=1)
    with tiny_llm(runner) as llm:
        expected = llm.generate(ids(*PROMPT), params, use_tqdm=False)[0].outputs[0].token_ids
    with tiny_llm(runner) as llm:
        llm.add(ids(*PROMPT), params, request_id="a")
        for _ in range(5):
            llm.step()
        with replaced_model(llm, compute_logits=_fail), pytest.raises(RuntimeError, match="no logits today"):
            for _ in range(3):
                llm.step()
        tokens: tuple[int, ...] = ()
        while llm.core.has_unfinished():
            for output in llm.step():
                tokens = output.outputs[0].token_ids
        assert tokens == expected


def _fail(*args: object) -> None:
    raise RuntimeError("no logits today")


@both_runners
def test_other_seeds_give_other_tokens(runner: str) -> None:
    with tiny_llm(runner) as llm:
        outputs = llm.generate([ids(*PROMPT)] * 12, [_sampled(seed, 0) for seed in range(12)], use_tqdm=False)
        assert len(set(tokens_of(outputs))) > 8
        again = llm.generate([ids(*PROMPT)] * 12, [_sampled(seed, 0) for seed in range(12)], use_tqdm=False)
        assert tokens_of(again) == tokens_of(outputs)


@both_runners
@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1, -(2**63)])
def test_any_64_bit_seed_works(runner: str, seed: int) -> None:
    with tiny_llm(runner) as llm:
        a, b = (llm.generate(ids(*PROMPT), _sampled(seed, 0), use_tqdm=False) for _ in range(2))
        assert tokens_of(a) == tokens_of(b)


@both_runners
def test_without_a_seed_each_request_has_its_own_and_the_engines_seed_decides(runner: str) -> None:
    def run(seed: int) -> list[tuple[int, ...]]:
        with tiny_llm(runner, seed=seed) as llm:
            return tokens_of(llm.generate([ids(*PROMPT)] * 6, _sampled(None, 0), use_tqdm=False))

    assert run(3) == run(3)
    assert run(3) != run(4)
    assert len(set(run(3))) > 3


@both_runners
@both_loops
def test_n_completions_differ_and_a_seed_repeats_them(runner: str, loop: str) -> None:
    params = dataclasses.replace(_sampled(5, 0), n=6, logprobs=1)
    with tiny_llm(runner, loop) as llm:
        first, second = (llm.generate(ids(*prompt_of(9)), params, use_tqdm=False)[0] for _ in range(2))
        single = llm.generate(ids(*prompt_of(9)), dataclasses.replace(params, n=1), use_tqdm=False)[0]
    assert [completion.index for completion in first.outputs] == list(range(6))
    assert len({completion.token_ids for completion in first.outputs}) > 3
    assert [c.token_ids for c in first.outputs] == [c.token_ids for c in second.outputs]
    assert first.outputs[0].token_ids == single.outputs[0].token_ids
    assert all(len(completion.logprobs or ()) == len(completion.token_ids) == 8 for completion in first.outputs)


# -- min_tokens ------------------------------------------------------------------------------------------------------


@both_runners
@both_loops
def test_min_tokens_holds_every_stop_id_back_and_no_longer(runner: str, loop: str) -> None:
    prompt = prompt_of(9, 2)
    with tiny_llm(runner, loop) as llm:
        free = llm.generate(ids(*prompt), greedy(6), use_tqdm=False)[0].outputs[0].token_ids
        stops = (free[0], free[1], 9, 10)
        for min_tokens in (0, 1, 2, 5):
            params = greedy(16, min_tokens=min_tokens, stop_token_ids=stops, logprobs=6)
            out = llm.generate([ids(*prompt), ids(*prompt_of(5))], [params, greedy(7)], use_tqdm=False)[0].outputs[0]
            assert not set(out.token_ids[: min(min_tokens, len(out.token_ids))]) & set(stops)
            for position, (token, logprobs) in enumerate(zip(out.token_ids, out.logprobs or (), strict=True)):
                best = sorted(logprobs, key=lambda t: -logprobs[t].logprob)
                allowed = [t for t in best if position >= min_tokens or t not in stops]
                assert token == allowed[0]
                ends = token in stops and position >= min_tokens
                assert ends == (position == len(out.token_ids) - 1 and out.finish_reason == "stop")


@both_runners
def test_min_tokens_holds_the_end_of_sequence_back_too(runner: str) -> None:
    """With the model's own end-of-sequence id, sampled flat: without min_tokens most answers would end early."""
    end = tuple(range(3, 120))
    params = SamplingParams(temperature=50.0, seed=1, max_tokens=12, min_tokens=9, stop_token_ids=end)
    with tiny_llm(runner) as llm:
        outputs = llm.generate([ids(*prompt_of(4, i)) for i in range(8)], params, use_tqdm=False)
    for output in outputs:
        tokens = output.outputs[0].token_ids
        assert len(tokens) >= 10
        assert not set(tokens[:9]) & {*end, 2}


# -- logprobs --------------------------------------------------------------------------------------------------------


@both_runners
@both_loops
@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_logprobs_are_those_of_the_model(runner: str, loop: str, temperature: float) -> None:
    """log_softmax of a reference's logits, whatever the temperature and filters; ranks count from 1."""
    prompt = prompt_of(13, 3)
    asks = [0, 1, 5, None]
    params = [
        SamplingParams(temperature=temperature, top_k=50, seed=k, max_tokens=6, ignore_eos=True, logprobs=k)
        for k in asks
    ]
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
