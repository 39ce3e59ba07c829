"""Grammars over a vocabulary of single bytes: answers that are held to them, and random walks through them."""

from __future__ import annotations

import dataclasses
import json
import random
import re
from typing import Any

import numpy as np
import pytest
from tokenizers import pre_tokenizers

from engine import LLM, SamplingParams, StructuredOutputsParams
from engine.sample.structured_output import StructuredOutputManager, StructuredOutputRequest
from tests.engine.engine_helpers import EOS, replaced_model
from tests.engine.random_schemas import fits, random_schema

NO_STOPS: frozenset[int] = frozenset()
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "regex": ({"regex": r"[a-f]{2,4}(-\d+)?"}, r"[a-f]{2,4}(-\d+)?"),
    "regex of more than ASCII": ({"regex": "(ä|日本)[^a]x"}, "(ä|日本)[^a]x"),
    "choice": ({"choice": ["yes", "no", 'he said "no"\n\\', "日本"]}, 'yes|no|he said "no"\n\\\\|日本'),
    "choice of the text of a special token": ({"choice": ["</s>"]}, "</s>"),
    "grammar": ({"grammar": 'root ::= "x" term "y"\nterm ::= [0-9]{1,3} | "(" [0-9] ")"'}, r"x(\d{1,3}|\(\d\))y"),
}
SCHEMAS = [random_schema(random.Random(seed)) for seed in range(100, 112)]
ANSWERS = [{"json": schema, "disable_any_whitespace": True} for schema in SCHEMAS] + [f for f, _ in CASES.values()]
ENGINE: dict[str, Any] = {"max_model_len": 256, "num_gpu_blocks_override": 513}


def alphabet() -> list[str]:
    return pre_tokenizers.ByteLevel.alphabet()


def token_of(char: str) -> int:
    """The token of an ASCII character in `raw_bytes`."""
    return 3 + sorted(alphabet()).index({" ": "Ġ"}.get(char, char))


def text(chars: str) -> list[int]:
    """The tokens of ASCII characters."""
    return [token_of(char) for char in chars]


def byte_of(token: int) -> int:
    """The byte that a token of `raw_bytes` writes."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    letter = ord(sorted(alphabet())[token - 3])
    return letter if letter < 0x100 else hidden[letter - 0x100]


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
        choices = [token for token in choices if token == EOS or byte_of(token) < 0xE0] or choices
        # As soon as it may end it mostly does.
        token = EOS if EOS in choices and rng.random() < 0.7 else rng.choice(choices)
        assert request.accept_token(token), request.error
        tokens.append(token)
    assert tokens.pop() == EOS
    return tokens


def held(max_tokens: int = 120, temperature: float = 1.0, seed: int | None = 1, **fields: Any) -> SamplingParams:
    """Parameters of an answer that is held to a grammar; `fields` are the grammar's, then those of the parameters."""
    names = [f.name for f in dataclasses.fields(StructuredOutputsParams) if f.name in fields]
    structured = {name: fields.pop(name) for name in names}
    return SamplingParams(
        temperature=temperature, seed=seed, max_tokens=max_tokens, structured_outputs=structured, **fields
    )


def check_answer(fields: dict[str, Any], text: str) -> None:
    if "json" in fields:
        assert fits(json.loads(text), fields["json"]), (fields, text)
    else:
        pattern = next(pattern for other, pattern in CASES.values() if other == fields)
        assert re.fullmatch(pattern, text), (fields, text)


def count_samples(llm: Any) -> list[bool]:
    """Of each step that samples from now on: whether a request with a grammar has drafts in it."""
    steps: list[bool] = []
    runner = llm.core.runner
    sample = runner.sample_tokens

    def counted(grammar_output: Any = None) -> Any:
        steps.append(grammar_output is not None and max(grammar_output.num_rows, default=0) > 1)
        return sample(grammar_output)

    runner.sample_tokens = counted
    return steps


def answer_behind_a_failed_step(llm: LLM, prompt: dict[str, list[int]], params: SamplingParams) -> tuple[str, str]:
    """The text of an undisturbed answer, and of one in whose midst a step failed."""
    expected = llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].text
    llm.add(prompt, params, request_id="a", final_only=True)
    for _ in range(6):
        llm.step()

    def fail(*args: object) -> None:
        raise RuntimeError("no logits today")

    with replaced_model(llm, compute_logits=fail), pytest.raises(RuntimeError, match="no logits today"):
        for _ in range(3):
            llm.step()
    return expected, next(output for _ in range(60) for output in llm.step()).outputs[0].text
