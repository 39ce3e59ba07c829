"""Tokenizers from directories and from GGUF fields, and chat templates in their sandbox."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from engine.models import ChatTemplateError, CheckpointError, Tokenizer, UnsupportedTokenizerError
from engine.models.chat_template import render_chat_template
from engine.models.gguf_checkpoint import GgufCheckpoint

TEXTS = [
    "",
    "Hello world",
    "  two  spaces\n\n\ttabs ",
    "12345 6.78, 9",
    "naïve café — 東京 😀👩‍👩‍👧",
    "don't, it's, WE'LL",
    "def f(x):\n    return x ** 2  # ok\r\n",
    "<|im_start|>user\nhi<|im_end|>\n",
    "a<|im_end|>b <|im_start|>",
    "\u200b\x00\x7f\ufffd",
    "e\u0301 vs \u00e9",
]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def train(pre_tokenizer: Any, vocab_size: int = 400) -> tokenizers.Tokenizer:
    """A small byte-level BPE tokenizer."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([*TEXTS, "hello the world of the cafés 2024 2025 don't we'll"] * 3, trainer)
    tokenizer.add_tokens([AddedToken(t, special=True, normalized=False) for t in ("<|im_start|>", "<|im_end|>")])
    return tokenizer


def fields_of(tokenizer: tokenizers.Tokenizer, pre: str) -> dict[str, Any]:
    """The GGUF fields a converter would write."""
    data = json.loads(tokenizer.to_str())
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    tokens = sorted(vocab, key=vocab.__getitem__)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if t.startswith("<|") else 1 for t in tokens],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in data["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": vocab["<|im_start|>"],
        "tokenizer.ggml.eos_token_id": vocab["<|im_end|>"],
        "tokenizer.chat_template": TEMPLATE,
    }


@pytest.fixture(scope="module")
def gpt2() -> tokenizers.Tokenizer:
    return train(pre_tokenizers.ByteLevel(add_prefix_space=False))


@pytest.fixture
def directory(gpt2: tokenizers.Tokenizer, tmp_path: Path) -> Path:
    PreTrainedTokenizerFast(
        tokenizer_object=gpt2, bos_token="<|im_start|>", eos_token="<|im_end|>", chat_template=TEMPLATE
    ).save_pretrained(tmp_path)
    return tmp_path


def test_a_directory_reads_as_transformers_reads_it(directory: Path) -> None:
    ours, theirs = Tokenizer.from_directory(directory), PreTrainedTokenizerFast.from_pretrained(directory)
    for text in TEXTS:
        ids = ours.encode(text)
        assert ids == theirs.encode(text)
        assert ours.decode(ids, skip_special_tokens=False) == text
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert ours.vocab_size == len(theirs)
    assert ours.eos_token_ids == (theirs.eos_token_id,)
    messages = [{"role": "user", "content": "<b>&'\"{{ x }}"}]
    assert ours.apply_chat_template(messages) == theirs.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )


def test_tokens_that_only_the_config_knows_are_added(directory: Path) -> None:
    config = json.loads((directory / "tokenizer_config.json").read_text())
    base = Tokenizer.from_directory(directory).vocab_size
    config["added_tokens_decoder"] = {
        str(base + 1): {"content": "<|two|>", "special": True},
        str(base): {"content": "<|one|>", "special": True},
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.from_directory(directory)
    assert tokenizer.encode("<|one|><|two|>") == [base, base + 1]


def test_special_tokens_around_a_prompt_are_optional(gpt2: tokenizers.Tokenizer, tmp_path: Path) -> None:
    with_bos = tokenizers.Tokenizer.from_str(gpt2.to_str())
    bos = with_bos.token_to_id("<|im_start|>")
    with_bos.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", bos)]
    )
    with_bos.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert tokenizer.encode("hello") == [bos, *tokenizer.encode("hello", add_special_tokens=False)]


def test_end_ids_come_from_all_files(directory: Path) -> None:
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    tokenizer = Tokenizer.from_directory(directory)
    assert tokenizer.eos_token_ids == (5, 6, tokenizer.backend.token_to_id("<|im_end|>"))


