"""Structured output: the grammar itself, and answers that are held to one, in every circumstance of an engine."""

from __future__ import annotations

import dataclasses
import json
import random
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine import SamplingParams, StructuredOutputsParams
from engine.models import LoadedModel, Tokenizer, read_checkpoint
from engine.sample.grammar_vocabulary import grammar_vocabulary, without_control_characters
from engine.sample.structured_output import StructuredOutputManager, StructuredOutputRequest
from tests.engine.engine_helpers import (
    EOS,
    VOCAB,
    TraceRequest,
    both_loops,
    ids,
    limited_steps,
    prompt_of,
    replaced_model,
    run_trace,
    tiny_llm,
)
from tests.engine.random_schemas import fits, random_schema
from tests.engine.tiny_text import letters, raw_bytes, text_model

RUNNERS = ("v1", "v2")
runners = pytest.mark.parametrize("runner", RUNNERS)
NO_STOPS: frozenset[int] = frozenset()


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return text_model(tmp_path_factory.mktemp("bytes"), raw_bytes())


@pytest.fixture(scope="module")
def tokenizer(loaded: LoadedModel) -> Tokenizer:
    assert loaded.tokenizer is not None
    return loaded.tokenizer


@pytest.fixture
def manager(tokenizer: Tokenizer) -> Iterator[StructuredOutputManager]:
    manager = StructuredOutputManager(tokenizer, VOCAB)
    yield manager
    manager.close()


def started(manager: StructuredOutputManager, **fields: Any) -> StructuredOutputRequest:
    params = StructuredOutputsParams(**fields)
    manager.check(params)
    request = manager.start(params, NO_STOPS)
    request._compiled.result(30)
    return request


def allowed(manager: StructuredOutputManager, request: StructuredOutputRequest) -> list[int]:
    bits = np.unpackbits(manager.grammar_bitmask([request]).view(np.uint8), bitorder="little")
    assert bits.shape == (384,)
    return np.flatnonzero(bits).tolist()


def walk(manager: StructuredOutputManager, request: StructuredOutputRequest, rng: random.Random) -> list[int]:
    """A random output of the grammar, without the stop token that ends it."""
    tokens: list[int] = []
    while not request.is_terminated:
        assert len(tokens) < 600, "no end"
        choices = allowed(manager, request)
        assert choices
        # xgrammar takes bytes that are UTF-8 in form alone (surrogates): no character of three bytes without need.
        choices = [token for token in choices if token == EOS or _alphabet_byte(token) < 0xE0] or choices
        # As soon as it may end it mostly does.
        token = EOS if EOS in choices and rng.random() < 0.7 else rng.choice(choices)
        assert request.accept_token(token), request.error
        tokens.append(token)
    assert tokens.pop() == EOS
    return tokens


# -- the grammar -------------------------------------------------------------------------------------------------------


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


CASES: dict[str, tuple[dict[str, Any], str]] = {
    "regex": ({"regex": r"[a-f]{2,4}(-\d+)?"}, r"[a-f]{2,4}(-\d+)?"),
    "regex of more than ASCII": ({"regex": "(ä|日本)[^a]x"}, "(ä|日本)[^a]x"),
    "choice": ({"choice": ["yes", "no", 'he said "no"\n\\', "日本"]}, 'yes|no|he said "no"\n\\\\|日本'),
    "choice of the text of a special token": ({"choice": ["</s>"]}, "</s>"),
    "grammar": ({"grammar": 'root ::= "x" term "y"\nterm ::= [0-9]{1,3} | "(" [0-9] ")"'}, r"x(\d{1,3}|\(\d\))y"),
}


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
        assert request.accept_token(_byte(char)), (char, request.error)
    assert EOS in allowed(manager, request)
    assert not started(manager, json_object=True).accept_token(_byte("["))


def _byte(char: str) -> int:
    """The token of an ASCII character in `raw_bytes`."""
    return 3 + sorted(_alphabet()).index({" ": "Ġ"}.get(char, char))


def _alphabet() -> list[str]:
    from tokenizers import pre_tokenizers

    return pre_tokenizers.ByteLevel.alphabet()


def test_bits_of_ids_that_write_nothing_are_never_set(manager: StructuredOutputManager, tokenizer: Tokenizer) -> None:
    request = started(manager, regex="(.|\n)*")
    bits = np.unpackbits(manager.grammar_bitmask([request]).view(np.uint8), bitorder="little")
    assert tokenizer.vocab_size == 259
    assert not bits[[0, 1]].any() and bits[EOS] and not bits[259:].any()
    assert bits[3:259].sum() > 128


