"""What a caller asks for, what the scheduler keeps of it, and what comes back."""

from __future__ import annotations

import dataclasses
import enum
import math
import time
from dataclasses import dataclass, field
from typing import Any

from .config import closest

GREEDY_BELOW = 1e-5
"""A lower temperature than this is greedy, as in vLLM: dividing by it would overflow."""


MAX_STOP_IDS = 128
"""Stop token ids that min_tokens can hold back for one request: the width of V2's table of them (vLLM's too)."""


@dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens, under vLLM's names. A bad value, or a keyword that is none of these, raises ValueError.

    temperature 0 is greedy, and so is one below 1e-5; filters mean nothing then. top_k 0 or -1 and top_p 1 and min_p
    0 switch the filter off. `stop` strings are cut from the text; `stop_token_ids` end it. `logprobs` k returns the k
    best and the sampled token's. `n` completions share the prompt. `max_tokens` None means as many as fit.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    skip_special_tokens: bool = True
    detokenize: bool = True

    def __new__(cls, *args: Any, **kwargs: Any) -> SamplingParams:
        names = [f.name for f in dataclasses.fields(cls)]
        for key in kwargs:
            if key not in names:
                raise ValueError(f"unknown sampling parameter {key!r}{closest(key, names)} Known: {', '.join(names)}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else self._tuple("stop", "a string or a list of strings")
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", self._tuple("stop_token_ids", "a list of token ids"))
        for name in ("ignore_eos", "skip_special_tokens", "detokenize"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r}: must be True or False")
        if not _real(self.temperature) or self.temperature < 0:
            raise ValueError(f"temperature={self.temperature!r}: must be a finite number of at least 0 (0 is greedy)")
        if not _real(self.top_p) or not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p!r}: must be above 0 and at most 1 (1 is off)")
        if not _whole(self.top_k) or self.top_k < -1:
            raise ValueError(f"top_k={self.top_k!r}: must be a whole number, at least 1, or 0 or -1 for off")
        if not _real(self.min_p) or not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p={self.min_p!r}: must be between 0 (off) and 1")
        if not _whole(self.n) or self.n < 1:
            raise ValueError(f"n={self.n!r}: must be a whole number of at least 1")
        if self.n > 1 and self.temperature < GREEDY_BELOW:
            raise ValueError(
                f"n={self.n} with temperature=0 would give the same text {self.n} times; "
                "raise the temperature or use n=1"
            )
        if self.max_tokens is not None and (not _whole(self.max_tokens) or self.max_tokens < 1):
            raise ValueError(
                f"max_tokens={self.max_tokens!r}: must be a whole number of at least 1, or None for as many as fit"
            )
        if not _whole(self.min_tokens) or self.min_tokens < 0:
            raise ValueError(f"min_tokens={self.min_tokens!r}: must be a whole number of at least 0")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}")
        if self.seed is not None and (not _whole(self.seed) or not -(2**63) <= self.seed < 2**63):
            raise ValueError(f"seed={self.seed!r}: must be a 64-bit whole number or None")
        if self.logprobs is not None and (not _whole(self.logprobs) or self.logprobs < 0):
            raise ValueError(f"logprobs={self.logprobs!r}: must be a whole number of at least 0, or None for none")
        if any(not isinstance(s, str) or not s for s in stop):
            raise ValueError(f"stop={self.stop!r}: must be non-empty strings")
        if stop and not self.detokenize:
            raise ValueError(
                "stop strings are found in the text, which detokenize=False does not make; use stop_token_ids"
            )
        if any(not _whole(t) or t < 0 for t in self.stop_token_ids):
            raise ValueError(f"stop_token_ids={self.stop_token_ids!r}: must be token ids")
        if self.temperature < GREEDY_BELOW:
            for name, off in (("temperature", 0.0), ("top_p", 1.0), ("top_k", 0), ("min_p", 0.0)):
                object.__setattr__(self, name, off)

    def _tuple(self, name: str, what: str) -> tuple[Any, ...]:
        value = getattr(self, name)
        if value is None:
            return ()
        if not isinstance(value, list | tuple | set | frozenset):
            raise ValueError(f"{name}={value!r}: must be {what}, or None for none")
        return tuple(value)


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _real(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


class RequestStatus(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


@dataclass(eq=False)
class Request:
    """One request as the scheduler sees it (a prompt with n > 1 is n of these).

    `num_computed_tokens` counts tokens whose KV is computed or being computed by a step in flight.
    `num_output_placeholders` counts sampled tokens that are still on the device; they follow `output_token_ids`.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    max_tokens: int
    """Settled: sampling_params.max_tokens, or what fits."""
    stop_token_ids: frozenset[int] = frozenset()
    """Every id that ends it: the caller's, and the model's end-of-sequence ids unless ignore_eos."""
    priority: int = 0
    arrival_time: float = field(default_factory=time.monotonic)
    output_token_ids: list[int] = field(default_factory=list)
    status: RequestStatus = RequestStatus.WAITING
    num_computed_tokens: int = 0
    num_output_placeholders: int = 0
    num_cached_tokens: int = -1
    """Prompt tokens found in the prefix cache when first scheduled; -1 before that."""
    num_preemptions: int = 0
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens known to the host."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def all_token_ids(self) -> list[int]:
        return self.prompt_token_ids + self.output_token_ids

    @property
    def num_output_tokens(self) -> int:
        return len(self.output_token_ids)

    @property
    def is_finished(self) -> bool:
        return self.status is RequestStatus.FINISHED


@dataclass(frozen=True)
class Logprob:
    logprob: float
    rank: int | None
    decoded_token: str | None = None


@dataclass(frozen=True)
class RequestMetrics:
    """Times are seconds on `time.monotonic`'s clock; None until it happened."""

    arrival_time: float
    first_scheduled_time: float | None
    first_token_time: float | None
    last_token_time: float | None
    num_preemptions: int


@dataclass(frozen=True)
class CompletionOutput:
    """One completion. `logprobs[i]` maps token id -> Logprob for output position i. finish_reason: stop, length or
    abort."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[dict[int, Logprob], ...] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(frozen=True)
class RequestOutput:
    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    finished: bool
    num_cached_tokens: int
    metrics: RequestMetrics
