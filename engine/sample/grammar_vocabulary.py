"""A tokenizer's vocabulary as grammars need it: what each token id writes."""

from __future__ import annotations

import json
from typing import Literal

from ..models import Tokenizer

Encoding = Literal["raw", "byte_level", "byte_fallback"]
"""How a token is written in the vocabulary. byte_level: a letter a byte, as GPT-2's. byte_fallback: SentencePiece's "▁"
and "<0x0A>". raw: as it is."""


def grammar_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> tuple[list[str], Encoding]:
    """`vocab_size` tokens in the order of their ids. A special token, which writes no text, and an id that the
    tokenizer doesn't know are "": no grammar allows them."""
    special = {token_id for token_id, token in tokenizer.backend.get_added_tokens_decoder().items() if token.special}
    vocabulary = [""] * vocab_size
    for token, token_id in tokenizer.backend.get_vocab(with_added_tokens=True).items():
        if token_id < vocab_size and token_id not in special:
            vocabulary[token_id] = token
    return vocabulary, _encoding(tokenizer)


def without_control_characters(vocabulary: list[str], encoding: Encoding) -> list[str]:
    """The vocabulary without tokens that write a character below U+0020 which is no line end.

    No JSON text needs one, and inside a string none may stand; xgrammar 0.2.9 allows them in strings of limited length.
    """
    control = [byte for byte in range(0x20) if chr(byte) not in "\n\r"]
    letters = {chr(byte) for byte in control}
    if encoding == "byte_level":
        letters |= {chr(0x100 + byte) for byte in control}
    whole = {f"<0x{byte:02X}>" for byte in control} if encoding == "byte_fallback" else set()
    return ["" if token in whole or not letters.isdisjoint(token) else token for token in vocabulary]


def _encoding(tokenizer: Tokenizer) -> Encoding:
    decoder = tokenizer.backend.decoder
    description = json.loads(decoder.__getstate__()) if decoder is not None else {}
    steps = [step["type"] for step in description.get("decoders", [description]) if step]
    if "ByteLevel" in steps:
        return "byte_level"
    return "byte_fallback" if "ByteFallback" in steps else "raw"
