"""Answers that are held to a grammar, with drafts: those without drafts, and only sooner, whatever else goes on."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine import SamplingParams
from engine.models import LoadedModel, Tokenizer, load_model
from tests.engine.drafters import SIDES, drawn, itself, lookup, ngram, one_head, ruled, sides
from tests.engine.dspark.golden import HEADS, ROOT
from tests.engine.engine_helpers import EOS, TraceRequest, ids, prompt_of, run_trace
from tests.engine.engine_helpers import tiny_llm as engine
from tests.engine.grammars import ANSWERS, ENGINE, check_answer, held, text
from tests.engine.tiny_text import letters

pytestmark = pytest.mark.slow  # many engines

Spec = Callable[[int], dict[str, Any]]
EVERYWHERE: list[Spec] = [ngram, itself, one_head]
DRAFTERS = [(*side, spec) for side in SIDES for spec in EVERYWHERE]
DRAFTERS += [("v2", loop, spec) for loop in ("plain", "overlapped") for spec in (lookup, drawn)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "circumstances",
    [
        {"num_gpu_blocks_override": 52, "max_num_batched_tokens": 24},
        {"max_num_seqs": 1, "block_size": 1},
    ],
    ids=["chunks and few blocks", "one row"],
)
@pytest.mark.parametrize(("temperature", "method"), [(0.0, "standard"), (1.0, "block")])
@pytest.mark.parametrize(("runner", "loop", "spec"), DRAFTERS)
def test_every_answer_is_of_its_language(
    runner: str, loop: str, spec: Spec, temperature: float, method: str, circumstances: dict[str, Any],
    loaded: LoadedModel, without_drafts: dict[str, tuple[int, ...]],
) -> None:  # fmt: skip
    trace = grammar_trace(temperature)
    with engine(runner, loop, loaded=loaded, **ENGINE | circumstances, **ruled(spec(3), method)) as llm:
        result = run_trace(llm, trace)
        reasons = {"sampled tokens"} if runner == "v1" else {"drafts"}
        assert set(llm.core.device.waits.inside_step) == reasons, "no wait but the grammars' own"
    held_outputs = [result.outputs[one.request_id] for one in trace if one.params.structured_outputs]
    ended = 0
    for output, fields in zip(held_outputs, ANSWERS, strict=True):
        completion = output.outputs[0]
        assert completion.finish_reason in ("stop", "length"), completion.stop_reason
        if completion.finish_reason == "stop":
            ended += 1
            check_answer(fields, completion.text)
    assert ended >= len(ANSWERS) - 3, "most should end in time"
    if "num_gpu_blocks_override" in circumstances:
        assert result.num_preemptions > 0
    if temperature == 0:
        for one in trace:
            assert result.tokens(one.request_id) == without_drafts[one.request_id], one.request_id
    if spec is ngram:
        assert sum(output.metrics.num_accepted_tokens for output in held_outputs) > 0, "drafts are accepted"


def grammar_trace(temperature: float) -> list[TraceRequest]:
    """Every kind of grammar beside free requests."""
    trace = [
        TraceRequest(f"g{i}", tuple(prompt_of(3 + 4 * i, i)), held(temperature=temperature, **fields), arrival=i // 2)
        for i, fields in enumerate(ANSWERS)
    ]
    free = SamplingParams(temperature=temperature, seed=1, max_tokens=70, ignore_eos=True)
    return trace + [TraceRequest(f"f{i}", tuple((prompt_of(5, 50 + i) * 3)[:13]), free) for i in range(4)]


@pytest.fixture(scope="module")
def without_drafts(loaded: LoadedModel) -> dict[str, tuple[int, ...]]:
    """The right greedy answers of `grammar_trace`."""
    with engine("v1", "plain", loaded=loaded, **ENGINE) as llm:
        result = run_trace(llm, grammar_trace(0.0))
    return {request_id: output.outputs[0].token_ids for request_id, output in result.outputs.items()}


@pytest.mark.slow
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("loop", ["plain", "overlapped"])
@pytest.mark.parametrize("method", ["greedy", "probabilistic"])
def test_a_draft_head_changes_no_answer(head: str, loop: str, method: str) -> None:
    """DSpark's drafts, beside a free request."""
    model = load_model(
        ROOT / head / "target", dtype=torch.float32, device=torch.device("cpu"), skip_tokenizer_init=True
    )
    words = dataclasses.replace(model, tokenizer=Tokenizer(letters(), {}, None, [EOS]))
    spec = {"method": "dspark", "model": str(ROOT / head / "draft"), "draft_sample_method": method}
    prompts = [ids(*prompt_of(9, seed)) for seed in range(3)]
    prompts = [{"prompt_token_ids": [token % 30 for token in prompt["prompt_token_ids"]]} for prompt in prompts]
    params = [held(regex="[a-z]{30}", temperature=0), SamplingParams(temperature=0, max_tokens=30, ignore_eos=True),
              held(regex="([a-m][n-z]){15}", temperature=0)]  # fmt: skip
    answers = []
    for speculative_config in (None, spec):
        config = {"max_model_len": 96, "speculative_config": speculative_config}
        with engine("v2", loop, loaded=words, **config) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            answers.append([output.outputs[0].token_ids for output in outputs])
            assert set(llm.core.device.waits.inside_step) == ({"drafts"} if speculative_config else set())
    assert answers[0] == answers[1]
    assert re.fullmatch("[a-z]{30}", outputs[0].outputs[0].text)
    assert sum(output.metrics.num_draft_tokens for output in outputs[::2]) > 20


