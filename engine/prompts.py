"""Prompts and their parameters as they are given, and what of them an engine takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .config_checks import ConfigError
from .models import LoadedModel
from .sampling_params import SamplingParams

Prompt = str | Mapping[str, Any]
"""A text, or `{"prompt_token_ids": [...]}`, beside which "prompt" may be the text that they stand for."""


def tokenizer_of(loaded: LoadedModel) -> Any:
    """ConfigError if the model was loaded without one."""
    if loaded.tokenizer is None:
        raise ConfigError(
            f"{loaded.name!r} runs without a tokenizer (skip_tokenizer_init, or a dummy model): give "
            'prompts as {"prompt_token_ids": [...]}, or load a tokenizer'
        )
    return loaded.tokenizer


def read_prompt(prompt: Prompt, loaded: LoadedModel) -> tuple[str | None, list[int]]:
    """Its text, if it has one, and its token ids; ValueError or TypeError for what is no prompt of this model."""
    text: str | None = None
    if isinstance(prompt, str):
        text = prompt
        token_ids = tokenizer_of(loaded).encode(prompt)
        if not token_ids:
            raise ValueError("the prompt is empty: give some text, or prompt_token_ids with at least one id")
    elif isinstance(prompt, Mapping):
        text = prompt.get("prompt")
        if "prompt_token_ids" in prompt:
            token_ids = prompt["prompt_token_ids"]
            if isinstance(token_ids, str) or not isinstance(token_ids, Sequence):
                raise TypeError(f"prompt_token_ids must be a list of token ids, got {type(token_ids).__name__}")
            token_ids = list(token_ids)
        elif text is not None:
            return read_prompt(text, loaded)
        else:
            raise ValueError(f"a prompt needs 'prompt' or 'prompt_token_ids', got the keys {sorted(prompt)}")
    else:
        raise TypeError(f"a prompt is a string or {{'prompt_token_ids': [...]}}, got {type(prompt).__name__}")
    vocab = loaded.config.vocab_size
    if set(map(type, token_ids)) == {int} and min(token_ids) >= 0 and max(token_ids) < vocab:
        return text, token_ids
    for position, token in enumerate(token_ids):
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab:
            raise ValueError(f"prompt_token_ids[{position}] = {token!r}: must be a token id from 0 to {vocab - 1}")
    return text, token_ids


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt, or a list of them, as a list."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise TypeError(
            f"prompts must be a string, {{'prompt_token_ids': [...]}} or a list of those, got {type(prompts).__name__}"
        )
    return list(prompts)


def as_params(params: SamplingParams | Sequence[SamplingParams] | None, n: int) -> list[SamplingParams]:
    """One for each of n prompts."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * n
    if not isinstance(params, Sequence):
        raise TypeError(f"sampling_params must be a SamplingParams or a list of them, got {type(params).__name__}")
    if len(params) != n:
        raise ValueError(f"{n} prompts and {len(params)} sampling_params: give one for all, or one for each")
    return list(params)
