"""An answer ends inside accepted drafts: what they brought behind its end is in no output and no event."""

from __future__ import annotations

from typing import Any

import pytest

from engine import LLM, SamplingParams
from engine.hooks import OutputDelivered, Sampled
from engine.models import LoadedModel
from tests.engine.engine_helpers import assert_empty, greedy, ids, tiny_llm
from tests.engine.test_speculation import SIDES, itself, repeating
from tests.engine.tiny_text import letters, text_model

pytestmark = pytest.mark.slow

PROMPT = repeating(20, 7)
sides = pytest.mark.parametrize(("runner", "loop"), SIDES)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return text_model(tmp_path_factory.mktemp("letters"), letters())


def answer(llm: LLM, params: SamplingParams) -> Any:
    (output,) = llm.generate(ids(*PROMPT), params, use_tqdm=False)
    assert_empty(llm)
    return output


@sides
def test_a_stop_string(runner: str, loop: str, loaded: LoadedModel) -> None:
    inside = 0
    with tiny_llm("v1", "plain", loaded=loaded) as plain, tiny_llm(runner, loop, loaded=loaded, **itself(5)) as drafted:
        whole = answer(plain, greedy(30)).outputs[0].text
        for begin in range(0, len(whole) - 3, 6):
            stop = whole[begin : begin + 3]
            params = greedy(30, stop=[stop], logprobs=1)
            right, events = answer(plain, params).outputs[0], []
            with drafted.hooks.subscribe((Sampled, OutputDelivered), events.append):
                output = answer(drafted, params)
            got = output.outputs[0]
            assert (got.token_ids, got.text) == (right.token_ids, right.text), stop
            assert (got.finish_reason, got.stop_reason) == ("stop", stop)
            assert [next(iter(entry)) for entry in got.logprobs] == list(right.token_ids)
            sampled = [(event.position, event.token_id) for event in events if isinstance(event, Sampled)]
            assert sampled == list(enumerate(right.token_ids, len(PROMPT)))
            delivered = [t for event in events if isinstance(event, OutputDelivered) for t in event.new_token_ids]
            assert tuple(delivered) == right.token_ids
            inside += sum(output.metrics.accepted_per_round) + output.metrics.num_drafts + 1 > len(right.token_ids)
    assert inside > 2, "some should end before the last of the drafts that were accepted"


@sides
def test_a_stop_token_with_logprobs(runner: str, loop: str, loaded: LoadedModel) -> None:
    with tiny_llm("v1", "plain", loaded=loaded) as plain, tiny_llm(runner, loop, loaded=loaded, **itself(5)) as drafted:
        for stop in sorted(set(answer(plain, greedy(30)).outputs[0].token_ids))[::3]:
            params = greedy(30, stop_token_ids=(stop,), logprobs=2)
            right, got = answer(plain, params).outputs[0], answer(drafted, params).outputs[0]
            assert got.token_ids == right.token_ids
            assert [list(entry) for entry in got.logprobs] == [list(entry) for entry in right.logprobs]


@sides
def test_a_stop_string_before_another_end(runner: str, loop: str, loaded: LoadedModel) -> None:
    """The drafts reach a stop token and the longest length too, in the same step, behind the string."""
    drafts = {"loaded": loaded, **itself(12)}
    with tiny_llm("v1", "plain", loaded=loaded) as plain, tiny_llm(runner, loop, **drafts) as drafted:
        whole = answer(plain, greedy(12)).outputs[0]
        stop = whole.text[2:4]
        for other in ({"stop_token_ids": whole.token_ids[6:]}, {}):
            params = greedy(12, stop=[stop], **other)
            right, got = answer(plain, params).outputs[0], answer(drafted, params).outputs[0]
            assert got == right and got.stop_reason == stop and len(got.token_ids) < 6
