"""Bad prompts and requests are a clear error, and nothing is lost: the next request gets the right tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from engine import LLM, ConfigError, SamplingParams
from tests.engine.engine_helpers import (
    assert_empty,
    greedy,
    ids,
    make_llm,
    prompt_of,
    reference,
    tokens_of,
)

GOOD = prompt_of(7, 5)


@pytest.fixture(scope="module", params=["v1", "v2"])
def shared(request: pytest.FixtureRequest) -> Iterator[LLM]:
    llm = make_llm(request.param, num_gpu_blocks_override=13)
    yield llm
    llm.close()


@pytest.fixture
def llm(shared: LLM) -> Iterator[LLM]:
    """After each test: nothing stayed behind, and the engine still answers rightly."""
    yield shared
    assert_empty(shared)
    assert tokens_of(shared.generate(ids(*GOOD), greedy(5), use_tqdm=False)) == [reference(GOOD, greedy(5))]


# -- prompts ---------------------------------------------------------------------------------------------------------

BAD_PROMPTS = {
    "no ids": (ids(), ValueError, "empty"),
    "too long": (ids(*prompt_of(64)), ValueError, "64 tokens.*max_model_len=64"),
    "far too long": (ids(*prompt_of(500)), ValueError, "500 tokens"),
    "id above the vocabulary": (
        ids(5, 384),
        ValueError,
        r"prompt_token_ids\[1\] = 384: must be a token id from 0 to 383",
    ),
    "negative id": (ids(-1, 5), ValueError, r"prompt_token_ids\[0\] = -1"),
    "a bool for an id": (ids(5, True), ValueError, r"prompt_token_ids\[1\] = True"),
    "a float for an id": (ids(5, 2.0), ValueError, r"prompt_token_ids\[1\] = 2.0"),
    "None for an id": (ids(5, None), ValueError, r"prompt_token_ids\[1\] = None"),
    "ids in a string": ({"prompt_token_ids": "12"}, TypeError, "must be a list of token ids, got str"),
    "one number": ({"prompt_token_ids": 12}, TypeError, "must be a list of token ids, got int"),
    "no known key": (
        {"text": "hello"},
        ValueError,
        "has 'prompt' or 'prompt_token_ids' and nothing else, got the keys.*text",
    ),
    "no key": ({}, ValueError, r"got the keys \[\]"),
    "no text": ({"prompt": None}, ValueError, "got the keys"),
    "a number for a text": ({"prompt": 5}, TypeError, "text must be a string, got int"),
    "a misspelt key beside a right one": (
        {"prompt": "x", "promt_token_ids": [1]},
        ValueError,
        "nothing else, got the keys .*'promt_token_ids'",
    ),
    "a negative id of numpy": (ids(1, np.int64(-1)), ValueError, r"prompt_token_ids\[1\]"),
    "no prompt at all": (None, TypeError, "prompts must be"),
    "a number": (17, TypeError, "prompts must be"),
    "a list of numbers": ([17, 18], TypeError, "a prompt is a string or .* got int"),
    "a list of lists": ([[1, 2]], TypeError, "got list"),
    "text without a tokenizer": ("hello", ConfigError, "without a tokenizer"),
}


@pytest.mark.parametrize("name", BAD_PROMPTS)
def test_a_bad_prompt(name: str, llm: LLM) -> None:
    prompt, error, message = BAD_PROMPTS[name]
    with pytest.raises(error, match=message):
        llm.generate(prompt, greedy(4), use_tqdm=False)
    if name not in ("no prompt at all", "a number", "a list of numbers", "a list of lists"):
        with pytest.raises(error, match=message):
            next(llm.stream(prompt, greedy(4)))
        # All or nothing: the good prompts of the same call don't run either.
        with pytest.raises(error, match=message):
            llm.generate([ids(*GOOD), prompt, ids(*GOOD)], greedy(4), use_tqdm=False)


def test_a_request_that_can_never_fit_says_why_and_what_to_do(llm: LLM) -> None:
    with pytest.raises(ValueError, match="can never fit.*15 KV blocks.*12 usable.*max_tokens to at most 29"):
        llm.generate(ids(*prompt_of(20)), greedy(40), use_tqdm=False)
    with pytest.raises(ValueError, match="can never fit.*shorten the prompt"):
        llm.generate(ids(*prompt_of(60)), greedy(1), use_tqdm=False)
    output = llm.generate(ids(*prompt_of(20)), greedy(29), use_tqdm=False)[0].outputs[0]
    assert output.token_ids == reference(prompt_of(20), greedy(29))


def test_prompts_and_params_must_pair_up(llm: LLM) -> None:
    with pytest.raises(ValueError, match="2 prompts and 3 sampling_params"):
        llm.generate([ids(*GOOD)] * 2, [greedy(2)] * 3, use_tqdm=False)
    with pytest.raises(TypeError, match="must be a SamplingParams, got dict"):
        llm.generate([ids(*GOOD)], [{"temperature": 0}], use_tqdm=False)
    with pytest.raises(TypeError, match="SamplingParams or a list of them, got int"):
        llm.generate([ids(*GOOD)], 3, use_tqdm=False)
    assert llm.generate([], greedy(2), use_tqdm=False) == []


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        *[({"priority": value}, "priority=") for value in ("high", 1.5, None, True, 2**63)],
        *[({"request_id": value}, "request_id=") for value in ("", 5)],
    ],
    ids=str,
)
def test_a_request_that_could_never_be_scheduled_is_not_queued(
    llm: LLM, keywords: dict[str, Any], message: str
) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        llm.add(ids(*GOOD), greedy(2), **keywords)


def test_ids_in_use_are_refused(llm: LLM) -> None:
    llm.add(ids(*GOOD), greedy(5), request_id="a")
    with pytest.raises(ValueError, match="'a' is in use"):
        llm.add(ids(*GOOD), greedy(5), request_id="a")
    tokens = [output for _ in range(8) for output in llm.step()][-1].outputs[0].token_ids
    assert tokens == reference(GOOD, greedy(5))
    llm.add(ids(*GOOD), greedy(5), request_id="a")
    llm.abort(["a", "a", "unknown"])


def test_an_id_of_a_completion_is_refused_while_its_parent_runs(llm: LLM) -> None:
    """With n=2, `1_a` ends first; a caller's own request of that name would be taken for it."""
    stop = range_list(40)[3:]
    llm.add(
        ids(*GOOD), SamplingParams(n=2, temperature=1.0, seed=1, max_tokens=12, stop_token_ids=stop), request_id="a"
    )
    with pytest.raises(ValueError, match="'1_a' belongs to an unfinished request"):
        llm.add(ids(*GOOD), greedy(3), request_id="1_a")
    llm.add(ids(*prompt_of(5)), greedy(30), request_id="0_b")
    with pytest.raises(ValueError, match="'0_b' belongs to an unfinished request"):
        llm.add(ids(*GOOD), SamplingParams(n=2), request_id="b")
    llm.step()
    llm.abort(["a", "0_b"])


def test_bad_stop_ids_and_logprobs_for_this_model(llm: LLM) -> None:
    for params, message in (
        (greedy(3, stop_token_ids=[384]), "stop_token_ids has 384: the model's ids go from 0 to 383"),
        (greedy(3, stop=["x"]), "stop strings need a tokenizer"),
        (greedy(3, logprobs=385), "logprobs=385: the vocabulary has 384"),
        (greedy(200, min_tokens=2, stop_token_ids=range_list(130)), "at most 128 can be held back"),
    ):
        with pytest.raises(ValueError, match=message):
            llm.generate(ids(*GOOD), params, use_tqdm=False)


def range_list(n: int) -> list[int]:
    return list(range(n))
