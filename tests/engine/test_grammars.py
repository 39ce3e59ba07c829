"""Structured output: the grammar itself, what may come next and when it ends."""

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine import SamplingParams, StructuredOutputsParams
from engine.models import LoadedModel, Tokenizer, read_checkpoint
from engine.sample.grammar_vocabulary import grammar_vocabulary, without_control_characters
from engine.sample.structured_output import StructuredOutputManager
from engine.sched_output import GrammarOutput
from tests.engine.engine_helpers import EOS, VOCAB, tiny_llm
from tests.engine.grammars import CASES, NO_STOPS, allowed, alphabet, byte_of, started, token_of, walk
from tests.engine.random_schemas import fits, random_schema
from tests.engine.tiny_text import letters, text_model

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def tokenizer(loaded: LoadedModel) -> Tokenizer:
    assert loaded.tokenizer is not None
    return loaded.tokenizer


@pytest.fixture
def manager(tokenizer: Tokenizer) -> Iterator[StructuredOutputManager]:
    manager = StructuredOutputManager(tokenizer, VOCAB)
    yield manager
    manager.close()


@pytest.mark.parametrize("part", range(4))
def test_random_outputs_of_200_random_schemas_parse_and_fit(
    part: int, manager: StructuredOutputManager, tokenizer: Tokenizer
) -> None:
    rng = random.Random(part)
    for number in range(50):
        schema = random_schema(rng)
        request = started(manager, json=schema, disable_any_whitespace=number % 4 > 0)
        text = tokenizer.decode(walk(manager, request, rng))
        assert fits(json.loads(text), schema), (schema, text)


@pytest.mark.parametrize("name", CASES)
def test_random_outputs_of_expressions_choices_and_grammars_match(
    name: str, manager: StructuredOutputManager, tokenizer: Tokenizer
) -> None:
    fields, pattern = CASES[name]
    for seed in range(20):
        text = tokenizer.decode(walk(manager, started(manager, **fields), random.Random(seed)), False)
        assert re.fullmatch(pattern, text), text


def test_any_json_object(manager: StructuredOutputManager) -> None:
    request = started(manager, json_object=True)
    for char in '{"a": [1, {"b": null}], "c": "d"}':
        assert request.accept_token(token_of(char)), (char, request.error)
    assert EOS in allowed(manager, request)
    assert not started(manager, json_object=True).accept_token(token_of("["))


def test_bits_of_ids_that_write_nothing_are_never_set(manager: StructuredOutputManager, tokenizer: Tokenizer) -> None:
    request = started(manager, regex="(.|\n)*")
    bits = np.unpackbits(manager.grammar_bitmask([request]).view(np.uint8), bitorder="little")
    assert tokenizer.vocab_size == 259
    assert not bits[[0, 1]].any() and bits[EOS] and not bits[259:].any()
    assert bits[3:259].sum() > 128


def test_what_follows_drafts_and_nothing_else_changes(manager: StructuredOutputManager) -> None:
    first, second = started(manager, regex="abcd"), started(manager, regex="x+")
    drafts = [[token_of("a"), token_of("b"), token_of("z"), token_of("c")], []]
    rows = manager.grammar_bitmask([first, second], drafts)
    assert rows.shape == (6, 12) and rows.dtype == np.int32
    bits = np.unpackbits(rows.view(np.uint8), axis=1, bitorder="little")
    assert [np.flatnonzero(row).tolist() for row in bits[:3]] == [[token_of(c)] for c in "abc"]
    assert bits[3:5].all(), "behind a draft that can't be accepted anything may stand"
    assert np.flatnonzero(bits[5]).tolist() == [token_of("x")]
    for char in "abcd":
        assert first.accept_token(token_of(char))
    ended = manager.grammar_bitmask([first], [[EOS, token_of("a")]])
    bits = np.unpackbits(ended.view(np.uint8), axis=1, bitorder="little")
    assert np.flatnonzero(bits[0]).tolist() == [EOS] and bits[1:].all()
    assert not first.is_terminated
    assert first.accept_token(EOS) and first.is_terminated


