"""LLM: prompts, parameters, results, chat, metrics, step by step."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pytest

from engine import LLM, CompletionOutput, Logprob, RequestOutput, SamplingParams
from engine.models import LoadedModel
from tests.engine.engine_helpers import (
    assert_empty,
    both_loops,
    both_runners,
    greedy,
    ids,
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


# -- generate --------------------------------------------------------------------------------------------------------


def test_one_prompt_or_many_in_their_order(llm: LLM) -> None:
    one = llm.generate(ids(*PROMPTS[0]), greedy(5), use_tqdm=False)
    # The longest first: it ends last and must still come first.
    many = llm.generate([ids(*prompt) for prompt in PROMPTS], [greedy(9), greedy(2), greedy(5)], use_tqdm=False)
    assert tokens_of(one) == [reference(PROMPTS[0], greedy(5))]
    assert tokens_of(many) == [reference(p, greedy(n)) for p, n in zip(PROMPTS, (9, 2, 5), strict=True)]
    assert [output.prompt_token_ids for output in many] == [tuple(prompt) for prompt in PROMPTS]
    assert len({output.request_id for output in [*one, *many]}) == 4


def test_whole_numbers_of_numpy_are_token_ids(llm: LLM) -> None:
    output = llm.generate({"prompt_token_ids": list(np.array(PROMPTS[0]))}, greedy(5), use_tqdm=False)
    assert tokens_of(output) == [reference(PROMPTS[0], greedy(5))]
    assert {type(token) for token in output[0].prompt_token_ids} == {int}


def test_one_id_may_be_aborted_without_a_list(llm: LLM) -> None:
    llm.add(ids(*PROMPTS[0]), greedy(9), request_id="gone")
    llm.abort("gone")
    assert not llm.core.has_unfinished()


def test_a_result_has_vllms_fields(llm: LLM) -> None:
    output = llm.generate("hello world", greedy(6, logprobs=2), use_tqdm=False)[0]
    assert isinstance(output, RequestOutput) and output.prompt == "hello world" and output.finished
    assert output.prompt_token_ids == tuple(llm.get_tokenizer().encode("hello world"))
    completion = output.outputs[0]
    assert isinstance(completion, CompletionOutput) and completion.index == 0 and completion.finished
    assert completion.text == llm.get_tokenizer().decode(completion.token_ids)
    assert completion.finish_reason == "length" and completion.stop_reason is None
    assert completion.logprobs is not None
    for token, entry in zip(completion.token_ids, completion.logprobs, strict=True):
        assert isinstance(entry[token], Logprob) and entry[token].rank == 1
        assert entry[token].decoded_token == llm.get_tokenizer().token_text(token)


def test_text_in_a_dictionary_is_text(llm: LLM) -> None:
    plain = llm.generate("abc", greedy(4), use_tqdm=False)[0]
    as_dict = llm.generate({"prompt": "abc"}, greedy(4), use_tqdm=False)[0]
    both = llm.generate(
        {"prompt": "shown", "prompt_token_ids": list(plain.prompt_token_ids)}, greedy(4), use_tqdm=False
    )[0]
    assert plain.outputs == as_dict.outputs == both.outputs
    assert as_dict.prompt == "abc" and both.prompt == "shown"


def test_a_bad_prompt_among_good_ones_leaves_nothing(llm: LLM) -> None:
    with pytest.raises(ValueError, match="the prompt is empty"):
        llm.generate(["abc", "", "abc"], greedy(4), use_tqdm=False)
    assert_empty(llm)


def test_without_parameters_it_samples_sixteen(llm: LLM) -> None:
    output = llm.generate("abc", use_tqdm=False)[0].outputs[0]
    assert len(output.token_ids) == 16 or output.finish_reason == "stop"


def test_the_bar_counts_prompts(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate([ids(*prompt) for prompt in PROMPTS], greedy(3), use_tqdm=False)
    assert capsys.readouterr() == ("", "")
    llm.generate([ids(*prompt) for prompt in PROMPTS], greedy(3))
    shown = capsys.readouterr().err
    assert "Processed prompts" in shown and "3/3" in shown


def test_metrics_are_filled_and_in_order(llm: LLM) -> None:
    before = time.monotonic()
    output = llm.generate(ids(*PROMPTS[1]), greedy(6), use_tqdm=False)[0]
    metrics, after = output.metrics, time.monotonic()
    times = [
        before,
        metrics.arrival_time,
        metrics.first_scheduled_time,
        metrics.first_token_time,
        metrics.last_token_time,
        after,
    ]
    assert None not in times and times == sorted(times) and metrics.num_preemptions == 0
    assert metrics.first_token_time < metrics.last_token_time


def test_cached_tokens_are_counted(llm: LLM) -> None:
    first, second = (llm.generate(ids(*prompt_of(13, 8)), greedy(3), use_tqdm=False)[0] for _ in range(2))
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 12)
    assert first.outputs == second.outputs


def test_ids_without_a_tokenizer() -> None:
    with tiny_llm("v2", skip_tokenizer_init=True) as llm:
        output = llm.generate(ids(*PROMPTS[0]), greedy(4, logprobs=1), use_tqdm=False)[0]
        assert output.prompt is None and output.outputs[0].text == ""
        assert all(value.decoded_token is None for value in output.outputs[0].logprobs[0].values())


# -- chat ------------------------------------------------------------------------------------------------------------

CHAT = [{"role": "user", "content": "hi there"}]


def test_chat_goes_through_the_template(llm: LLM) -> None:
    chat = llm.chat(CHAT, greedy(5), use_tqdm=False)
    plain = llm.generate("[user]hi there[assistant]", greedy(5), use_tqdm=False)
    assert chat[0].prompt == "[user]hi there[assistant]" and chat[0].prompt_token_ids == plain[0].prompt_token_ids
    assert chat[0].outputs == plain[0].outputs


def test_a_list_of_conversations(llm: LLM) -> None:
    other = [*CHAT, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "why"}]
    both = llm.chat([CHAT, other], greedy(5), use_tqdm=False)
    assert [output.prompt for output in both] == [
        "[user]hi there[assistant]",
        "[user]hi there[assistant]yes[user]why[assistant]",
    ]
    assert both[0].outputs == llm.chat(CHAT, greedy(5), use_tqdm=False)[0].outputs
    assert llm.chat(CHAT, greedy(2), False, add_generation_prompt=False)[0].prompt == "[user]hi there"


def test_chat_refuses_nothing_to_say(llm: LLM) -> None:
    for empty in ([], [[]]):
        with pytest.raises(ValueError, match="no messages|conversation is empty"):
            llm.chat(empty, greedy(2), use_tqdm=False)
    with pytest.raises(ValueError, match="role"):
        llm.chat([{"content": "x"}], greedy(2), use_tqdm=False)
    for odd in ("hi", CHAT[0], None):
        with pytest.raises(TypeError, match="chat takes a list"):
            llm.chat(odd, greedy(2))  # type: ignore[arg-type]


# -- step by step ----------------------------------------------------------------------------------------------------


@both_runners
@both_loops
def test_add_step_abort(runner: str, loop: str) -> None:
    with tiny_llm(runner, loop) as llm:
        name = llm.add(ids(*PROMPTS[0]), greedy(6))
        other = llm.add(ids(*PROMPTS[1]), greedy(20), request_id="other")
        assert (name, other) == ("0", "other")
        outputs: dict[str, list[RequestOutput]] = {"0": [], "other": []}
        while not (outputs["0"] and outputs["0"][-1].finished):
            for output in llm.step():
                outputs[output.request_id].append(output)
        llm.abort(["other", "0", "never seen"])
        assert outputs["0"][-1].outputs[0].token_ids == reference(PROMPTS[0], greedy(6))
        assert not llm.core.has_unfinished()
        while llm.core.in_flight:
            assert llm.step() == []
        assert_empty(llm)


def test_a_number_that_the_caller_took_is_no_id_of_the_engines() -> None:
    with tiny_llm("v2") as llm:
        for request_id in ("0", "2", "1_3"):
            llm.add(ids(*PROMPTS[0]), greedy(9), request_id=request_id)
        two = SamplingParams(n=2, max_tokens=2, seed=1)
        assert [llm.add(ids(*PROMPTS[1]), params) for params in (greedy(2), two, greedy(2))] == ["1", "4", "5"]
        (output,) = llm.generate(ids(*PROMPTS[2]), greedy(3), use_tqdm=False)
        assert output.outputs[0].token_ids == reference(PROMPTS[2], greedy(3))
        with pytest.raises(ValueError, match="request id '0' is in use"):
            llm.add(ids(*PROMPTS[0]), greedy(9), request_id="0")
        while llm.core.has_unfinished():
            llm.step()
        assert_empty(llm)


@both_runners
def test_the_more_urgent_goes_first(runner: str) -> None:
    with tiny_llm(runner, "plain", max_num_seqs=1, scheduling_policy="priority") as llm:
        for index, priority in enumerate((2, 1, 0)):
            llm.add(ids(*PROMPTS[index]), greedy(3), request_id=str(index), priority=priority)
        order = [output.request_id for _ in range(12) for output in llm.step() if output.finished]
    assert order == ["2", "1", "0"]
