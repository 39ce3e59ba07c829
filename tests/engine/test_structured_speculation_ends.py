"""How answers that are held to a grammar end, with drafts: where it ends, refused, in error, failed, aborted."""

from __future__ import annotations

import re

import pytest

from engine.models import LoadedModel
from tests.engine.drafters import ngram, ruled, sides
from tests.engine.engine_helpers import EOS, TraceRequest, ids, limited_steps, run_trace
from tests.engine.engine_helpers import tiny_llm as engine
from tests.engine.grammars import ENGINE, answer_behind_a_failed_step, count_samples, held, text

pytestmark = pytest.mark.slow  # many engines


@sides
def test_an_answer_ends_where_its_grammar_ends_inside_accepted_drafts(
    runner: str, loop: str, loaded: LoadedModel
) -> None:
    """The prompt says it all before, and goes on behind the end."""
    prompt, params = [*text("abcdef"), EOS] * 3, held(regex="abcdef", temperature=0)
    with engine(runner, loop, loaded=loaded, **ENGINE, **ngram(12)) as llm:
        samples = count_samples(llm)
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
def test_a_failed_step_does_not_lose_the_place_in_the_grammar(runner: str, loop: str, loaded: LoadedModel) -> None:
    prompt, params = ids(*text("abcab" * 4)), held(regex="[a-c]{24}[0-9]{3}", temperature=0)
    with engine(runner, loop, loaded=loaded, **ENGINE, **ngram(2)) as llm, limited_steps(llm):
        expected, answer = answer_behind_a_failed_step(llm, prompt, params)
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
