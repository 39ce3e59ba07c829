"""Answers that are held to a grammar, with drafts: those without drafts, and only sooner, whatever else goes on."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine import SamplingParams
from engine.models import LoadedModel, Tokenizer, load_model
from tests.engine.dspark.golden import HEADS, ROOT
from tests.engine.engine_helpers import EOS, TraceRequest, ids, limited_steps, prompt_of, replaced_model, run_trace
from tests.engine.engine_helpers import tiny_llm as engine
from tests.engine.grammars import token_of
from tests.engine.late_device import device_timing
from tests.engine.test_speculation import SIDES, itself, lookup, ngram, one_head
from tests.engine.test_structured_output import ANSWERS, ENGINE, check_answer, held
from tests.engine.test_sync_budget import counted_waits, counting_steps
from tests.engine.tiny_text import letters, raw_bytes, text_model

pytestmark = pytest.mark.slow  # many engines

sides = pytest.mark.parametrize(("runner", "loop"), SIDES)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return text_model(tmp_path_factory.mktemp("bytes"), raw_bytes())


def drawn(k: int) -> dict[str, Any]:
    """The target as its own draft model, which draws: from all tokens, so that a grammar has much to refuse."""
    return {"speculative_config": itself(k)["speculative_config"] | {"draft_sample_method": "probabilistic"}}


Spec = Callable[[int], dict[str, Any]]
EVERYWHERE: list[Spec] = [ngram, itself, one_head]
DRAFTERS = [(*side, spec) for side in SIDES for spec in EVERYWHERE]
DRAFTERS += [("v2", loop, spec) for loop in ("plain", "overlapped") for spec in (lookup, drawn)]


def ruled(spec: dict[str, Any], method: str) -> dict[str, Any]:
    return {"speculative_config": spec["speculative_config"] | {"rejection_sample_method": method}}


def text(chars: str) -> list[int]:
    return [token_of(char) for char in chars]


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
def test_an_answer_ends_where_its_grammar_ends_inside_accepted_drafts(
    runner: str, loop: str, loaded: LoadedModel
) -> None:
    """The prompt says it all before, and goes on behind the end."""
    prompt, params = [*text("abcdef"), EOS] * 3, held(regex="abcdef", temperature=0)
    with engine(runner, loop, loaded=loaded, **ENGINE, **ngram(12)) as llm:
        samples = _count_samples(llm)
        (output,) = llm.generate(ids(*prompt), params, use_tqdm=False)
        llm.core.check_integrity()
    completion = output.outputs[0]
    assert completion.token_ids == (*text("abcdef"), EOS)
    assert (completion.text, completion.finish_reason, completion.stop_reason) == ("abcdef", "stop", None)
    assert output.metrics.num_accepted_tokens >= 6 and len(samples) <= 3


@sides
@pytest.mark.parametrize("method", ["standard", "block"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_that_the_grammar_refuses_is_rejected_there(
    runner: str, loop: str, method: str, temperature: float, loaded: LoadedModel
) -> None:
    """The prompt repeats itself, the grammar wants something else each time."""
    prompt, params = text("abcxabcyabcz" * 2), held(regex="(abc[0-9]){4}", temperature=temperature)
    with engine(runner, loop, loaded=loaded, **ENGINE, **ruled(ngram(5), method)) as llm:
        (output,) = llm.generate(ids(*prompt), params, use_tqdm=False)
    assert re.fullmatch(r"(abc\d){4}", output.outputs[0].text) and output.outputs[0].finish_reason == "stop"
    metrics = output.metrics
    assert metrics.num_accepted_tokens >= 4
    if runner == "v2":  # V1 leaves such drafts out
        assert metrics.num_draft_tokens - metrics.num_accepted_tokens >= 4


@sides
def test_the_only_wait_that_is_added_is_for_drafts_of_requests_with_a_grammar(
    runner: str, loop: str, loaded: LoadedModel
) -> None:
    free = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    prompt = ids(*text("abcab" * 4))
    for params in ([free, free], [free, held(regex="[a-z]{20}", temperature=0, max_tokens=20)]):
        with engine(runner, loop, loaded=loaded, **ENGINE, **ngram(3)) as llm:
            samples = _count_samples(llm)
            llm.generate([prompt, prompt], params, use_tqdm=False)
            waits = llm.core.device.waits
            assert waits.outside_step == ({"output": len(samples)} if runner == "v2" else {})
            if runner == "v1":
                assert waits.inside_step == {"sampled tokens": len(samples)}
            elif params[1] is free:
                assert waits.inside_step == {}
            else:  # none in the step of the prompt, one in each that verifies drafts of the other
                assert waits.inside_step == {"drafts": sum(samples)} and 3 < sum(samples) < len(samples)


@pytest.mark.parametrize("loop", ["plain", "overlapped"])
def test_v2_waits_for_the_drafts_once_and_reads_no_device_tensor(loop: str, loaded: LoadedModel) -> None:
    with engine("v2", loop, loaded=loaded, **ENGINE, **ngram(3)) as llm, counting_steps(llm) as counts:
        samples, waited = _count_samples(llm), llm.core.runner.draft_token_ids
        of_drafts: Counter[str] = Counter()

        def counted(req_ids: list[str]) -> dict[str, list[int]]:
            with counted_waits() as own:
                drafts = waited(req_ids)
            of_drafts.update(own)
            return drafts

        llm.core.runner.draft_token_ids = counted
        params = [held(regex="[a-z]{20}", temperature=t, logprobs=1) for t in (0.0, 1.0)]
        llm.generate([ids(*text("abcab" * 4))] * 2, params, use_tqdm=False)
    assert counts == Counter()
    assert of_drafts["CpuEvent.synchronize"] == sum(samples) > 3
    assert set(of_drafts) <= {"CpuEvent.synchronize", "Event.wait", "Condition.wait"}


@pytest.mark.parametrize("timing", ["threads", "late"])
@sides
def test_a_device_may_be_as_late_as_it_likes(runner: str, loop: str, timing: str, loaded: LoadedModel) -> None:
    """What the host writes too early, or reads, is found by a device that runs only while somebody waits for it."""
    prompts = [ids(*text("abcab" * n)) for n in (2, 3, 4)]
    params = [held(regex="[abc]{20}", temperature=0), SamplingParams(temperature=0, max_tokens=20, ignore_eos=True),
              held(regex="([ab]{2}[a-z]){5}", temperature=0)]  # fmt: skip
    answers = []
    for spec, own_timing in (({}, "threads"), (ngram(3), timing)):
        with device_timing(own_timing), engine(runner, loop, loaded=loaded, **ENGINE, **spec) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            answers.append([output.outputs[0].token_ids for output in outputs])
    assert answers[0] == answers[1]
    assert sum(output.metrics.num_accepted_tokens for output in outputs) > 3


def _count_samples(llm: Any) -> list[bool]:
    """Of each step that samples from now on: whether a request with a grammar has drafts in it."""
    steps: list[bool] = []
    runner = llm.core.runner
    sample = runner.sample_tokens

    def counted(grammar_output: Any = None) -> Any:
        steps.append(grammar_output is not None and max(grammar_output.num_rows, default=0) > 1)
        return sample(grammar_output)

    runner.sample_tokens = counted
    return steps


@sides
def test_a_special_token_among_drafts_is_refused_without_a_word(
    runner: str, loop: str, loaded: LoadedModel, capfd: pytest.CaptureFixture[str]
) -> None:
    """A chat's prompt is full of them; xgrammar writes a line on stderr for each that it has to refuse."""
    prompt = [*text("abc"), 0, *text("x")] * 4
    with engine(runner, loop, loaded=loaded, **ENGINE, **ngram(5)) as llm:
        params = held(regex="(abc[0-9]){4}", temperature=0)
        (output,) = llm.generate(ids(*prompt), params, use_tqdm=False)
    assert re.fullmatch(r"(abc\d){4}", output.outputs[0].text) and output.metrics.num_accepted_tokens >= 4
    assert capfd.readouterr().err == ""


