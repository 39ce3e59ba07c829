"""SamplingParams made ready for one model before the request is queued: checked against its ids, words as ids."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from ..models import Tokenizer
from ..sampling_params import MAX_STOP_IDS, SamplingParams


def settle_params(
    params: SamplingParams, vocab_size: int, tokenizer: Tokenizer | None, eos_token_ids: Iterable[int]
) -> tuple[SamplingParams, frozenset[int]]:
    """The params that the runners get, and every id that ends the request.

    `bad_words` have joined `bad_words_token_ids`; logprobs and prompt_logprobs of -1 are `vocab_size`. Raises
    ValueError, naming the parameter, for what this model can't do.
    """
    for name, ids in (
        ("stop_token_ids", params.stop_token_ids),
        ("logit_bias", params.logit_bias or ()),
        ("allowed_token_ids", params.allowed_token_ids or ()),
        ("bad_words_token_ids", [token for sequence in params.bad_words_token_ids for token in sequence]),
    ):
        beyond = [token for token in ids if token >= vocab_size]
        if beyond:
            raise ValueError(f"{name} has {beyond[0]}: the model's ids go from 0 to {vocab_size - 1}")
    if tokenizer is None:
        for name, remedy in (
            ("stop", "stop strings need a tokenizer, and this engine has none; use stop_token_ids"),
            ("bad_words", "bad_words need a tokenizer, and this engine has none; use bad_words_token_ids"),
            ("structured_outputs", "structured_outputs need a tokenizer, and this engine has none; load one"),
        ):
            if getattr(params, name):
                raise ValueError(remedy)
    logprobs = _num_logprobs("logprobs", params.logprobs, vocab_size)
    prompt_logprobs = _num_logprobs("prompt_logprobs", params.prompt_logprobs, vocab_size)
    stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else frozenset(eos_token_ids))
    if params.min_tokens and len(stop_ids) > MAX_STOP_IDS:
        raise ValueError(f"min_tokens with {len(stop_ids)} stop token ids: at most {MAX_STOP_IDS} can be held back")
    words = params.bad_words_token_ids
    if params.bad_words and tokenizer is not None:
        words = (*words, *tokenize_bad_words(tokenizer, params.bad_words))
    settled, changes = params, {"bad_words_token_ids": words, "logprobs": logprobs, "prompt_logprobs": prompt_logprobs}
    # A copy costs more than all the rest here; a bias is a dict, which the caller could change while the request runs.
    if params.logit_bias is not None or any(getattr(params, name) != value for name, value in changes.items()):
        settled = dataclasses.replace(params, **changes)  # type: ignore[arg-type]
    _check_that_a_token_is_left(settled, stop_ids, vocab_size)
    return settled, stop_ids


def _num_logprobs(name: str, k: int | None, vocab_size: int) -> int | None:
    if k is not None and k > vocab_size:
        raise ValueError(f"{name}={k}: the vocabulary has {vocab_size} tokens (-1 is all of them)")
    return vocab_size if k == -1 else k


def tokenize_bad_words(tokenizer: Tokenizer, words: Iterable[str]) -> list[tuple[int, ...]]:
    """Each word as the tokens it has at the beginning of a text and behind a space; the two may be the same."""
    sequences: dict[tuple[int, ...], None] = {}
    for word in words:
        for prefix in ("", " "):
            ids = tuple(tokenizer.encode(prefix + word.lstrip(), add_special_tokens=False))
            if ids:
                sequences[ids] = None
    return list(sequences)


def _check_that_a_token_is_left(params: SamplingParams, stop_ids: frozenset[int], vocab_size: int) -> None:
    """What forbids tokens whatever came before may not forbid all of them."""
    forbidden = {sequence[0] for sequence in params.bad_words_token_ids if len(sequence) == 1}
    if params.min_tokens:
        forbidden |= stop_ids
    candidates = range(vocab_size) if params.allowed_token_ids is None else params.allowed_token_ids
    if all(token in forbidden for token in candidates):
        raise ValueError(
            "no token is left to sample: every one of allowed_token_ids is a bad word, or a stop id that min_tokens "
            "holds back; allow more or forbid less"
        )