def test_how_many_drafts_a_grammar_goes_along_with(manager: StructuredOutputManager) -> None:
    request = started(manager, regex="ab(c|d)")
    a, b, c, z = (token_of(char) for char in "abcz")
    for drafts, count in (
        ([], 0), ([z], 0), ([a], 1), ([a, z, c], 1), ([a, b, c], 3), ([a, b, c, EOS], 4), ([a, b, c, EOS, a], 4),
        ([-1, a], 0), ([a, -1, c], 1), ([a, EOS], 1),
    ):  # fmt: skip
        assert request.num_allowed(drafts) == count, drafts
        rows = manager.grammar_bitmask([request], [drafts])
        free = np.unpackbits(rows.view(np.uint8), axis=1, bitorder="little").all(axis=1)
        ended = drafts[:count].count(EOS)
        assert free.tolist() == [False] * (count + 1 - ended) + [True] * (len(drafts) - count + ended), drafts
        assert allowed(manager, request) == [a], "rolled back"
    assert not request.accept_token(z) and request.num_allowed([a]) == 0


def test_bitmaps_find_their_rows_of_logits() -> None:
    output = GrammarOutput(("c", "a"), np.zeros((5, 1), dtype=np.int32), (3, 2))
    assert output.logits_rows({"a": 0, "b": 4, "c": 6}).tolist() == [6, 7, 8, 0, 1]
    assert GrammarOutput((), np.zeros((0, 1), dtype=np.int32), ()).logits_rows({"a": 0}).shape == (0,)


def test_a_refused_token_is_an_error_and_stays_one(manager: StructuredOutputManager) -> None:
    request = started(manager, regex="ab")
    assert not request.accept_token(token_of("b"))
    assert "isn't allowed by the grammar at this place" in str(request.error)
    assert not request.accept_token(token_of("a"))
    assert allowed(manager, request) == list(range(384))


def test_vocabularies(tokenizer: Tokenizer, tmp_path: Path) -> None:
    vocabulary, encoding = grammar_vocabulary(tokenizer, VOCAB)
    assert encoding == "byte_level" and len(vocabulary) == VOCAB
    assert vocabulary[:3] == ["", "", ""] and vocabulary[token_of("a")] == "a" and set(vocabulary[259:]) == {""}
    words = text_model(tmp_path, letters()).tokenizer
    assert words is not None and grammar_vocabulary(words, VOCAB)[0][31] == "Ġ"


def test_json_is_free_of_control_characters(manager: StructuredOutputManager) -> None:
    """Inside a string they are no JSON; line ends between its parts are."""
    limited = started(manager, json={"type": "string", "maxLength": 3})
    assert limited.accept_token(token_of('"'))
    written = {byte_of(token) for token in allowed(manager, limited)}
    assert min(written) == 0x20 and ord("\\") not in written
    tab, newline = (3 + sorted(alphabet()).index(chr(0x100 + byte)) for byte in (9, 10))
    json_object = started(manager, json_object=True)
    assert json_object.accept_token(token_of("{"))
    assert newline in allowed(manager, json_object) and tab not in allowed(manager, json_object)
    assert tab in allowed(manager, started(manager, regex="(.|\n)*"))
    raw = without_control_characters(["a\tb", "\n", "é", "<0x09>"], "raw")
    assert raw == ["", "\n", "é", "<0x09>"]
    assert without_control_characters(["<0x09>", "<0x0A>", "▁"], "byte_fallback") == ["", "<0x0A>", "▁"]


def test_a_sentencepiece_vocabulary() -> None:
    tokens = ["<unk>", "<s>", "</s>", "<0x0A>", "▁", "a", "b", "ab", "▁ab"]
    sentencepiece = Tokenizer.from_gguf({
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.scores": [0.0] * 7 + [-1, -2],
        "tokenizer.ggml.token_type": [2, 3, 3, 6, 1, 1, 1, 1, 1], "tokenizer.ggml.eos_token_id": 2,
    })  # fmt: skip
    assert grammar_vocabulary(sentencepiece, 10) == (["<unk>", "", "", *tokens[3:], ""], "byte_fallback")
    manager = StructuredOutputManager(sentencepiece, 10)
    request = manager.start(StructuredOutputsParams(regex="ab ab\n"), NO_STOPS)
    request._compiled.result(30)
    for token, choices in ((7, [5, 7]), (8, [4, 8]), (3, [3]), (2, [2])):
        bits = np.unpackbits(manager.grammar_bitmask([request]).view(np.uint8), bitorder="little")
        assert np.flatnonzero(bits).tolist() == choices
        assert request.accept_token(token)
    assert request.is_terminated
    manager.close()


