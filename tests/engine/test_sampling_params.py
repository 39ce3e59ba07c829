"""Sampling parameters: what is refused, with which words, and what a good value becomes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import LLM, SamplingParams, StructuredOutputsParams
from engine.sample.front_door import settle_params, tokenize_bad_words
from engine.sample.logits_processors import LogitsProcessor, LogitsRows
from tests.engine.engine_helpers import assert_empty, close, greedy, ids, make_llm, prompt_of
from tests.engine.tiny_text import letters, text_model

NAN, INF = float("nan"), float("inf")
MANY = list(range(1025))


class Nothing(LogitsProcessor):
    def apply(self, logits: torch.Tensor, rows: LogitsRows) -> torch.Tensor:
        return logits


# -- whatever the model ------------------------------------------------------------------------------------------------

BAD: list[tuple[dict[str, Any], str]] = [
    *[
        ({name: value}, f"{name}=.*between -2 and 2")
        for name in ("presence_penalty", "frequency_penalty")
        for value in (-2.01, 2.01, NAN, INF, "x", None, True)
    ],
    *[({"repetition_penalty": value}, "must be above 0 .1 is off") for value in (0, -1, NAN, INF, "x", None, True)],
    *[({"logit_bias": value}, "logit_bias=.*must be a dict") for value in ([1], 5, "x", (1, 2.0))],
    *[({"logit_bias": {key: 1.0}}, "must be a token id") for key in (-1, 1.5, "x", "-1", "1.5", True, None, "²")],
    *[({"logit_bias": {3: value}}, r"logit_bias\[3\]=.*finite") for value in (NAN, INF, -INF, "x", None, True)],
    ({"logit_bias": dict.fromkeys(range(1025), 1.0)}, "logit_bias has 1025 ids: at most 1024"),
    *[({"allowed_token_ids": value}, "allowed_token_ids=.*list of token ids") for value in (5, "12", 0)],
    *[({"allowed_token_ids": [value]}, "must be token ids") for value in (-1, 1.5, True, "1", None)],
    ({"allowed_token_ids": []}, "allowed_token_ids=.*is empty.*None for none"),
    ({"allowed_token_ids": MANY}, "allowed_token_ids has 1025 ids: at most 1024"),
    *[({"bad_words": value}, "bad_words=") for value in ("word", ["a", ""], ["  "], [1], 5, [None])],
    *[({"bad_words_token_ids": value}, "bad_words_token_ids=") for value in ([[]], [5], [[-1]], [["a"]], 5, [[True]])],
    ({"bad_words_token_ids": [[i] for i in range(129)]}, "129 sequences of 129 tokens.*at most 128 sequences"),
    ({"bad_words_token_ids": [MANY[:600], MANY[1:600]]}, "1199 tokens.*at most.*1024 tokens"),
    ({"bad_words_token_ids": [MANY]}, "1025 ids: at most 1024"),
    *[({"logits_processors": value}, "logits_processors") for value in (Nothing(), [len], [Nothing], [None], "x")],
    *[
        ({name: value}, f"{name}=.*at least 0, -1 for the whole vocabulary")
        for name in ("logprobs", "prompt_logprobs")
        for value in (-2, 1.5, "x", True)
    ],
    *[({"structured_outputs": value}, "structured_outputs=.*StructuredOutputsParams") for value in ("json", 5, [1])],
    ({"structured_outputs": {"jsn": "{}"}}, "unknown structured_outputs key 'jsn'.*json"),
    ({"structured_outputs": {}}, "has nothing: give exactly one of json, regex, choice, grammar, json_object"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "has regex and choice: give exactly one"),
    ({"structured_outputs": {"json": "{"}}, "json='{': is no JSON"),
    ({"structured_outputs": {"json": {"a": {1, 2}}}}, "is no JSON"),
    *[({"structured_outputs": {"json": value}}, "must be a JSON schema") for value in (5, [1], True)],
    *[({"structured_outputs": {"regex": value}}, "regex=.*non-empty string") for value in ("", 5, ["a"])],
    *[({"structured_outputs": {"grammar": value}}, "grammar=.*non-empty string") for value in ("", 5)],
    *[({"structured_outputs": {"choice": value}}, "choice=") for value in ([], "ab", ["a", ""], [1], 5)],
    *[({"structured_outputs": {"json_object": value}}, "json_object=.*True or False") for value in (1, "yes")],
    ({"structured_outputs": {"regex": "a", "disable_any_whitespace": True}}, "means nothing for regex"),
    ({"structured_outputs": {"regex": "a"}, "min_tokens": 3}, "min_tokens=3 with structured_outputs"),
    ({"presence_penalti": 1}, "unknown sampling parameter 'presence_penalti'.*presence_penalty"),
]


@pytest.mark.parametrize(("fields", "message"), BAD, ids=[str(fields)[:60] for fields, _ in BAD])
def test_a_bad_value_is_refused_when_the_parameters_are_made(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(**fields)


def test_good_values_and_what_they_become() -> None:
    nothing = Nothing()
    params = SamplingParams(
        presence_penalty=-2, frequency_penalty=2, repetition_penalty=0.01, logit_bias={"7": 1, 3: -1000, 4: 250.5},
        allowed_token_ids=[5, 3, 5], bad_words=["a b"], bad_words_token_ids=[[1, 1], (2,), [1, 1]],
        logits_processors=[nothing], logprobs=-1, prompt_logprobs=0, structured_outputs={"choice": ["x", "y"]},
    )  # fmt: skip
    assert params.logit_bias == {7: 1.0, 3: -100.0, 4: 100.0}
    assert params.allowed_token_ids == (5, 3)
    assert params.bad_words_token_ids == ((1, 1), (2,))
    assert params.logits_processors == (nothing,)
    assert params.structured_outputs == StructuredOutputsParams(choice=("x", "y"))
    assert params.uses_penalties and not SamplingParams().uses_penalties
    assert hash(params) == hash(dataclasses.replace(params)) and params == dataclasses.replace(params)
    assert params != dataclasses.replace(params, logit_bias={7: 2.0})
    assert SamplingParams(logit_bias={}).logit_bias is None
    assert SamplingParams(logit_bias=dict.fromkeys(range(1024), 0.5)).logit_bias is not None
    assert len(SamplingParams(allowed_token_ids=MANY[:1024]).allowed_token_ids or ()) == 1024
    assert len(SamplingParams(bad_words_token_ids=[[i] for i in range(128)]).bad_words_token_ids) == 128


def test_a_schema_is_the_same_as_a_dict_or_as_text() -> None:
    schema = {"type": "object", "properties": {"é": {"type": "integer"}}}
    text = '{"type":"object",  "properties": {"é": {"type": "integer"}}}'
    as_dict, as_text = StructuredOutputsParams(json=schema), StructuredOutputsParams(json=text)
    assert as_dict == as_text and hash(as_dict) == hash(as_text) and as_dict.kind == "json"
    assert StructuredOutputsParams(json_object=True).kind == "json_object"


def test_a_greedy_request_keeps_what_changes_the_best_token() -> None:
    params = SamplingParams(temperature=0, top_k=5, min_p=0.1, presence_penalty=1, logit_bias={3: 1.0})
    assert (params.top_k, params.min_p) == (0, 0.0)
    assert params.presence_penalty == 1 and params.logit_bias == {3: 1.0}


# -- for one model -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["v1", "v2"])
def shared(request: pytest.FixtureRequest) -> Iterator[LLM]:
    llm = make_llm(request.param)
    yield llm
    close(llm)


BAD_HERE: list[tuple[dict[str, Any], str]] = [
    ({"logit_bias": {384: 1.0}}, "logit_bias has 384: the model's ids go from 0 to 383"),
    ({"allowed_token_ids": [3, 400]}, "allowed_token_ids has 400: the model's ids go from 0 to 383"),
    ({"bad_words_token_ids": [[3], [5, 384]]}, "bad_words_token_ids has 384"),
    ({"stop_token_ids": [384]}, "stop_token_ids has 384"),
    ({"bad_words": ["x"]}, "bad_words need a tokenizer.*use bad_words_token_ids"),
    ({"structured_outputs": {"regex": "a"}}, "structured_outputs need a tokenizer"),
    ({"logprobs": 385}, "logprobs=385: the vocabulary has 384 tokens"),
    ({"prompt_logprobs": 385}, "prompt_logprobs=385: the vocabulary has 384 tokens"),
    ({"allowed_token_ids": [7, 8], "bad_words_token_ids": [[7], [8]]}, "no token is left to sample"),
    ({"allowed_token_ids": [7, 8], "min_tokens": 1, "stop_token_ids": [7, 8]}, "no token is left to sample"),
]


@pytest.mark.parametrize(("fields", "message"), BAD_HERE, ids=[str(fields)[:60] for fields, _ in BAD_HERE])
def test_what_a_model_cannot_do_is_refused_before_anything_is_queued(
    fields: dict[str, Any], message: str, shared: LLM
) -> None:
    bad = greedy(3, **fields)
    with pytest.raises(ValueError, match=message):
        shared.generate([ids(*prompt_of(5)), ids(*prompt_of(6))], [greedy(2), bad], use_tqdm=False)
    with pytest.raises(ValueError, match=message):
        shared.add(ids(*prompt_of(5)), bad)
    assert not shared.core.has_unfinished()
    assert_empty(shared)


def test_the_front_door_settles_for_the_model(tmp_path: Path) -> None:
    loaded = text_model(tmp_path, letters())
    assert loaded.tokenizer is not None
    params = SamplingParams(logprobs=-1, prompt_logprobs=-1, bad_words=["ab", " cd"], bad_words_token_ids=[[9]])
    settled, stop_ids = settle_params(params, 384, loaded.tokenizer, [2])
    a, space = 3, 31
    assert loaded.tokenizer.encode("a b", add_special_tokens=False) == [a, space, a + 1]
    assert (settled.logprobs, settled.prompt_logprobs, stop_ids) == (384, 384, {2})
    assert settled.bad_words_token_ids == (
        (9,), (a, a + 1), (space, a, a + 1), (a + 2, a + 3), (space, a + 2, a + 3)
    )  # fmt: skip
    assert settle_params(dataclasses.replace(params, ignore_eos=True), 384, loaded.tokenizer, [2])[1] == frozenset()
    assert tokenize_bad_words(loaded.tokenizer, ["ab", "ab "]) == [
        (a, a + 1), (space, a, a + 1), (a, a + 1, space), (space, a, a + 1, space)
    ]  # fmt: skip


def test_what_is_settled_is_not_copied_unless_its_caller_could_still_change_it() -> None:
    params, biased = SamplingParams(logprobs=3), SamplingParams(logit_bias={5: 1.0})
    assert settle_params(params, 384, None, [2])[0] is params
    settled, _ = settle_params(biased, 384, None, [2])
    assert isinstance(biased.logit_bias, dict)
    biased.logit_bias[400] = 2.0
    assert settled.logit_bias == {5: 1.0}


def test_words_that_make_too_many_tokens_are_refused_at_the_front_door(tmp_path: Path) -> None:
    loaded = text_model(tmp_path, letters())
    many = SamplingParams(bad_words=[f"{x}{y}" for x in "abcdefgh" for y in "ijklmnopq"])
    with pytest.raises(ValueError, match="144 sequences of .* one form after a space.*at most 128"):
        settle_params(many, 384, loaded.tokenizer, [2])
    with pytest.raises(ValueError, match="2401 ids: at most 1024|4803 tokens"):
        settle_params(SamplingParams(bad_words=["abc" * 800 + "d"]), 384, loaded.tokenizer, [2])


def test_only_the_first_of_n_completions_has_the_prompts_logprobs() -> None:
    from engine.request_maker import child_params

    params = SamplingParams(n=3, seed=5, prompt_logprobs=2, presence_penalty=1)
    children = [child_params(params, index) for index in range(3)]
    assert [child.prompt_logprobs for child in children] == [2, None, None]
    assert [child.seed for child in children] == [5, 6, 7]
    assert all(child.n == 1 and child.presence_penalty == 1 for child in children)
