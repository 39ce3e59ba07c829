"""Drafts on both runners: the answers are those without, and only sooner, whatever else goes on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import LLM, ConfigError, SamplingParams
from engine.hooks import DraftProposed, Event
from engine.models import LoadedModel, load_model
from tests.engine.drafters import CIRCUMSTANCES, OTHERS, PROMPTS, SIDES, itself, ngram, repeating
from tests.engine.engine_helpers import (
    TraceRequest,
    both_loops,
    greedy,
    ids,
    make_llm,
    prompt_of,
    reference,
    run_trace,
    tiny_llm,
)
from tests.engine.late_device import device_timing

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("circumstances", CIRCUMSTANCES)
@pytest.mark.parametrize("k", [1, 4])
@pytest.mark.parametrize(("runner", "loop"), SIDES)
def test_greedy_answers_are_those_without_drafts(runner: str, loop: str, k: int, circumstances: str) -> None:
    trace = [
        TraceRequest(f"r{i}", tuple(prompt), greedy(24 + i), arrival=i % 4) for i, prompt in enumerate(PROMPTS * 2)
    ]
    with tiny_llm(runner, loop, **ngram(k), **CIRCUMSTANCES[circumstances]) as llm:
        result = run_trace(llm, trace)
        waits = llm.core.device.waits.inside_step
        assert waits == {} if runner == "v2" else set(waits) == {"sampled tokens"}
    for request in trace:
        assert result.tokens(request.request_id) == reference(request.prompt, request.params)
        metrics = result.outputs[request.request_id].metrics
        assert metrics.num_drafts == len(metrics.accepted_per_round)
        assert metrics.num_accepted_tokens == sum(metrics.accepted_per_round) <= metrics.num_draft_tokens
        assert all(0 <= accepted <= k for accepted in metrics.accepted_per_round)
    assert sum(output.metrics.num_accepted_tokens for output in result.outputs.values()) > 2, "drafts are accepted"
    if circumstances == "few blocks":
        assert result.num_preemptions > 0


@pytest.mark.parametrize("circumstances", ["together", "chunks", "few blocks", "one row"])
@pytest.mark.parametrize(("runner", "loop", "spec"), OTHERS)
def test_other_drafters_change_no_answer(runner: str, loop: str, spec: Any, circumstances: str) -> None:
    trace = [TraceRequest(f"r{i}", tuple(prompt), greedy(20 + i), arrival=i % 4) for i, prompt in enumerate(PROMPTS)]
    with tiny_llm(runner, loop, **spec(3), **CIRCUMSTANCES[circumstances]) as llm:
        result = run_trace(llm, trace)
        assert set(llm.core.device.waits.inside_step) == ({"sampled tokens"} if runner == "v1" else set())
    for request in trace:
        assert result.tokens(request.request_id) == reference(request.prompt, request.params)
    rounds = [count for output in result.outputs.values() for count in output.metrics.accepted_per_round]
    if spec is itself and circumstances != "few blocks":
        drafts = sum(output.metrics.num_draft_tokens for output in result.outputs.values())
        assert sum(rounds) == drafts, "the target accepts all that it would have said itself"


@pytest.mark.parametrize(("runner", "loop"), SIDES)
def test_accepted_drafts_save_steps(runner: str, loop: str) -> None:
    prompt, params = repeating(20, 7), greedy(40)
    steps = []
    for spec in ({}, ngram(4)):
        with tiny_llm(runner, loop, **spec) as llm:
            (output,) = llm.generate(ids(*prompt), params, use_tqdm=False)
            assert output.outputs[0].token_ids == reference(prompt, params)
            steps.append(llm.core.step_count)
    accepted = output.metrics.num_accepted_tokens
    # Overlapped, the last steps wait for what those in flight may accept.
    idle = 0 if loop == "plain" else 2
    assert accepted > 5 and accepted - idle <= steps[0] - steps[1] <= accepted, (steps, output.metrics)


@pytest.mark.parametrize("seed", range(4))
def test_no_draft_is_lost_on_the_way(seed: int) -> None:
    """Blocks are long, so that steps without drafts are all alike: V1 verifies what it has found behind one of them."""
    accepted = {}
    for runner in ("v1", "v2"):
        with tiny_llm(runner, "plain", block_size=16, **ngram(4)) as llm:
            (output,) = llm.generate(ids(*prompt_of(9, seed)), greedy(54), use_tqdm=False)
            accepted[runner] = [count for count in output.metrics.accepted_per_round if count]
    assert accepted["v1"] == accepted["v2"]


@pytest.mark.parametrize(("runner", "loop"), SIDES)
@pytest.mark.parametrize("min_tokens", [0, 20])
def test_an_answer_ends_at_the_same_stop_inside_accepted_drafts(runner: str, loop: str, min_tokens: int) -> None:
    prompt = repeating(20, 7)
    whole = reference(prompt, greedy(40))
    for stop in sorted(set(whole)):
        params = greedy(40, stop_token_ids=(stop,), min_tokens=min_tokens)
        with tiny_llm(runner, loop, **ngram(5)) as llm:
            (output,) = llm.generate(ids(*prompt), params, use_tqdm=False)
            llm.core.check_integrity()
        assert output.outputs[0].token_ids == reference(prompt, params), stop


@pytest.mark.parametrize(("runner", "loop"), SIDES)
def test_logprobs_and_penalties_are_those_without_drafts(runner: str, loop: str) -> None:
    params = greedy(24, logprobs=3, frequency_penalty=0.4, repetition_penalty=1.1, logit_bias={7: 0.5})
    answers = []
    for spec in ({}, ngram(4)):
        with tiny_llm(runner, loop, **spec) as llm:
            answers.append(llm.generate([ids(*prompt) for prompt in PROMPTS], params, use_tqdm=False))
    for plain, drafted in zip(*answers, strict=True):
        one, other = plain.outputs[0], drafted.outputs[0]
        assert one.token_ids == other.token_ids and len(one.logprobs) == len(other.logprobs) == 24
        for expected, got in zip(one.logprobs, other.logprobs, strict=True):
            assert expected.keys() == got.keys()
            for token, entry in expected.items():
                assert (entry.rank, entry.logprob) == (got[token].rank, pytest.approx(got[token].logprob, abs=1e-4))


@both_loops
def test_sampled_answers_do_not_depend_on_row_or_neighbours(loop: str) -> None:
    """A token of V2 is a function of its request's own seed, place and drafts, and those are of its own tokens. (Where
    drafts have to be left out for others' sake, other noise decides, of the same law.)"""
    params = [SamplingParams(temperature=0.7, top_k=40, seed=i, max_tokens=20, ignore_eos=True) for i in range(6)]
    answers = []
    for circumstances in ("together", "one row", "no prefix cache"):
        with tiny_llm("v2", loop, **ngram(3), **CIRCUMSTANCES[circumstances]) as llm:
            outputs = llm.generate([ids(*prompt) for prompt in PROMPTS], params, use_tqdm=False)
            answers.append([output.outputs[0].token_ids for output in outputs])
    assert answers[0] == answers[1] == answers[2]