def test_a_grammar_is_compiled_once_and_a_failure_again(
    manager: StructuredOutputManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    compile_ = manager._compile

    def compiled(params: StructuredOutputsParams) -> Any:
        calls.append(params)
        if len(calls) == 1:
            raise MemoryError("too large")
        return compile_(params)

    monkeypatch.setattr(manager, "_compile", compiled)
    params = StructuredOutputsParams(regex="ab?")
    failed = manager.start(params, NO_STOPS)
    with pytest.raises(MemoryError):
        failed._compiled.result(30)
    assert failed.is_ready and not failed.accept_token(3)
    assert failed.error == "the grammar can't be compiled: too large"
    for _ in range(3):
        started(manager, regex="ab?")
    assert len(calls) == 2


def test_a_grammar_needs_a_token_that_ends_it(tokenizer: Tokenizer) -> None:
    endless = Tokenizer(tokenizer.backend, {}, None, [])
    manager = StructuredOutputManager(endless, VOCAB)
    with pytest.raises(ValueError, match="a token that ends the output; give stop_token_ids"):
        manager.start(StructuredOutputsParams(regex="ab"), NO_STOPS)
    request = manager.start(StructuredOutputsParams(regex="ab"), frozenset([token_of("z")]))
    request._compiled.result(30)
    for char in "abz":
        assert request.accept_token(token_of(char))
    assert request.is_terminated
    manager.close()


BAD = [
    ({"json": {"type": "nonsense"}}, 'json=.*can.t be used: Unsupported type "nonsense"'),
    ({"json": {"type": "string", "pattern": "("}}, "json=.*can.t be used: Regex parsing error"),
    ({"regex": "a("}, r"regex='a\(' can.t be used: Regex parsing error at position 3"),
    ({"grammar": "root ::= nothing"}, 'grammar=.*can.t be used: EBNF parser error.*Rule "nothing" is not defined'),
    ({"grammar": 'start ::= "a"'}, 'grammar=.*root rule with name "root" is not found'),
]


@pytest.mark.parametrize(("fields", "message"), BAD)
def test_what_is_no_grammar_is_refused_before_anything_is_queued(
    fields: dict[str, Any], message: str, loaded: LoadedModel
) -> None:
    with tiny_llm("v1", loaded=loaded) as llm:
        with pytest.raises(ValueError, match=message):
            llm.generate(["a", "b"], [SamplingParams(), SamplingParams(structured_outputs=fields)], use_tqdm=False)
        assert not llm.core.has_unfinished()


def test_without_xgrammar_it_says_what_to_install(
    manager: StructuredOutputManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    with pytest.raises(ValueError, match="need xgrammar.*install runnerscope.structured"):
        manager.check(StructuredOutputsParams(regex="a"))


def test_the_real_tokenizer_writes_json(smollm2: Path) -> None:
    """A vocabulary of 49,152 pieces of many letters."""
    default_tokenizer = Tokenizer.from_gguf(read_checkpoint(smollm2).metadata)  # type: ignore[attr-defined]
    manager = StructuredOutputManager(default_tokenizer, default_tokenizer.vocab_size)
    schema = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
              "required": ["name", "age"], "additionalProperties": False}  # fmt: skip
    rng = random.Random(1)
    for _ in range(5):
        request = manager.start(StructuredOutputsParams(json=schema, disable_any_whitespace=True), NO_STOPS)
        request._compiled.result(60)
        tokens: list[int] = []
        while not request.is_terminated and len(tokens) < 300:
            bits = np.unpackbits(manager.grammar_bitmask([request]).view(np.uint8), bitorder="little")
            tokens.append(rng.choice(np.flatnonzero(bits).tolist()))
            assert request.accept_token(tokens[-1])
        value = json.loads(default_tokenizer.decode(tokens))
        assert set(value) == {"name", "age"} and len(value["name"]) <= 12
    manager.close()
