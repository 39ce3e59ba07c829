"""Grammars over a vocabulary of single bytes, and random walks through them: for tests of structured output."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
from tokenizers import pre_tokenizers

from engine import StructuredOutputsParams
from engine.sample.structured_output import StructuredOutputManager, StructuredOutputRequest
from tests.engine.engine_helpers import EOS

NO_STOPS: frozenset[int] = frozenset()
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "regex": ({"regex": r"[a-f]{2,4}(-\d+)?"}, r"[a-f]{2,4}(-\d+)?"),
    "regex of more than ASCII": ({"regex": "(ä|日本)[^a]x"}, "(ä|日本)[^a]x"),
    "choice": ({"choice": ["yes", "no", 'he said "no"\n\\', "日本"]}, 'yes|no|he said "no"\n\\\\|日本'),
    "choice of the text of a special token": ({"choice": ["</s>"]}, "</s>"),
    "grammar": ({"grammar": 'root ::= "x" term "y"\nterm ::= [0-9]{1,3} | "(" [0-9] ")"'}, r"x(\d{1,3}|\(\d\))y"),
}


def alphabet() -> list[str]:
    return pre_tokenizers.ByteLevel.alphabet()


def token_of(char: str) -> int:
    """The token of an ASCII character in `raw_bytes`."""
    return 3 + sorted(alphabet()).index({" ": "Ġ"}.get(char, char))


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