@pytest.mark.parametrize("timing", ["threads", "late"])
@pytest.mark.parametrize(("runner", "loop"), SIDES)
def test_a_greedy_request_stays_greedy_when_it_moves_into_a_hot_ones_row(runner: str, loop: str, timing: str) -> None:
    """On V1 the first request's row goes to the last one, in a step with drafts, however late its columns are sent."""
    prompts = [repeating(8, 1), repeating(8, 2), repeating(20, 7)]
    hot = [SamplingParams(temperature=50.0, seed=1, max_tokens=n, ignore_eos=True) for n in (6, 40)]
    with device_timing(timing), tiny_llm(runner, loop, **ngram(4)) as llm:
        outputs = llm.generate([ids(*prompt) for prompt in prompts], [*hot, greedy(40)], use_tqdm=False)
    assert outputs[2].outputs[0].token_ids == reference(prompts[2], greedy(40))
    assert outputs[2].metrics.num_accepted_tokens > 5


@pytest.fixture(scope="module")
def default_model(smollm2: Path) -> LoadedModel:
    return load_model(smollm2, dtype=torch.float32, device=torch.device("cpu"))


@pytest.mark.slow
@both_loops
def test_a_request_with_a_grammar_has_drafts_beside_a_free_one(loop: str, default_model: LoadedModel) -> None:
    prompts = ["one two three four five " * 6 + "one two"] * 2
    params = [
        SamplingParams(temperature=0, max_tokens=24, structured_outputs={"regex": "( (one|two|four|six))+"}),
        SamplingParams(temperature=0, max_tokens=24, ignore_eos=True),
    ]
    answers = []
    for spec in ({}, ngram(4)):
        with smollm2_llm(default_model, loop, spec) as llm:
            answers.append(llm.generate(prompts, params, use_tqdm=False))
            assert set(llm.core.device.waits.inside_step) == ({"drafts"} if spec else set())
    assert [o.outputs[0].text for o in answers[0]] == [o.outputs[0].text for o in answers[1]]
    constrained, free = answers[1]
    assert set(constrained.outputs[0].text.split()) <= {"one", "two", "four", "six"}
    assert constrained.metrics.num_accepted_tokens > 2 and free.metrics.num_accepted_tokens > 5


