"""How to choose the tokens of one request, under vLLM's names."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .config import closest
from .sample.logits_processors import LogitsProcessor
from .sample.structured_outputs_params import StructuredOutputsParams
from .sampling_checks import MIN_FLOAT32, as_tuple, is_real, is_whole, settle_logit_bias, settle_token_ids

GREEDY_BELOW = 1e-5
"""A lower temperature than this is greedy, as in vLLM: dividing by it would overflow."""

# What one request may ask for: the widths of V2's tables (vLLM's too).
MAX_STOP_IDS = 128
"""Stop token ids that min_tokens can hold back."""
MAX_ALLOWED_TOKEN_IDS = 1024
MAX_LOGIT_BIASES = 1024
MAX_BAD_WORDS = 128
"""Sequences of token ids; a word makes one or two."""
MAX_BAD_WORD_TOKENS = 1024
"""In all sequences together."""


@dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens, under vLLM's names. A bad value, or a keyword that is none of these, raises ValueError.

    temperature 0 is greedy, and so is one below 1e-5; filters mean nothing then. top_k 0 or -1 and top_p 1 and min_p
    0 switch the filter off.

    presence_penalty and frequency_penalty, from -2 to 2, are taken off the logit of a token that the output has, the
    second for each time it has it. repetition_penalty divides the logit, or multiplies it where it is negative, of a
    token that prompt or output has. logit_bias adds to the logits of token ids (clamped to -100 .. 100).
    allowed_token_ids forbids every other token. bad_words never appear in the output, nor do the sequences of
    bad_words_token_ids: their last token is forbidden where it would complete them. logits_processors are the
    caller's own, see `engine.sample.logits_processors`; structured_outputs is the language that the output must belong
    to. In which order these act: `engine.sample.order`.

    `stop` strings are cut from the text; `stop_token_ids` end it. `logprobs` k returns the k best and the sampled
    token's, `prompt_logprobs` the same of each prompt token but the first; -1 is the whole vocabulary. `n` completions
    share the prompt. `max_tokens` None means as many as fit.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    # dict: no part of the hash, or parameters with a bias could not be a key
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    logits_processors: tuple[LogitsProcessor, ...] = ()
    structured_outputs: StructuredOutputsParams | None = None
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    detokenize: bool = True

    def __new__(cls, *args: Any, **kwargs: Any) -> SamplingParams:
        for key in kwargs:
            if key not in cls.__dataclass_fields__:
                names = [f.name for f in dataclasses.fields(cls)]
                raise ValueError(f"unknown sampling parameter {key!r}{closest(key, names)} Known: {', '.join(names)}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        self._check_draw()
        self._check_logits()
        self._check_length()
        if self.temperature < GREEDY_BELOW:
            for name, off in (("temperature", 0.0), ("top_p", 1.0), ("top_k", 0), ("min_p", 0.0)):
                self._set(name, off)

    @property
    def uses_penalties(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _check_draw(self) -> None:
        if not is_real(self.temperature) or self.temperature < 0:
            raise ValueError(
                f"temperature={self.temperature!r}: must be a finite float32 number of at least 0 (0 is greedy)"
            )
        if not is_real(self.top_p) or not MIN_FLOAT32 <= self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p!r}: must be above 0 and at most 1 (1 is off)")
        if not is_whole(self.top_k) or self.top_k < -1:
            raise ValueError(f"top_k={self.top_k!r}: must be a whole number, at least 1, or 0 or -1 for off")
        if not is_real(self.min_p) or not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p={self.min_p!r}: must be between 0 (off) and 1")
        if not is_whole(self.n) or self.n < 1:
            raise ValueError(f"n={self.n!r}: must be a whole number of at least 1")
        if self.n > 1 and self.temperature < GREEDY_BELOW:
            raise ValueError(
                f"n={self.n} with temperature=0 would give the same text {self.n} times; "
                "raise the temperature or use n=1"
            )
        if self.seed is not None and (not is_whole(self.seed) or not -(2**63) <= self.seed < 2**63):
            raise ValueError(f"seed={self.seed!r}: must be a 64-bit whole number or None")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None and (not is_whole(value) or value < -1):
                raise ValueError(
                    f"{name}={value!r}: must be a whole number of at least 0, -1 for the whole vocabulary, or None for "
                    "none"
                )

    def _check_logits(self) -> None:
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            if not is_real(value) or not -2 <= value <= 2:
                raise ValueError(f"{name}={value!r}: must be between -2 and 2 (0 is off)")
        if not is_real(self.repetition_penalty) or self.repetition_penalty < MIN_FLOAT32:
            raise ValueError(f"repetition_penalty={self.repetition_penalty!r}: must be above 0 (1 is off)")
        self._set("logit_bias", settle_logit_bias(self.logit_bias, MAX_LOGIT_BIASES))
        if self.allowed_token_ids is not None:
            allowed = settle_token_ids("allowed_token_ids", self.allowed_token_ids, MAX_ALLOWED_TOKEN_IDS)
            self._set("allowed_token_ids", allowed)
        words = as_tuple("bad_words", self.bad_words, "a list of strings")
        if any(not isinstance(word, str) or not word.strip() for word in words):
            raise ValueError(f"bad_words={self.bad_words!r}: must be strings that are not blank")
        self._set("bad_words", words)
        sequences = as_tuple("bad_words_token_ids", self.bad_words_token_ids, "a list of lists of token ids")
        settled = [settle_token_ids("bad_words_token_ids", s, MAX_BAD_WORD_TOKENS, distinct=False) for s in sequences]
        self._set("bad_words_token_ids", tuple(dict.fromkeys(settled)))
        num_words, num_tokens = len(self.bad_words_token_ids), sum(map(len, self.bad_words_token_ids))
        if num_words > MAX_BAD_WORDS or num_tokens > MAX_BAD_WORD_TOKENS:
            raise ValueError(
                f"the bad words are {num_words} sequences of {num_tokens} tokens (a word has one form after a space "
                f"and one without): at most {MAX_BAD_WORDS} sequences and {MAX_BAD_WORD_TOKENS} tokens are possible"
            )
        processors = as_tuple("logits_processors", self.logits_processors, "a list of LogitsProcessor objects")
        for processor in processors:
            if not isinstance(processor, LogitsProcessor):
                raise ValueError(
                    f"logits_processors has {processor!r}: must be objects of a subclass of "
                    "engine.sample.logits_processors.LogitsProcessor"
                )
        self._set("logits_processors", processors)
        outputs = self.structured_outputs
        if isinstance(outputs, Mapping):
            self._set("structured_outputs", StructuredOutputsParams(**outputs))
        elif outputs is not None and not isinstance(outputs, StructuredOutputsParams):
            raise ValueError(
                f"structured_outputs={outputs!r}: must be a StructuredOutputsParams, a dict of its keys, or None"
            )

    def _check_length(self) -> None:
        if self.max_tokens is not None and (not is_whole(self.max_tokens) or self.max_tokens < 1):
            raise ValueError(
                f"max_tokens={self.max_tokens!r}: must be a whole number of at least 1, or None for as many as fit"
            )
        if not is_whole(self.min_tokens) or self.min_tokens < 0:
            raise ValueError(f"min_tokens={self.min_tokens!r}: must be a whole number of at least 0")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}")
        if self.min_tokens and self.structured_outputs is not None:
            raise ValueError(
                f"min_tokens={self.min_tokens} with structured_outputs: an output that is complete can only stop; "
                "ask for the length in the schema or grammar"
            )
        for name in ("ignore_eos", "skip_special_tokens", "detokenize"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r}: must be True or False")
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        stop = as_tuple("stop", stop, "a string or a list of strings")
        if any(not isinstance(s, str) or not s for s in stop):
            raise ValueError(f"stop={self.stop!r}: must be non-empty strings")
        self._set("stop", stop)
        if stop and not self.detokenize:
            raise ValueError(
                "stop strings are found in the text, which detokenize=False does not make; use stop_token_ids"
            )
        stop_ids = as_tuple("stop_token_ids", self.stop_token_ids, "a list of token ids")
        if any(not is_whole(t) or t < 0 for t in stop_ids):
            raise ValueError(f"stop_token_ids={self.stop_token_ids!r}: must be token ids")
        self._set("stop_token_ids", stop_ids)
