"""What a caller asks for, what the scheduler keeps of it, and what comes back."""

from __future__ import annotations

import enum
import time
from dataclasses import dataclass, field

from .sampling_params import SamplingParams


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