@sides
def test_where_nothing_is_left_the_request_ends_with_an_error(runner: str, loop: str, loaded: LoadedModel) -> None:
    """What the caller allows, the grammar refuses, among drafts; the others of the batch go on."""
    prompt = ids(*[*text("aaab"), EOS] * 4)
    impossible = held(regex="aaab", temperature=0, allowed_token_ids=text("ax"))
    with engine(runner, loop, loaded=loaded, **ENGINE, **ngram(3)) as llm:
        params = [impossible, held(regex="aaab", temperature=0)]
        bad, good = (output.outputs[0] for output in llm.generate([prompt] * 2, params, use_tqdm=False))
    assert (bad.finish_reason, bad.token_ids[:3], len(bad.token_ids)) == ("error", tuple(text("aaa")), 4)
    assert "isn't allowed by the grammar" in str(bad.stop_reason)
    assert (good.text, good.finish_reason) == ("aaab", "stop")


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


@sides
def test_a_failed_step_does_not_lose_the_place_in_the_grammar(runner: str, loop: str, loaded: LoadedModel) -> None:
    prompt, params = ids(*text("abcab" * 4)), held(regex="[a-c]{24}[0-9]{3}", temperature=0)
    with engine(runner, loop, loaded=loaded, **ENGINE, **ngram(2)) as llm, limited_steps(llm):
        expected = llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].text
        llm.add(prompt, params, request_id="a", final_only=True)
        for _ in range(6):
            llm.step()

        def fail(*args: object) -> None:
            raise RuntimeError("no logits today")

        with replaced_model(llm, compute_logits=fail), pytest.raises(RuntimeError, match="no logits today"):
            for _ in range(3):
                llm.step()
        answer = next(output for _ in range(60) for output in llm.step()).outputs[0].text
    assert re.fullmatch("[a-c]{24}[0-9]{3}", answer) and answer == expected


