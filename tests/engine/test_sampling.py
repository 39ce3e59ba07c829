"""What a sampled token may depend on, seeds, n completions and min_tokens, on both runners."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from engine import SamplingParams
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
    tokens_of,
)

PROMPT = [3, 7, 5, 4, 8]


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
@both_loops
def test_min_tokens_lets_the_very_next_token_stop(runner: str, loop: str) -> None:
    """The answer stops at token k if min_tokens is k, and may not if it is k + 1."""
    prompt = prompt_of(9, 2)
    with tiny_llm(runner, loop) as llm:
        free = llm.generate(ids(*prompt), greedy(8), use_tqdm=False)[0].outputs[0].token_ids
        firsts = [k for k in range(1, 7) if free[k] not in free[:k]]
        assert len(firsts) > 3
        for k in firsts:
            at, behind = (greedy(8, min_tokens=n, stop_token_ids=[free[k]]) for n in (k, k + 1))
            outputs = llm.generate([ids(*prompt)] * 2, [at, behind], use_tqdm=False)
            assert tokens_of(outputs)[0] == free[: k + 1] and outputs[0].outputs[0].finish_reason == "stop"
            assert tokens_of(outputs)[1][:k] == free[:k] and tokens_of(outputs)[1][k] != free[k]


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
