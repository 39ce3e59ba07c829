"""A tiny model with a tokenizer, so that text, stop strings and chat can be tested without the real one."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from string import ascii_lowercase

import tokenizers
import torch
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from engine.models import LoadedModel, load_model
from tests.engine.engine_helpers import EOS, VOCAB, tiny_model

CHAT_TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
BYTES = pre_tokenizers.ByteLevel.alphabet


def letters() -> tokenizers.Tokenizer:
    """Id 3 onwards: single letters, a space, then pairs of letters. A text is split into single characters."""
    words = [*ascii_lowercase, "[", "]", "Ġ", *("".join(pair) for pair in product(ascii_lowercase, repeat=2))]
    vocab = {"<unk>": 0, "<s>": 1, "</s>": EOS} | {word: 3 + i for i, word in enumerate(words[: VOCAB - 3])}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in ("<unk>", "<s>", "</s>")])
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False), pre_tokenizers.Split("", "isolated")]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def raw_bytes() -> tokenizers.Tokenizer:
    """Id 3 onwards: the 256 bytes. Any sequence of ids is some sequence of bytes, mostly no UTF-8."""
    alphabet = sorted(BYTES())
    vocab = {"<unk>": 0, "<s>": 1, "</s>": EOS} | {char: 3 + i for i, char in enumerate(alphabet)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab, [], unk_token="<unk>"))
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in ("<unk>", "<s>", "</s>")])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def text_model(path: Path, tokenizer: tokenizers.Tokenizer) -> LoadedModel:
    (path / "config.json").write_text(json.dumps(tiny_model().config.to_hf()))
    tokenizer.save(str(path / "tokenizer.json"))
    special = {"eos_token": "</s>", "bos_token": "<s>", "chat_template": CHAT_TEMPLATE}
    (path / "tokenizer_config.json").write_text(json.dumps(special))
    return load_model(path, dtype=torch.float32, device=torch.device("cpu"), load_format="dummy")