@sides
def test_an_aborted_request_leaves_nothing_behind(runner: str, loop: str, loaded: LoadedModel) -> None:
    prompt = tuple(text("abcab" * 3))
    trace = [TraceRequest(f"r{i}", prompt, held(regex="[a-z]{40}"), abort_at=3 + i) for i in range(4)]
    with engine(runner, loop, loaded=loaded, **ENGINE, **ngram(3)) as llm:
        result = run_trace(llm, [*trace, TraceRequest("kept", prompt, held(regex="[abc]{9}"))])
    assert re.fullmatch("[abc]{9}", result.outputs["kept"].outputs[0].text)


@sides
def test_a_request_may_be_aborted_between_the_phases_of_a_verifying_step(
    runner: str, loop: str, loaded: LoadedModel
) -> None:
    prompt = ids(*text("abcab" * 3))
    with engine(runner, loop, loaded=loaded, **ENGINE, **ngram(3)) as llm, limited_steps(llm):
        for request_id in ("gone", "kept"):
            llm.add(prompt, held(regex="[abc]{12}", temperature=0), request_id=request_id, final_only=True)
        for _ in range(4):
            llm.step()
        for phase in llm.core.phases():
            if phase == "forward":
                llm.abort(["gone"])
        (output,) = [output for _ in range(30) for output in llm.step()]
    assert output.request_id == "kept" and re.fullmatch("[abc]{12}", output.outputs[0].text)


def test_what_accepts_whatever_the_target_says_keeps_no_grammar(loaded: LoadedModel) -> None:
    synthetic = {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2.0}
    spec = {"speculative_config": ngram(2)["speculative_config"] | synthetic}
    with engine("v2", loaded=loaded, **ENGINE, **spec) as llm:
        with pytest.raises(ValueError, match="'synthetic', which accepts drafts.*use 'standard' or 'block'"):
            llm.generate("a", held(regex="ab"), use_tqdm=False)
        assert not llm.core.has_unfinished()
