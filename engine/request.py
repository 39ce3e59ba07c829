"""What a caller asks for, what the scheduler keeps of it, and what comes back."""

from __future__ import annotations

import enum
import time
from array import array
from dataclasses import dataclass, field

from .running_table import RunningTable
from .sample.logprobs import RequestLogprobs
from .sample.prompt_logprobs import PromptLogprobs
from .sample.structured_output import StructuredOutputRequest
from .sampling_params import SamplingParams


class RequestStatus(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


@dataclass(eq=False)
class Request:
    """One request as the scheduler sees it (a prompt with n > 1 is n of these)."""

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    max_tokens: int
    """Settled: sampling_params.max_tokens, or what fits."""
    stop_token_ids: frozenset[int] = frozenset()
    """Every id that ends it: the caller's, and the model's end-of-sequence ids unless ignore_eos."""
    priority: int = 0
    arrival_time: float = field(default_factory=time.monotonic)
    quiet: bool = False
    """Nobody wants its tokens before it is finished; settled before it is admitted."""
    spec_token_ids: list[int] = field(default_factory=list)
    """Drafts behind the known tokens, where the host has them (V1)."""
    status: RequestStatus = RequestStatus.WAITING
    num_cached_tokens: int = -1
    """Prompt tokens found in the prefix cache when first scheduled; -1 before that."""
    num_preemptions: int = 0
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    structured_output: StructuredOutputRequest | None = None
    """Its grammar, if its output is held to one."""
    prompt_logprobs: list[RequestLogprobs | None] = field(default_factory=list)
    """If asked for: one for each prompt position computed so far, None for the first."""
    first_token_time: float | None = None
    """Like the last token's, when it reached the host, in seconds on `time.monotonic`'s clock."""
    row: int = field(default=-1, init=False)
    """Its row of the scheduler's table while it runs, else -1."""
    _table: RunningTable | None = field(default=None, init=False, repr=False)
    _output_token_ids: list[int] = field(default_factory=list, init=False, repr=False)
    _num_computed_tokens: int = field(default=0, init=False)
    _num_output_placeholders: int = field(default=0, init=False)
    _last_token_time: float | None = field(default=None, init=False)
    _accepted_per_round: list[int] = field(default_factory=list, init=False, repr=False)
    _num_draft_tokens: int = field(default=0, init=False)

    # While it runs its counts live in the scheduler's table, which moves all of them at once, and its last tokens.

    def enter(self, table: RunningTable, row: int) -> None:
        """From now on the counts live in `row` of `table`."""
        table.num_computed_tokens[row] = self._num_computed_tokens
        table.num_output_placeholders[row] = self._num_output_placeholders
        table.last_token_time[row] = self._last_token_time or 0.0
        table.arrived.enter(row)
        self._table, self.row = table, row

    def leave(self) -> int:
        """Takes counts and tokens back; returns the row."""
        if self._table is not None:
            self._table.arrived.settle(self.row)
        self._num_computed_tokens = self.num_computed_tokens
        self._num_output_placeholders = self.num_output_placeholders
        self._last_token_time = self.last_token_time
        row, self._table, self.row = self.row, None, -1
        return row

    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose KV is computed or being computed by a step in flight."""
        return self._num_computed_tokens if self._table is None else int(self._table.num_computed_tokens[self.row])

    @num_computed_tokens.setter
    def num_computed_tokens(self, value: int) -> None:
        if self._table is None:
            self._num_computed_tokens = value
        else:
            self._table.num_computed_tokens[self.row] = value

    @property
    def num_output_placeholders(self) -> int:
        """Sampled tokens that are still on the device; they follow `output_token_ids`."""
        if self._table is None:
            return self._num_output_placeholders
        return int(self._table.num_output_placeholders[self.row])

    @num_output_placeholders.setter
    def num_output_placeholders(self, value: int) -> None:
        if self._table is None:
            self._num_output_placeholders = value
        else:
            self._table.num_output_placeholders[self.row] = value

    @property
    def last_token_time(self) -> float | None:
        if self._table is None:
            return self._last_token_time
        return float(self._table.last_token_time[self.row]) or None

    @property
    def accepted_per_round(self) -> list[int]:
        """Accepted drafts of each step that verified some."""
        if self._table is not None:
            self._table.rounds.settle()
        return self._accepted_per_round

    @property
    def num_draft_tokens(self) -> int:
        """Drafts that those steps had room for."""
        if self._table is not None:
            self._table.rounds.settle()
        return self._num_draft_tokens

    def add_rounds(self, accepted: list[int], num_drafts: int) -> None:
        """Steps that verified `num_drafts` in all, and accepted so many each."""
        self._accepted_per_round += accepted
        self._num_draft_tokens += num_drafts

    @property
    def output_token_ids(self) -> list[int]:
        """Every one that has reached the host. Read it only, while the request runs."""
        if self._table is not None:
            self._table.arrived.settle(self.row)
        return self._output_token_ids

    def take_tokens(self, token_ids: list[int]) -> None:
        """From the table, which has counted them."""
        self._output_token_ids += token_ids

    def token_bytes(self, begin: int, end: int) -> bytes:
        """The known tokens from position `begin` to `end`, of 8 bytes each."""
        kept = self._table.arrived.read(self.row, begin, end) if self._table is not None else None
        if kept is not None:
            return kept.tobytes()
        num_prompt = len(self.prompt_token_ids)
        token_ids = self.prompt_token_ids[begin:end]
        if end > num_prompt:
            token_ids = token_ids + self.output_token_ids[max(0, begin - num_prompt) : end - num_prompt]
        return array("q", token_ids).tobytes()

    def append_output(self, token_id: int, now: float) -> None:
        """A token has reached the host."""
        self.output_token_ids.append(token_id)
        if self.first_token_time is None:
            self.first_token_time = now
        if self._table is None:
            self._last_token_time = now
        else:
            self._table.arrived.add_one(self.row, token_id)
            self._table.last_token_time[self.row] = now

    def add_prompt_logprobs(self, logprobs: PromptLogprobs) -> None:
        """Those of the next positions, or of positions that were computed again."""
        self.prompt_logprobs = [*(self.prompt_logprobs or [None])[: logprobs.start], *logprobs.entries]

    def drop_behind(self, num_output_tokens: int) -> None:
        """Of one that has ended: the output has these tokens, and not those that drafts brought behind them."""
        del self._output_token_ids[num_output_tokens:]

    @property
    def is_ready(self) -> bool:
        """It waits for nothing but its turn: no token of it is in flight, and its grammar is compiled."""
        return self.num_output_placeholders == 0 and (self.structured_output is None or self.structured_output.is_ready)

    @property
    def skip_reading_prefix_cache(self) -> bool:
        """It needs the hidden states of its whole prompt. With an output it has had its prompt's logprobs."""
        return self.sampling_params.prompt_logprobs is not None and not self.output_token_ids

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
    """Times are seconds on `time.monotonic`'s clock; None until it happened.

    Drafts: `num_drafts` rounds had room for `num_draft_tokens` of them and accepted `num_accepted_tokens`;
    `accepted_per_round` has an entry for each round. V2's host doesn't know how many were found: its every decode with
    room for drafts is a round, of as many as there was room for; V1's are those with drafts. Of n completions they are
    the sums, the rounds one completion after the other."""

    arrival_time: float
    first_scheduled_time: float | None
    first_token_time: float | None
    last_token_time: float | None
    num_preemptions: int
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_round: tuple[int, ...] = ()


@dataclass(frozen=True)
class CompletionOutput:
    """One completion. `logprobs[i]` maps token id -> Logprob for output position i.

    finish_reason: stop, length, abort, or error, for which stop_reason says what went wrong.
    """

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
    prompt_logprobs: tuple[dict[int, Logprob] | None, ...] | None = None
    """Where asked for: of each prompt position token id -> Logprob, the prompt's own token first; None for the first
    position."""