def test_what_follows_drafts_and_nothing_else_changes(manager: StructuredOutputManager) -> None:
    first, second = started(manager, regex="abcd"), started(manager, regex="x+")
    drafts = [[_byte("a"), _byte("b"), _byte("z"), _byte("c")], []]
    rows = manager.grammar_bitmask([first, second], drafts)
    assert rows.shape == (6, 12) and rows.dtype == np.int32
    bits = np.unpackbits(rows.view(np.uint8), axis=1, bitorder="little")
    assert [np.flatnonzero(row).tolist() for row in bits[:3]] == [[_byte(c)] for c in "abc"]
    assert bits[3:5].all(), "behind a draft that can't be accepted anything may stand"
    assert np.flatnonzero(bits[5]).tolist() == [_byte("x")]
    for char in "abcd":
        assert first.accept_token(_byte(char))
    ended = manager.grammar_bitmask([first], [[EOS, _byte("a")]])
    bits = np.unpackbits(ended.view(np.uint8), axis=1, bitorder="little")
    assert np.flatnonzero(bits[0]).tolist() == [EOS] and bits[1:].all()
    assert not first.is_terminated
    assert first.accept_token(EOS) and first.is_terminated


def test_a_refused_token_is_an_error_and_stays_one(manager: StructuredOutputManager) -> None:
    request = started(manager, regex="ab")
    assert not request.accept_token(_byte("b"))
    assert "isn't allowed by the grammar at this place" in str(request.error)
    assert not request.accept_token(_byte("a"))
    assert allowed(manager, request) == list(range(384))


def test_vocabularies(tokenizer: Tokenizer, tmp_path: Path) -> None:
    vocabulary, encoding = grammar_vocabulary(tokenizer, VOCAB)
    assert encoding == "byte_level" and len(vocabulary) == VOCAB
    assert vocabulary[:3] == ["", "", ""] and vocabulary[_byte("a")] == "a" and set(vocabulary[259:]) == {""}
    words = text_model(tmp_path, letters()).tokenizer
    assert words is not None and grammar_vocabulary(words, VOCAB)[0][31] == "Ġ"


def test_json_is_free_of_control_characters(manager: StructuredOutputManager) -> None:
    """Inside a string they are no JSON; line ends between its parts are."""
    limited = started(manager, json={"type": "string", "maxLength": 3})
    assert limited.accept_token(_byte('"'))
    written = {_alphabet_byte(token) for token in allowed(manager, limited)}
    assert min(written) == 0x20 and ord("\\") not in written
    tab, newline = (3 + sorted(_alphabet()).index(chr(0x100 + byte)) for byte in (9, 10))
    json_object = started(manager, json_object=True)
    assert json_object.accept_token(_byte("{"))
    assert newline in allowed(manager, json_object) and tab not in allowed(manager, json_object)
    assert tab in allowed(manager, started(manager, regex="(.|\n)*"))
    raw = without_control_characters(["a\tb", "\n", "é", "<0x09>"], "raw")
    assert raw == ["", "\n", "é", "<0x09>"]
    assert without_control_characters(["<0x09>", "<0x0A>", "▁"], "byte_fallback") == ["", "<0x0A>", "▁"]


