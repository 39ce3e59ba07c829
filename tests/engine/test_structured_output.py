"""Structured output: answers that are held to a grammar, in every circumstance of an engine."""

from __future__ import annotations

import re
import threading
from typing import Any

import numpy as np
import pytest

from engine import SamplingParams, StructuredOutputsParams
from engine.models import LoadedModel
from tests.engine.engine_helpers import (
    TraceRequest,
    both_loops,
    both_runners,
    ids,
    limited_steps,
    prompt_of,
    run_trace,
    tiny_llm,
)
from tests.engine.grammars import ANSWERS, ENGINE, answer_behind_a_failed_step, check_answer, held, token_of


@both_runners
@both_loops
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_answer_is_of_its_language(runner: str, loop: str, temperature: float, loaded: LoadedModel) -> None:
    """Beside free requests, cut in chunks, preempted: what ends is whole."""
    trace = [
        TraceRequest(f"g{i}", tuple(prompt_of(3 + 4 * i, i)), held(temperature=temperature, **fields), arrival=i // 2)
        for i, fields in enumerate(ANSWERS)
    ]
    free = [TraceRequest(f"f{i}", tuple(prompt_of(9, 50 + i)), SamplingParams(seed=i, max_tokens=30)) for i in range(4)]
    engine = ENGINE | {"num_gpu_blocks_override": 52, "max_num_batched_tokens": 24}
    with tiny_llm(runner, loop, loaded=loaded, **engine) as llm:
        result = run_trace(llm, trace + free)
    ended = 0
    for one, fields in zip(trace, ANSWERS, strict=True):
        completion = result.outputs[one.request_id].outputs[0]
        assert completion.finish_reason in ("stop", "length"), completion.stop_reason
        assert max(completion.token_ids) < 259
        if completion.finish_reason == "stop":
            ended += 1
            check_answer(fields, completion.text)
    assert ended >= len(trace) - 3, "most should end in time"
    assert result.num_preemptions > 0
    if temperature:
        with tiny_llm(runner, "plain", loaded=loaded, **ENGINE) as llm:
            for one in trace[::3]:
                alone = llm.generate(ids(*one.prompt), one.params, use_tqdm=False)[0].outputs[0]
                assert result.tokens(one.request_id) == alone.token_ids


@both_runners
@both_loops
def test_n_answers_each_have_their_own_place_in_the_grammar(runner: str, loop: str, loaded: LoadedModel) -> None:
    with tiny_llm(runner, loop, loaded=loaded, **ENGINE) as llm:
        output = llm.generate(ids(*prompt_of(5)), held(regex="[a-z]{3,9}!", n=5, temperature=3.0), use_tqdm=False)[0]
    texts = [completion.text for completion in output.outputs]
    assert all(re.fullmatch("[a-z]{3,9}!", text) for text in texts) and len(set(texts)) == 5


@both_runners
@both_loops
def test_logprobs_are_those_of_the_allowed_tokens(runner: str, loop: str, loaded: LoadedModel) -> None:
    with tiny_llm(runner, loop, loaded=loaded, **ENGINE) as llm:
        output = llm.generate(ids(*prompt_of(5)), held(regex="[ab]{4}c", logprobs=2), use_tqdm=False)[0].outputs[0]
    assert output.logprobs is not None and len(output.token_ids) == 6
    for entry in output.logprobs[:4]:
        assert {token for token in entry if entry[token].logprob > -100} == {token_of("a"), token_of("b")}
        assert sum(np.exp(value.logprob) for value in entry.values()) == pytest.approx(1, abs=1e-4)
    assert output.logprobs[4][token_of("c")].logprob == pytest.approx(0, abs=1e-5)


@both_runners
@both_loops
def test_how_an_answer_ends(runner: str, loop: str, loaded: LoadedModel) -> None:
    ends = {
        "stop": (held(regex="abc"), "abc", "stop", None),
        "stop although ignore_eos": (held(regex="abc", ignore_eos=True), "abc", "stop", None),
        "length": (held(regex="a{9}", max_tokens=4), "aaaa", "length", None),
        "a stop id of the caller's": (held(regex="abcd", stop_token_ids=[token_of("c")]), "ab", "stop", token_of("c")),
        "a stop string": (held(regex="abcd", stop=["bc"]), "a", "stop", "bc"),
    }
    with tiny_llm(runner, loop, loaded=loaded, **ENGINE) as llm:
        outputs = llm.generate([ids(*prompt_of(5))] * len(ends), [end[0] for end in ends.values()], use_tqdm=False)
        for output, (_, text, reason, stop_reason) in zip(outputs, ends.values(), strict=True):
            completion = output.outputs[0]
            assert (completion.text, completion.finish_reason, completion.stop_reason) == (text, reason, stop_reason)


@both_runners
@both_loops
def test_where_nothing_is_left_the_request_ends_with_an_error(runner: str, loop: str, loaded: LoadedModel) -> None:
    """The caller allows only what the grammar refuses. The others of the batch go on."""
    impossible = held(regex="ab", allowed_token_ids=[token_of("a"), token_of("x")])
    with tiny_llm(runner, loop, loaded=loaded, **ENGINE) as llm:
        outputs = llm.generate([ids(*prompt_of(5))] * 2, [impossible, held(regex="ab")], use_tqdm=False)
    bad, good = (output.outputs[0] for output in outputs)
    assert (bad.finish_reason, len(bad.token_ids)) == ("error", 2) and bad.token_ids[0] == token_of("a")
    assert "isn't allowed by the grammar" in str(bad.stop_reason)
    assert (good.text, good.finish_reason) == ("ab", "stop")


@both_runners
@both_loops
def test_a_request_waits_for_its_grammar_and_nobody_else_does(
    runner: str, loop: str, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tiny_llm(runner, loop, loaded=loaded, **ENGINE) as llm, limited_steps(llm):
        manager, go_on = llm.core.structured_output, threading.Event()
        compile_ = manager._compile

        def slow(params: StructuredOutputsParams) -> Any:
            go_on.wait(30)
            return compile_(params)

        monkeypatch.setattr(manager, "_compile", slow)
        llm.add(ids(*prompt_of(5)), held(regex="abc"), request_id="held", final_only=True)
        free = llm.generate(ids(*prompt_of(6)), SamplingParams(max_tokens=5, temperature=0), use_tqdm=False)[0]
        assert free.finished
        assert llm.core.scheduler.waiting[0].request_id == "held"
        assert llm.step() == [], "an engine that has nothing else to do"
        threading.Timer(0.05, go_on.set).start()
        outputs = [output for _ in range(60) for output in llm.step()]
        assert outputs[0].outputs[0].text == "abc"


@both_runners
def test_a_grammar_that_cannot_be_compiled_ends_its_request_alone(
    runner: str, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(params: StructuredOutputsParams) -> Any:
        raise MemoryError("too large")

    with tiny_llm(runner, loaded=loaded, **ENGINE) as llm, limited_steps(llm):
        monkeypatch.setattr(llm.core.structured_output, "_compile", fail)
        params = [held(regex="abc"), SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)]
        held_, free = llm.generate([ids(*prompt_of(5))] * 2, params, use_tqdm=False)
    assert held_.outputs[0].finish_reason == "error"
    assert held_.outputs[0].stop_reason == "the grammar can't be compiled: too large"
    assert len(free.outputs[0].token_ids) == 4


@both_runners
@both_loops
def test_a_failed_step_does_not_lose_the_place_in_the_grammar(runner: str, loop: str, loaded: LoadedModel) -> None:
    params = held(regex="[a-z]{12}[0-9]{3}")
    with tiny_llm(runner, loop, loaded=loaded, **ENGINE) as llm:
        expected, answer = answer_behind_a_failed_step(llm, ids(*prompt_of(5)), params)
    assert re.fullmatch("[a-z]{12}[0-9]{3}", answer) and answer == expected


@both_runners
@both_loops
def test_an_aborted_request_leaves_nothing_behind(runner: str, loop: str, loaded: LoadedModel) -> None:
    trace = [TraceRequest(f"r{i}", tuple(prompt_of(5, i)), held(regex="[a-z]{40}"), abort_at=3 + i) for i in range(4)]
    with tiny_llm(runner, loop, loaded=loaded, **ENGINE) as llm:
        run_trace(llm, [*trace, TraceRequest("kept", tuple(prompt_of(7)), held(regex="[a-z]{4}"))])


@both_runners
def test_the_host_waits_no_more_often_than_without_a_grammar(runner: str, loaded: LoadedModel) -> None:
    """Overlapped loop, the same number of steps: the wait for a step's output moves, and none is added."""

    def waits(params: SamplingParams) -> tuple[dict[str, int], dict[str, int], int]:
        with tiny_llm(runner, "overlapped", loaded=loaded, **ENGINE) as llm:
            output = llm.generate(ids(*prompt_of(5)), params, use_tqdm=False)[0].outputs[0]
            counter = llm.core.device.waits
            return dict(counter.inside_step), dict(counter.outside_step), len(output.token_ids)

    inside, outside, count = waits(held(regex="[a-z]{9}", max_tokens=9))
    free = waits(SamplingParams(temperature=1.0, seed=1, max_tokens=9, ignore_eos=True))
    assert (inside, outside, count) == free and count == 9
