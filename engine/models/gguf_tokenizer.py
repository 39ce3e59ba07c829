"""The tokenizer inside a GGUF file, rebuilt as a ``tokenizers.Tokenizer`` that splits text as the original does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
_CONTROL, _USER_DEFINED = 3, 4


class UnsupportedTokenizerError(ValueError):
    """A kind of tokenizer that cannot be rebuilt exactly."""


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """Build from the ``tokenizer.ggml.*`` fields.

    Raises:
        UnsupportedTokenizerError: a model or a way of splitting that is not known, or missing fields.
    """
    kind = metadata.get("tokenizer.ggml.model")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not tokens:
        raise UnsupportedTokenizerError(
            "the GGUF file holds no tokenizer. Give tokenizer=<directory with tokenizer.json>, "
            "or skip_tokenizer_init=True"
        )
    if kind == "gpt2":
        tokenizer = _byte_level_bpe(metadata, tokens)
    elif kind == "llama":
        tokenizer = _sentencepiece_bpe(metadata, tokens)
    else:
        raise UnsupportedTokenizerError(
            f"tokenizer model {kind!r} is not supported (gpt2 and llama are). "
            "Give tokenizer=<directory with tokenizer.json>"
        )
    types = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    tokenizer.add_tokens(
        [
            AddedToken(token, special=type_ == _CONTROL, normalized=False)
            for token, type_ in zip(tokens, types, strict=True)
            if type_ in (_CONTROL, _USER_DEFINED)
        ]
    )
    template = _template(metadata, tokens, adds_bos=kind == "llama" or _pre(metadata) in _ADD_BOS)
    if template:
        tokenizer.post_processor = template
    return tokenizer


_ADD_BOS = ("llama-bpe", "llama3", "llama-v3")
"""Pre-tokenizers whose models begin every prompt with BOS unless the file says otherwise."""


def _pre(metadata: Mapping[str, Any]) -> str:
    return str(metadata.get("tokenizer.ggml.pre") or "default")


def _byte_level_bpe(metadata: Mapping[str, Any], tokens: Sequence[str]) -> Tokenizer:
    pre = _pre(metadata)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    splitters: dict[str, list[pre_tokenizers.PreTokenizer]] = {
        "default": [gpt2],
        "gpt-2": [gpt2],
        "smollm": [pre_tokenizers.Digits(individual_digits=True), gpt2],
        "qwen2": [pre_tokenizers.Split(Regex(_QWEN2_SPLIT), "isolated"), byte_level],
        "deepseek-r1-qwen": [pre_tokenizers.Split(Regex(_QWEN2_SPLIT), "isolated"), byte_level],
        **{name: [pre_tokenizers.Split(Regex(_LLAMA3_SPLIT), "isolated"), byte_level] for name in _ADD_BOS},
    }
    if pre not in splitters:
        raise UnsupportedTokenizerError(
            f"pre-tokenizer {pre!r} is not supported ({', '.join(splitters)} are). "
            "Give tokenizer=<directory with tokenizer.json>"
        )
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.get("tokenizer.ggml.merges") or []]
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre in _ADD_BOS))
    if "qwen" in pre:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splitters[pre])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece_bpe(metadata: Mapping[str, Any], tokens: Sequence[str]) -> Tokenizer:
    scores = metadata.get("tokenizer.ggml.scores")
    if not scores:
        raise UnsupportedTokenizerError(
            "the GGUF file has a SentencePiece vocabulary without scores. "
            "Give tokenizer=<directory with tokenizer.json>"
        )
    vocab = {token: i for i, token in enumerate(tokens)}
    unknown = tokens[metadata.get("tokenizer.ggml.unknown_token_id", 0)]
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=_merges(vocab, scores), unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first" if prefix else "never", split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(steps + [decoders.Strip(" ", 1, 0)] if prefix else steps)
    return tokenizer


def _merges(vocab: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """SentencePiece joins the neighbours whose union scores best, so a merge ranks by the score of its result."""
    found = []
    for token, index in vocab.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocab and right in vocab:
                found.append((-scores[index], vocab[left], vocab[right], left, right))
    found.sort()
    return [(left, right) for *_, left, right in found]


def _template(metadata: Mapping[str, Any], tokens: Sequence[str], adds_bos: bool) -> processors.PostProcessor | None:
    """BOS before and EOS after a prompt, where the file asks for them."""
    single, special = ["$A"], []
    for name, default, at in (("bos", adds_bos, 0), ("eos", False, 2)):
        token_id = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if metadata.get(f"tokenizer.ggml.add_{name}_token", default) and token_id is not None:
            single.insert(at, tokens[token_id])
            special.append((tokens[token_id], token_id))
    return processors.TemplateProcessing(single=single, special_tokens=special) if special else None