def _alphabet_byte(token: int) -> int:
    """The byte that a token of `raw_bytes` writes."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    letter = ord(sorted(_alphabet())[token - 3])
    return letter if letter < 0x100 else hidden[letter - 0x100]


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
    request = manager.start(StructuredOutputsParams(regex="ab"), frozenset([_byte("z")]))
    request._compiled.result(30)
    for char in "abz":
        assert request.accept_token(_byte(char))
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


# -- answers -----------------------------------------------------------------------------------------------------------

ENGINE: dict[str, Any] = {"max_model_len": 256, "num_gpu_blocks_override": 513}


def held(max_tokens: int = 120, temperature: float = 1.0, seed: int | None = 1, **fields: Any) -> SamplingParams:
    names = [f.name for f in dataclasses.fields(StructuredOutputsParams) if f.name in fields]
    structured = {name: fields.pop(name) for name in names}
    return SamplingParams(
        temperature=temperature, seed=seed, max_tokens=max_tokens, structured_outputs=structured, **fields
    )


SCHEMAS = [random_schema(random.Random(seed)) for seed in range(100, 112)]
ANSWERS = [{"json": schema, "disable_any_whitespace": True} for schema in SCHEMAS] + [f for f, _ in CASES.values()]


def _check(fields: dict[str, Any], text: str) -> None:
    if "json" in fields:
        assert fits(json.loads(text), fields["json"]), (fields, text)
    else:
        pattern = next(pattern for other, pattern in CASES.values() if other == fields)
        assert re.fullmatch(pattern, text), (fields, text)


@runners
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
            _check(fields, completion.text)
    assert ended >= len(trace) - 3, "most should end in time"
    assert result.num_preemptions > 0
    if temperature:
        with tiny_llm(runner, "plain", loaded=loaded, **ENGINE) as llm:
            for one in trace[::3]:
                alone = llm.generate(ids(*one.prompt), one.params, use_tqdm=False)[0].outputs[0]
                assert result.tokens(one.request_id) == alone.token_ids


@runners
@both_loops
def test_n_answers_each_have_their_own_place_in_the_grammar(runner: str, loop: str, loaded: LoadedModel) -> None:
    with tiny_llm(runner, loop, loaded=loaded, **ENGINE) as llm:
        output = llm.generate(ids(*prompt_of(5)), held(regex="[a-z]{3,9}!", n=5, temperature=3.0), use_tqdm=False)[0]
    texts = [completion.text for completion in output.outputs]
    assert all(re.fullmatch("[a-z]{3,9}!", text) for text in texts) and len(set(texts)) == 5


@runners
@both_loops
def test_logprobs_are_those_of_the_allowed_tokens(runner: str, loop: str, loaded: LoadedModel) -> None:
    with tiny_llm(runner, loop, loaded=loaded, **ENGINE) as llm:
        output = llm.generate(ids(*prompt_of(5)), held(regex="[ab]{4}c", logprobs=2), use_tqdm=False)[0].outputs[0]
    assert output.logprobs is not None and len(output.token_ids) == 6
    for entry in output.logprobs[:4]:
        assert {token for token in entry if entry[token].logprob > -100} == {_byte("a"), _byte("b")}
        assert sum(np.exp(value.logprob) for value in entry.values()) == pytest.approx(1, abs=1e-4)
    assert output.logprobs[4][_byte("c")].logprob == pytest.approx(0, abs=1e-5)


@runners
@both_loops
def test_how_an_answer_ends(runner: str, loop: str, loaded: LoadedModel) -> None:
    ends = {
        "stop": (held(regex="abc"), "abc", "stop", None),
        "stop although ignore_eos": (held(regex="abc", ignore_eos=True), "abc", "stop", None),
        "length": (held(regex="a{9}", max_tokens=4), "aaaa", "length", None),
        "a stop id of the caller's": (held(regex="abcd", stop_token_ids=[_byte("c")]), "ab", "stop", _byte("c")),
        "a stop string": (held(regex="abcd", stop=["bc"]), "a", "stop", "bc"),
    }
    with tiny_llm(runner, loop, loaded=loaded, **ENGINE) as llm:
        outputs = llm.generate([ids(*prompt_of(5))] * len(ends), [end[0] for end in ends.values()], use_tqdm=False)
        for output, (_, text, reason, stop_reason) in zip(outputs, ends.values(), strict=True):
            completion = output.outputs[0]
            assert (completion.text, completion.finish_reason, completion.stop_reason) == (text, reason, stop_reason)


@runners
@both_loops
def test_where_nothing_is_left_the_request_ends_with_an_error(runner: str, loop: str, loaded: LoadedModel) -> None:
    """The caller allows only what the grammar refuses. The others of the batch go on."""
    impossible = held(regex="ab", allowed_token_ids=[_byte("a"), _byte("x")])
    with tiny_llm(runner, loop, loaded=loaded, **ENGINE) as llm:
        outputs = llm.generate([ids(*prompt_of(5))] * 2, [impossible, held(regex="ab")], use_tqdm=False)
    bad, good = (output.outputs[0] for output in outputs)
    assert (bad.finish_reason, len(bad.token_ids)) == ("error", 2) and bad.token_ids[0] == _byte("a")
    assert "isn't allowed by the grammar" in str(bad.stop_reason)
    assert (good.text, good.finish_reason) == ("ab", "stop")


@runners
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


@runners
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


@runners
@both_loops
def test_a_failed_step_does_not_lose_the_place_in_the_grammar(runner: str, loop: str, loaded: LoadedModel) -> None:
    params = held(regex="[a-z]{12}[0-9]{3}")
    with tiny_llm(runner, loop, loaded=loaded, **ENGINE) as llm:
        expected = llm.generate(ids(*prompt_of(5)), params, use_tqdm=False)[0].outputs[0].text
        llm.add(ids(*prompt_of(5)), params, request_id="a", final_only=True)
        for _ in range(6):
            llm.step()

        def fail(*args: object) -> None:
            raise RuntimeError("no logits today")

        with replaced_model(llm, compute_logits=fail), pytest.raises(RuntimeError, match="no logits today"):
            for _ in range(3):
                llm.step()
        text = next(output for _ in range(40) for output in llm.step()).outputs[0].text
    assert re.fullmatch("[a-z]{12}[0-9]{3}", text) and text == expected


@runners
@both_loops
def test_an_aborted_request_leaves_nothing_behind(runner: str, loop: str, loaded: LoadedModel) -> None:
    trace = [TraceRequest(f"r{i}", tuple(prompt_of(5, i)), held(regex="[a-z]{40}"), abort_at=3 + i) for i in range(4)]
    with tiny_llm(runner, loop, loaded=loaded, **ENGINE) as llm:
        run_trace(llm, [*trace, TraceRequest("kept", tuple(prompt_of(7)), held(regex="[a-z]{4}"))])


@runners
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