@pytest.mark.slow
@given(st.data())
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_any_trace(loaded: LoadedModel, data: st.DataObject) -> None:
    draw = data.draw
    chars = st.text("abc", min_size=1, max_size=4)

    def params() -> SamplingParams:
        if draw(st.integers(0, 3)) == 0:
            return SamplingParams(temperature=0, max_tokens=draw(st.integers(1, 20)), ignore_eos=True)
        regex = f"({draw(chars)}|{draw(chars)}|[a-d]){{{draw(st.integers(1, 12))}}}{draw(chars)}?"
        return held(regex=regex, temperature=0, max_tokens=draw(st.integers(1, 30)))

    trace = [
        TraceRequest(
            f"r{i}", tuple(text((draw(chars) * 40)[: draw(st.integers(1, 40))])), params(),
            arrival=draw(st.integers(0, 6)), abort_at=draw(st.none() | st.integers(0, 12)),
        )
        for i in range(draw(st.integers(1, 6)))
    ]  # fmt: skip
    budget = draw(st.integers(4, 64))
    config: dict[str, Any] = {
        "max_num_batched_tokens": budget, "max_num_seqs": draw(st.integers(1, min(4, budget))),
        "block_size": draw(st.sampled_from([1, 3, 4])), "num_gpu_blocks_override": draw(st.integers(85, 110)),
        "enable_prefix_caching": draw(st.booleans()), "max_model_len": 80,
    }  # fmt: skip
    runner, loop = draw(st.sampled_from(SIDES))
    spec = ruled(ngram(draw(st.integers(1, 5))), draw(st.sampled_from(["standard", "block"])))
    with engine(runner, loop, loaded=loaded, **spec, **config) as llm:
        result = run_trace(llm, trace)
    with engine("v1", "plain", loaded=loaded, max_model_len=80) as llm:
        right = llm.generate([ids(*one.prompt) for one in trace], [one.params for one in trace], use_tqdm=False)
    for one, expected in zip(trace, right, strict=True):
        tokens, whole = result.tokens(one.request_id), expected.outputs[0].token_ids
        assert tokens == whole[: len(tokens)] and (one.abort_at is not None or len(tokens) == len(whole))


@sides
def test_logprobs_are_those_without_drafts(runner: str, loop: str, loaded: LoadedModel) -> None:
    prompt, params = ids(*text("abcab" * 4)), held(regex="[abc]{12}!", temperature=0, logprobs=2)
    answers = []
    for spec in ({}, ngram(3)):
        with engine(runner, loop, loaded=loaded, **ENGINE, **spec) as llm:
            answers.append(llm.generate(prompt, params, use_tqdm=False)[0])
    one, other = (answer.outputs[0] for answer in answers)
    assert answers[1].metrics.num_accepted_tokens > 2
    assert one.token_ids == other.token_ids and len(one.token_ids) == 14
    assert one.logprobs is not None and other.logprobs is not None
    for expected, got in zip(one.logprobs, other.logprobs, strict=True):
        for token, entry in expected.items():
            if entry.logprob > -100:  # of those that are forbidden any may be listed
                assert (entry.rank, entry.logprob) == (got[token].rank, pytest.approx(got[token].logprob, abs=1e-4))
