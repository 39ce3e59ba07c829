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


def _encoding(tokenizer: Tokenizer) -> Encoding:
    decoder = tokenizer.backend.decoder
    description = json.loads(decoder.__getstate__()) if decoder is not None else {}
    steps = [step["type"] for step in description.get("decoders", [description]) if step]
    if "ByteLevel" in steps:
        return "byte_level"
    return "byte_fallback" if "ByteFallback" in steps else "raw"