@contextmanager
def smollm2_llm(loaded: LoadedModel, loop: str, spec: dict[str, Any]) -> Iterator[LLM]:
    llm = LLM(loaded=loaded, max_model_len=128, async_scheduling=loop == "overlapped", **spec)
    try:
        yield llm
    finally:
        llm.close()


@pytest.mark.parametrize(("runner", "loop"), SIDES)
def test_a_snapshot_shows_every_row_of_logits_of_a_verifying_pass(runner: str, loop: str) -> None:
    seen = 0
    with tiny_llm(runner, loop, **ngram(4)) as llm:
        for prompt in PROMPTS[:3]:
            llm.add(ids(*prompt), greedy(24))
        while llm.core.has_unfinished():
            llm.step()
            inputs = llm.core.snapshot().result().inputs
            launched = llm.core.runner.last_batch if runner == "v2" else llm.core.runner.last_inputs
            assert inputs is not None and launched is not None
            rows, end = [], 0
            drafts = launched.num_drafts if runner == "v1" else (np.diff(launched.cu_num_logits_np) - 1).tolist()
            for count, num_drafts in zip(inputs.num_scheduled_tokens, drafts, strict=True):
                end += count
                rows += range(end - 1 - num_drafts, end)
            assert inputs.logits_indices == tuple(rows)
            seen += sum(drafts)
    assert seen > 10


def test_watching_changes_nothing() -> None:
    prompt, params = repeating(20, 7), greedy(30)
    seen: list[Event] = []
    with tiny_llm("v2", "overlapped", **ngram(4)) as llm, llm.hooks.subscribe(Event, seen.append):
        (output,) = llm.generate(ids(*prompt), params, use_tqdm=False)
        assert llm.core.device.waits.inside_step == {} and llm.hooks.errors == []
    assert output.outputs[0].token_ids == reference(prompt, params) and seen


@given(st.data())
@settings(max_examples=25)
def test_any_trace(data: st.DataObject) -> None:
    draw = data.draw
    requests = [
        TraceRequest(
            f"r{i}", tuple(repeating(draw(st.integers(1, 40)), draw(st.integers(0, 3)), draw(st.integers(1, 6)))),
            greedy(draw(st.integers(1, 20))), arrival=draw(st.integers(0, 6)),
            abort_at=draw(st.none() | st.integers(0, 12)),
        )
        for i in range(draw(st.integers(1, 6)))
    ]  # fmt: skip
    budget = draw(st.integers(4, 64))
    config = {
        "max_num_batched_tokens": budget, "max_num_seqs": draw(st.integers(1, min(4, budget))),
        "block_size": draw(st.sampled_from([1, 3, 4])), "num_gpu_blocks_override": draw(st.integers(65, 90)),
        "enable_prefix_caching": draw(st.booleans()),
    }  # fmt: skip
    with tiny_llm(*draw(st.sampled_from(SIDES)), **ngram(draw(st.integers(1, 5))), **config) as llm:
        result = run_trace(llm, requests)
    for request in requests:
        tokens, right = result.tokens(request.request_id), reference(request.prompt, request.params)
        assert tokens == right[: len(tokens)] and (request.abort_at is not None or len(tokens) == len(right))


def test_what_no_runner_carries_out_is_refused() -> None:
    with pytest.raises(ConfigError, match="async_scheduling=False"):
        make_llm("v1", "overlapped", **ngram(2))
    drawn = {**itself(2)["speculative_config"], "draft_sample_method": "probabilistic"}
    with pytest.raises(ConfigError, match="greedily only"):
        make_llm("v1", "plain", speculative_config=drawn)
    with pytest.raises(ConfigError, match="no head is known"):
        make_llm("v2", "plain", speculative_config={"method": "mtp"})


@pytest.mark.parametrize(("runner", "loop"), SIDES)
def test_a_snapshot_shows_the_drafts_that_the_next_step_verifies(runner: str, loop: str) -> None:
    prompt, shown = repeating(20, 7), []
    with tiny_llm(runner, loop, **ngram(4)) as llm:
        request_id = llm.add(ids(*prompt), greedy(30))
        seen: list[DraftProposed] = []
        with llm.hooks.subscribe(DraftProposed, seen.append):
            while llm.core.has_unfinished():
                llm.step()
                rows = llm.core.snapshot().result().rows
                shown += [row.draft_token_ids for row in rows if row.request_id == request_id and row.draft_token_ids]
    judged = [event.token_ids for event in seen]
    # Of what is shown the step takes what it has room for.
    assert len(judged) > 3 and all(any(own[: len(drafts)] == drafts for own in shown) for drafts in judged)
