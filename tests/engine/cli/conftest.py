"""A tiny model for the command line."""

from __future__ import annotations

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

VOCAB = 512


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Options for a tiny random model whose tokenizer writes an escape sequence for every id above the bytes."""
    folder = tmp_path_factory.mktemp("tokenizer")
    vocab = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([f"\x1b[{i}m" for i in range(VOCAB - len(vocab))])
    tokenizer.save(str(folder / "tokenizer.json"))
    return ["--model", "tiny-llama", "--load-format", "dummy", "--tokenizer", str(folder)]
