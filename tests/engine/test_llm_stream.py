"""LLM.stream: token by token, closed early, interleaved, aborted."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from engine import LLM, SamplingParams
from engine.models import LoadedModel
from tests.engine.engine_helpers import (
    assert_empty,
    both_loops,
    both_runners,
    greedy,
    ids,
    limited_steps,
    make_llm,
    prompt_of,
    reference,
    tiny_llm,
    tokens_of,
)
from tests.engine.tiny_text import letters, text_model

PROMPTS = [prompt_of(5, 1), prompt_of(12, 2), prompt_of(3, 3)]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return text_model(tmp_path_factory.mktemp("letters"), letters())


@pytest.fixture(params=["v1", "v2"])
def llm(request: pytest.FixtureRequest, loaded: LoadedModel) -> Iterator[LLM]:
    llm = make_llm(request.param, loaded=loaded)
    yield llm
    assert_empty(llm)
    llm.close()


@both_runners
@both_loops
def test_a_stream_grows_token_by_token(runner: str, loop: str, loaded: LoadedModel) -> None:
    with tiny_llm(runner, loop, loaded=loaded) as llm:
        outputs = list(llm.stream(ids(*PROMPTS[0]), greedy(6)))
        right = reference(PROMPTS[0], greedy(6))
        assert [output.outputs[0].token_ids for output in outputs] == [right[: n + 1] for n in range(6)]
        assert [output.finished for output in outputs] == [False] * 5 + [True]
        assert all(b.outputs[0].text.startswith(a.outputs[0].text) for a, b in zip(outputs, outputs[1:], strict=False))
        assert outputs[-1].outputs == llm.generate(ids(*PROMPTS[0]), greedy(6), use_tqdm=False)[0].outputs
        assert not llm.core.in_flight


@both_runners
@both_loops
def test_closing_a_stream_aborts_its_request(runner: str, loop: str) -> None:
    with tiny_llm(runner, loop) as llm:
        stream = llm.stream(ids(*PROMPTS[0]), greedy(30))
        next(stream)
        next(stream)
        assert llm.core.has_unfinished()
        stream.close()
        assert not llm.core.has_unfinished() and llm._streams == {}
        assert tokens_of(llm.generate(ids(*PROMPTS[1]), greedy(5), use_tqdm=False)) == [
            reference(PROMPTS[1], greedy(5))
        ]
        assert_empty(llm)


@both_runners
@both_loops
def test_two_streams_and_a_generate_interleave(runner: str, loop: str) -> None:
    with tiny_llm(runner, loop) as llm:
        a, b = llm.stream(ids(*PROMPTS[0]), greedy(9)), llm.stream(ids(*PROMPTS[1]), greedy(6))
        seen_a, seen_b = [next(a)], [next(b), next(b)]
        whole = llm.generate(ids(*PROMPTS[2]), greedy(7), use_tqdm=False)
        seen_a.append(next(a))
        seen_b += list(b)
        seen_a += list(a)
        assert tokens_of(whole) == [reference(PROMPTS[2], greedy(7))]
        for seen, prompt, n in ((seen_a, PROMPTS[0], 9), (seen_b, PROMPTS[1], 6)):
            assert [len(output.outputs[0].token_ids) for output in seen] == list(range(1, n + 1))
            assert seen[-1].outputs[0].token_ids == reference(prompt, greedy(n))
        assert_empty(llm)


@both_runners
@both_loops
@pytest.mark.parametrize("how", ["generate", "stream"])
def test_what_others_compute_in_passing_comes_with_the_next_step(how: str, runner: str, loop: str) -> None:
    """Requests of `add` that end while somebody else generates; of one that is aborted then, nothing comes."""
    short, long, other = prompt_of(5, 1), prompt_of(6, 2), prompt_of(7, 3)
    with tiny_llm(runner, loop) as llm:
        for request_id, prompt, params in (("a", short, greedy(3)), ("b", long, greedy(30)), ("c", other, greedy(30))):
            llm.add(ids(*prompt), params, request_id=request_id)
        if how == "generate":
            (output,) = llm.generate(ids(*other), greedy(9), use_tqdm=False)
        else:
            *_, output = llm.stream(ids(*other), greedy(9))
        assert output.outputs[0].token_ids == reference(other, greedy(9))
        llm.abort(["c"])
        outputs = llm.step()
        assert [output.request_id for output in outputs] == ["a", "b", "b"]
        assert outputs[0].finished and outputs[0].outputs[0].token_ids == reference(short, greedy(3))
        while llm.core.has_unfinished():
            outputs = llm.step()
        assert [output.outputs[0].token_ids for output in outputs] == [reference(long, greedy(30))]
        assert_empty(llm)


@both_runners
@both_loops
def test_a_stream_whose_request_is_aborted_ends(runner: str, loop: str) -> None:
    with tiny_llm(runner, loop) as llm:
        stream = llm.stream(ids(*PROMPTS[0]), greedy(30))
        first = next(stream)
        llm.abort([first.request_id])
        with limited_steps(llm):
            rest = list(stream)
        assert rest[-1].finished and rest[-1].outputs[0].finish_reason == "abort"
        assert rest[-1].outputs[0].token_ids == reference(PROMPTS[0], greedy(30))[: len(rest[-1].outputs[0].token_ids)]
        assert_empty(llm)


def test_a_stream_that_nobody_reads_runs_nothing(llm: LLM) -> None:
    stream = llm.stream(ids(*PROMPTS[0]), greedy(3))
    assert not llm.core.has_unfinished()
    del stream


def test_a_stream_of_n(llm: LLM) -> None:
    params = SamplingParams(n=3, temperature=1.0, seed=4, max_tokens=5, ignore_eos=True)
    outputs = list(llm.stream("abc", params))
    assert len(outputs) == 5 and len({completion.token_ids for completion in outputs[-1].outputs}) > 1
    assert outputs[-1].outputs == llm.generate("abc", params, use_tqdm=False)[0].outputs
