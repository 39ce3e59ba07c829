"""Text to token ids and back, and chat templates, from a checkpoint's own files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from .chat_template import ChatTemplateError, render_chat_template
from .checkpoint import CheckpointError
from .gguf_tokenizer import tokenizer_from_gguf
from .safetensors_checkpoint import read_json

_SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")


class Tokenizer:
    """A thin wrapper over ``tokenizers.Tokenizer``.

    Attributes:
        backend: the ``tokenizers.Tokenizer``.
        special_tokens: text of bos_token, eos_token, pad_token, unk_token, where the checkpoint has them.
        chat_template: jinja2 source, or None.
        eos_token_ids: ids that end a text.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special_tokens: Mapping[str, str],
        chat_template: str | None,
        eos_token_ids: Sequence[int],
    ) -> None:
        self.backend = backend
        self.special_tokens = dict(special_tokens)
        self.chat_template = chat_template
        self.eos_token_ids = tuple(dict.fromkeys(eos_token_ids))

    @classmethod
    def from_directory(cls, path: Path) -> Tokenizer:
        """From ``tokenizer.json`` and, where they exist, the configs and chat_template.jinja beside it.

        Raises:
            CheckpointError: no tokenizer.json, or damaged.
        """
        file = path / "tokenizer.json"
        if not file.is_file():
            raise CheckpointError(
                f"{path}: has no tokenizer.json. Save one with transformers' AutoTokenizer(...).save_pretrained, "
                "give tokenizer=<another directory>, or skip_tokenizer_init=True to work with token ids"
            )
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the bindings raise bare Exception
            raise CheckpointError(f"{file}: damaged ({error}). Delete the file and fetch it again") from error
        config = _optional_json(path / "tokenizer_config.json")
        _add_missing_tokens(backend, config.get("added_tokens_decoder") or {})
        special = {name: _token_text(config[name]) for name in _SPECIAL if config.get(name)}
        eos = _optional_json(path / "generation_config.json").get("eos_token_id")
        eos = _optional_json(path / "config.json").get("eos_token_id") if eos is None else eos
        eos_ids = list(eos) if isinstance(eos, list) else [] if eos is None else [eos]
        own_eos = backend.token_to_id(special["eos_token"]) if "eos_token" in special else None
        if own_eos is not None:
            eos_ids.append(own_eos)
        return cls(backend, special, _chat_template(path, config), eos_ids)

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """From the ``tokenizer.*`` fields of a GGUF file. Raises UnsupportedTokenizerError where it cannot be exact."""
        backend = tokenizer_from_gguf(metadata)
        tokens = metadata["tokenizer.ggml.tokens"]
        ids = {
            "bos_token": metadata.get("tokenizer.ggml.bos_token_id"),
            "eos_token": metadata.get("tokenizer.ggml.eos_token_id"),
            "pad_token": metadata.get("tokenizer.ggml.padding_token_id"),
            "unk_token": metadata.get("tokenizer.ggml.unknown_token_id"),
        }
        special = {name: tokens[i] for name, i in ids.items() if i is not None}
        eos = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
        return cls(backend, special, metadata.get("tokenizer.chat_template"), [i for i in eos if i is not None])

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included; a model's logits may be wider."""
        return int(self.backend.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; the text of a special token becomes that token. ValueError for lone surrogates."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"the text has a lone surrogate at character {error.start}; remove it or decode the source as UTF-8"
            ) from None
        return list(self.backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids; bytes that are not UTF-8 become U+FFFD."""
        return str(self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def token_text(self, token_id: int) -> str:
        """What one token writes, special tokens by name. Raises ValueError for an id outside the vocabulary."""
        token = self.backend.id_to_token(token_id)
        if token is None:
            raise ValueError(f"token id {token_id} is not in the vocabulary of {self.vocab_size}")
        text = self.decode([token_id], skip_special_tokens=False)
        # SentencePiece decoders drop the space at the beginning of a text, which within a text belongs to the token.
        return f" {text}" if token.startswith("▁") and not text.startswith(" ") else text

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **kwargs: Any
    ) -> str:
        """Prompt text of a conversation. ``kwargs`` reach the template (``tools``, ``enable_thinking``, ...).

        Raises:
            ChatTemplateError: no template, or it refused the messages.
        """
        if self.chat_template is None:
            raise ChatTemplateError(
                "this checkpoint has no chat template. Use generate with a plain prompt, or an instruct checkpoint"
            )
        variables = {**self.special_tokens, "tools": None, "documents": None, **kwargs}
        return render_chat_template(
            self.chat_template, messages, add_generation_prompt=add_generation_prompt, **variables
        )


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _token_text(token: Any) -> str:
    return str(token["content"]) if isinstance(token, dict) else str(token)


def _add_missing_tokens(backend: tokenizers.Tokenizer, added: Mapping[str, Any]) -> None:
    """Tokens that only tokenizer_config.json knows, in the order of their ids."""
    missing = [
        tokenizers.AddedToken(
            token["content"], special=bool(token.get("special")), normalized=bool(token.get("normalized"))
        )
        for _, token in sorted(added.items(), key=lambda item: int(item[0]))
        if backend.token_to_id(token["content"]) is None
    ]
    backend.add_tokens(missing)


def _chat_template(path: Path, config: Mapping[str, Any]) -> str | None:
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return template