def test_damaged_and_missing_files_are_named(directory: Path) -> None:
    (directory / "tokenizer_config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: not valid JSON"):
        Tokenizer.from_directory(directory)
    (directory / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: damaged"):
        Tokenizer.from_directory(directory)
    (directory / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json.*skip_tokenizer_init=True"):
        Tokenizer.from_directory(directory)


def split(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


# As in the published tokenizer.json of each family
BEFORE, AFTER = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|",
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
PUBLISHED = {
    "gpt-2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "smollm": pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
    "llama-bpe": split(BEFORE + r"\p{N}{1,3}" + AFTER),
    "qwen2": split(BEFORE + r"\p{N}" + AFTER),
}


@pytest.mark.parametrize("pre", PUBLISHED)
def test_gguf_fields_give_the_tokenizer_they_were_made_from(pre: str) -> None:
    original = train(PUBLISHED[pre])
    ours = Tokenizer.from_gguf({**fields_of(original, pre), "tokenizer.ggml.add_bos_token": False})
    for text in TEXTS:
        if pre == "qwen2":  # Qwen normalises to NFC first
            text = text.replace("e\u0301", "\u00e9")
        ids = original.encode(text).ids
        assert ours.encode(text) == ids
        assert ours.decode(ids, skip_special_tokens=False) == text
    assert ours.special_tokens == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    assert ours.eos_token_ids == (original.token_to_id("<|im_end|>"),)


def test_gguf_bos_eos_and_other_ends(gpt2: tokenizers.Tokenizer) -> None:
    fields = fields_of(gpt2, "gpt-2")
    bos, eos = fields["tokenizer.ggml.bos_token_id"], fields["tokenizer.ggml.eos_token_id"]
    bare = Tokenizer.from_gguf(fields).encode("hello")
    fields |= {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.eot_token_id": 3}
    tokenizer = Tokenizer.from_gguf(fields)
    assert tokenizer.encode("hello") == [bos, *bare] and tokenizer.eos_token_ids == (eos, 3)
    fields["tokenizer.ggml.add_eos_token"] = True
    assert Tokenizer.from_gguf(fields).encode("hello") == [bos, *bare, eos]
    llama3 = Tokenizer.from_gguf(fields_of(gpt2, "llama-bpe"))
    assert llama3.encode("hello")[0] == bos


def test_unsupported_gguf_tokenizers_say_what_to_do(gpt2: tokenizers.Tokenizer) -> None:
    fields = fields_of(gpt2, "gpt-2")
    for change, says in [
        ({"tokenizer.ggml.model": "t5"}, r"'t5' is not supported \(gpt2 and llama are\)"),
        ({"tokenizer.ggml.pre": "tekken"}, r"'tekken' is not supported \(default, gpt-2, smollm, qwen2"),
        ({"tokenizer.ggml.tokens": None}, "holds no tokenizer"),
        ({"tokenizer.ggml.model": "llama"}, "without scores"),
    ]:
        with pytest.raises(UnsupportedTokenizerError, match=says) as error:
            Tokenizer.from_gguf(fields | change)
        assert "Give tokenizer=" in str(error.value)


def sentencepiece(text: str, vocab: dict[str, int], scores: list[float]) -> list[int]:
    """SentencePiece's BPE by definition: always join the neighbours whose union scores best, the leftmost of equals."""
    pieces = list("▁" + text.replace(" ", "▁"))
    while True:
        joins = [(scores[vocab[a + b]], -i) for i, (a, b) in enumerate(pairwise(pieces)) if a + b in vocab]
        if not joins:
            break
        at = -max(joins)[1]
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
    ids = []
    for piece in pieces:
        ids += [vocab[piece]] if piece in vocab else [vocab[f"<0x{byte:02X}>"] for byte in piece.encode()]
    return ids


@pytest.fixture(scope="module")
def spm_fields() -> dict[str, Any]:
    text = "the quick brown fox jumps over the lazy dog and then the other thing happened in the other place"
    words = text.split()
    merged = {piece for word in words for i in range(len(word)) for piece in (word[i : i + 2], word[i : i + 3])}
    merged |= {"▁" + word[:n] for word in words for n in (1, 2, 3, len(word))} | set(words)
    pieces = sorted((p for p in merged if len(p) > 1), key=lambda p: (len(p), p))
    letters = sorted({c for p in pieces for c in p} | {"▁"})
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *pieces, *letters]
    first = 3 + 256
    scores = [0.0] * first + [-float(i) for i in range(len(pieces))] + [-1e6] * len(letters)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * (len(tokens) - first),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def test_sentencepiece_vocabularies_split_by_score(spm_fields: dict[str, Any]) -> None:
    tokenizer = Tokenizer.from_gguf(spm_fields)
    vocab = {token: i for i, token in enumerate(spm_fields["tokenizer.ggml.tokens"])}
    for text in ["the quick brown fox", "then other things", "in  the   end", "jumped é😀 over", "x"]:
        ids = tokenizer.encode(text)
        assert ids == [1, *sentencepiece(text, vocab, spm_fields["tokenizer.ggml.scores"])]
        assert tokenizer.decode(ids) == text
    ids = tokenizer.encode("the other place", add_special_tokens=False)
    assert "".join(tokenizer.token_text(i) for i in ids) == " the other place"
    assert tokenizer.encode("</s>")[-1] == 2


def test_token_text(directory: Path) -> None:
    tokenizer = Tokenizer.from_directory(directory)
    ids = tokenizer.encode("hello the world<|im_end|>")
    assert "".join(tokenizer.token_text(i) for i in ids) == "hello the world<|im_end|>"
    size = tokenizer.vocab_size
    with pytest.raises(ValueError, match=f"{size + 5} is not in the vocabulary of {size}"):
        tokenizer.token_text(size + 5)


def test_lone_surrogates_are_refused(directory: Path) -> None:
    with pytest.raises(ValueError, match="lone surrogate at character 2"):
        Tokenizer.from_directory(directory).encode("ab\ud800")


USER = [{"role": "user", "content": "hi"}]


def test_a_template_has_what_transformers_gives_it() -> None:
    source = "{{ bos }}{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m | tojson(indent=1) }}"
    source += "{% endfor %}"
    assert render_chat_template(source, [*USER, {"role": "a", "content": "<é>"}], bos="B") == (
        'B{\n "role": "a",\n "content": "<é>"\n}'
    )
    assert len(render_chat_template("{{ strftime_now('%Y') }}", USER)) == 4
    assert render_chat_template("a{% generation %}b{{ 1 + 1 }}{% endgeneration %}c", USER) == "ab2c"
    assert render_chat_template("{% set n = namespace(a=1) %}{% set n.a = n.a + 1 %}{{ n.a }}", USER) == "2"
    dropped = [{"role": "user", "content": "x", "tool_calls": None}]
    assert render_chat_template("{{ messages[0] | length }}", dropped) == "2"


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{% set n = namespace(a=1) %}{{ n.__class__.__mro__ }}{{ n.__dict__['x'] }}",
        "{{ raise_exception.__globals__ }}{{ raise_exception.__globals__['json'] }}",
        "{% set n = namespace() %}{% set n.__class__ = 1 %}",
        "{{ namespace(_x=1) }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
    ],
)
def test_a_template_cannot_reach_out_of_its_sandbox(source: str) -> None:
    try:
        text = render_chat_template(source, USER)
    except ChatTemplateError:
        return
    assert text == "", "an unsafe attribute is undefined, and prints as nothing"


def test_template_errors_say_whose_they_are() -> None:
    for source, says in [
        ("{% for %}", "the chat template is damaged: line 1"),
        ("{{ raise_exception('roles must alternate') }}", "refused these messages: roles must alternate"),
        ("{{ 1 / 0 }}", "refused these messages: division by zero"),
        ("{{ messages[0].content.nothing.more }}", "refused these messages"),
    ]:
        with pytest.raises(ChatTemplateError, match=says):
            render_chat_template(source, USER)
    with pytest.raises(ChatTemplateError, match="conversation is empty"):
        render_chat_template("x", [])
    with pytest.raises(ChatTemplateError, match="must be a dict with 'role'"):
        render_chat_template("x", [{"content": "x"}])
    with pytest.raises(ChatTemplateError, match="plain JSON values"):
        render_chat_template("x", [{"role": "user", "content": object()}])


def test_no_template_is_said(spm_fields: dict[str, Any]) -> None:
    with pytest.raises(ChatTemplateError, match="no chat template"):
        Tokenizer.from_gguf(spm_fields).apply_chat_template(USER)


def test_the_default_models_tokenizer(smollm2: Path) -> None:
    """Known ids of SmolLM2's published tokenizer."""
    tokenizer = Tokenizer.from_gguf(GgufCheckpoint(smollm2).metadata)
    assert tokenizer.encode("Hello world") == [19556, 905]
    assert tokenizer.encode("<|im_start|>user") == [1, 4093]
    assert (tokenizer.vocab_size, tokenizer.eos_token_ids) == (49152, (2,))
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text
    prompt = tokenizer.apply_chat_template(USER)
    assert prompt.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert prompt.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
