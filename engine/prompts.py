"""What `LLM` takes as prompts and their parameters, checked, and the token ids that a prompt is."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

from .config_checks import ConfigError
from .models import LoadedModel
from .sampling_params import SamplingParams

Prompt = str | Mapping[str, Any]
"""A text, or `{"prompt_token_ids": [...]}`, where "prompt" may say the text that they are of."""
_KEYS = ("prompt", "prompt_token_ids")


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
    _check(prompt)
    vocab_size = loaded.config.vocab_size
    if isinstance(prompt, str):
        text: str | None = prompt
    else:
        text = prompt.get("prompt")
        if prompt.get("prompt_token_ids") is not None:
            return text, _token_ids(prompt["prompt_token_ids"], vocab_size)
    assert text is not None, "checked"
    token_ids = _token_ids(tokenizer_of(loaded).encode(text), vocab_size)
    if not token_ids:
        raise ValueError("the prompt is empty: give some text, or prompt_token_ids with at least one id")
    return text, token_ids


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several as a list. TypeError for what is neither."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise TypeError(
            f"prompts must be a string, {{'prompt_token_ids': [...]}} or a list of those, got {type(prompts).__name__}"
        )
    return list(prompts)


def as_params(params: SamplingParams | Sequence[SamplingParams] | None, n: int) -> list[SamplingParams]:
    """The parameters of each of `n` prompts. TypeError or ValueError if there aren't as many."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * n
    if not isinstance(params, Sequence):
        raise TypeError(f"sampling_params must be a SamplingParams or a list of them, got {type(params).__name__}")
    if len(params) != n:
        raise ValueError(f"{n} prompts and {len(params)} sampling_params: give one for all, or one for each")
    return list(params)


def _check(prompt: Any) -> None:
    """TypeError or ValueError, which say what a prompt is, for what is none."""
    if isinstance(prompt, str):
        return
    if not isinstance(prompt, Mapping):
        raise TypeError(f"a prompt is a string or {{'prompt_token_ids': [...]}}, got {type(prompt).__name__}")
    unknown = [key for key in prompt if key not in _KEYS]
    if unknown or all(prompt.get(key) is None for key in _KEYS):
        raise ValueError(f"a prompt has 'prompt' or 'prompt_token_ids' and nothing else, got the keys {list(prompt)}")
    if not isinstance(prompt.get("prompt", ""), str | None):
        raise TypeError(f"a prompt's text must be a string, got {type(prompt['prompt']).__name__}")


def _token_ids(token_ids: Any, vocab_size: int) -> list[int]:
    """Token ids as plain ints; whole numbers of NumPy or torch are taken too."""
    if isinstance(token_ids, str) or not isinstance(token_ids, Sequence):
        raise TypeError(f"prompt_token_ids must be a list of token ids, got {type(token_ids).__name__}")
    if set(map(type, token_ids)) == {int} and min(token_ids) >= 0 and max(token_ids) < vocab_size:
        return list(token_ids)
    return [_token_id(token, position, vocab_size) for position, token in enumerate(token_ids)]


def _token_id(token: Any, position: int, vocab_size: int) -> int:
    try:
        value = -1 if isinstance(token, bool) else operator.index(token)
    except TypeError:
        value = -1
    if not 0 <= value < vocab_size:
        raise ValueError(
            f"prompt_token_ids[{position}] = {token!r}: must be a token id from 0 to {vocab_size - 1}"
        ) from None
    return value
