"""What the scheduler tells a runner about a step, and what the runner answers. Plain data only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from .sample.draft_trace import DraftTrace
from .sample.logprobs import RequestLogprobs
from .sample.prompt_logprobs import PromptLogprobs
from .sample.trace import SamplingTrace
from .sampling_params import SamplingParams


@dataclass(frozen=True)
class NewRequestData:
    """A request that the runner doesn't hold: a first-time one, or one that comes back after the runner has dropped it.

    `prompt_token_ids` is the caller's prompt. `prefill_token_ids` is all the host knows: the prompt, followed by the
    output tokens when the request has run before. `num_computed_tokens` counts the tokens whose KV is in `block_ids`
    already (a prefix-cache hit). `request_seed_index` numbers the engine's requests as they were added and survives
    preemption: a request without a seed derives its own from it.
    """

    req_id: str
    prompt_token_ids: list[int]
    prefill_token_ids: list[int]
    num_prompt_tokens: int
    sampling_params: SamplingParams
    block_ids: list[int]
    num_computed_tokens: int
    request_seed_index: int
    stop_token_ids: frozenset[int]


@dataclass(frozen=True)
class CachedRequestData:
    """The requests of this step that the runner holds already.

    `num_computed_tokens` i64 [len(req_ids)] is before this step. `new_block_ids` has those that got blocks: the list is
    appended to the request's, unless it is in `resumed_req_ids` (V1 only): then it holds all its blocks and replaces
    the old ones.
    `all_token_ids` has the prompt and the output tokens of each request that the runner did not run in the step before
    (resumed, or left out for want of blocks): of these alone it may not know the last tokens (V1 keeps placeholders in
    the overlapped loop).
    """

    req_ids: tuple[str, ...]
    resumed_req_ids: frozenset[str]
    new_block_ids: dict[str, list[int]]
    num_computed_tokens: np.ndarray
    all_token_ids: dict[str, list[int]]


@dataclass(eq=False)
class ScheduledRows:
    """Whose tokens a step computes, r requests in schedule order: running ones, then admitted ones. Steps that do the
    same for the same requests share one, by which a runner sees that nothing changed. The arrays are read only.

    rows i64 [r]: a number below max_num_seqs that is the request's alone from its admission until it ends or is
    preempted. num_tokens i64 [r], of which the last num_drafts i64 [r] are drafts. ids [r] of objects: request ids.
    Whatever is asked for by id is made only then: it takes the host a loop over all of them.
    """

    rows: np.ndarray
    num_tokens: np.ndarray
    num_drafts: np.ndarray
    ids: np.ndarray

    @cached_property
    def req_ids(self) -> tuple[str, ...]:
        return tuple(self.ids.tolist())

    @cached_property
    def num_scheduled_tokens(self) -> dict[str, int]:
        return dict(zip(self.req_ids, self.num_tokens.tolist(), strict=True))

    @cached_property
    def total_num_tokens(self) -> int:
        return int(self.num_tokens.sum())

    @cached_property
    def has_drafts(self) -> bool:
        return bool(np.count_nonzero(self.num_drafts))

    @cached_property
    def device_drafts(self) -> dict[str, list[int]]:
        """For each request with drafts as many -1: they are known to the device alone."""
        counts = zip(self.req_ids, self.num_drafts.tolist(), strict=True)
        return {req_id: [-1] * count for req_id, count in counts if count}


@dataclass(frozen=True)
class SchedulerOutput:
    """One step.

    `finished_req_ids` ended since the last schedule and are still held by the runner, which must drop them before it
    adds any request of this step (an id may be used again at once). `preempted_req_ids` lost their blocks in this
    schedule.
    """

    step: int
    scheduled: ScheduledRows
    scheduled_new_reqs: list[NewRequestData]
    scheduled_cached_reqs: CachedRequestData
    finished_req_ids: frozenset[str]
    preempted_req_ids: frozenset[str]
    host_drafts: dict[str, list[int]] | None = None
    """By request the drafts that this step verifies; None: only the device knows them (V2)."""
    has_structured_output_requests: bool = False
    """Some request's output is held to a grammar: `sample_tokens` gets a GrammarOutput."""

    @property
    def num_scheduled_tokens(self) -> dict[str, int]:
        """In schedule order; the very dict of the step before if the requests and their counts are the same, so read it
        only."""
        return self.scheduled.num_scheduled_tokens

    @property
    def total_num_scheduled_tokens(self) -> int:
        return self.scheduled.total_num_tokens

    @property
    def scheduled_spec_decode_tokens(self) -> dict[str, list[int]]:
        """The drafts that this step verifies: the last of the request's scheduled tokens. -1 stands for one that only
        the device knows (V2)."""
        return self.scheduled.device_drafts if self.host_drafts is None else self.host_drafts


@dataclass(frozen=True)
class GrammarOutput:
    """What grammars allow in one step, for each row of logits of the requests that have one; other requests are free.

    `structured_output_request_ids[i]` has the next `num_rows[i]` rows of `grammar_bitmask` i32 [n, ceil(V / 32)]: one
    for the token behind its last known one, and one for the token behind each of its drafts. Bit t % 32 of word t // 32
    allows token t.
    """

    structured_output_request_ids: tuple[str, ...]
    grammar_bitmask: np.ndarray
    num_rows: tuple[int, ...]

    def logits_rows(self, first: Mapping[str, int]) -> np.ndarray:
        """i64 [n], the row of logits of each bitmap; `first` is that of each request."""
        begins = [first[req_id] for req_id in self.structured_output_request_ids]
        rows = [np.arange(begin, begin + count) for begin, count in zip(begins, self.num_rows, strict=True)]
        return np.concatenate(rows) if rows else np.empty(0, dtype=np.int64)


@dataclass(frozen=True)
class ModelRunnerOutput:
    """The tokens of one step, r requests in the runner's order.

    Of row i of `sampled_token_ids` i64 [r, N + 1] the first `num_sampled[i]` (i32 [r]) belong to `req_ids[i]`, none
    after a partial prefill. `logprobs` maps a request to a list parallel to its sampled tokens; an entry maps token
    id -> (logprob, rank or None).
    """

    req_ids: tuple[str, ...]
    sampled_token_ids: np.ndarray
    num_sampled: np.ndarray
    logprobs: dict[str, list[RequestLogprobs]] | None = None
    prompt_logprobs: dict[str, PromptLogprobs] | None = None
    """Of the requests that asked for them, those of the prompt positions that the step computed."""
    traces: dict[str, SamplingTrace] | None = None
    """How each request's token was drawn, if somebody watches (`hooks.SamplingTraced`)."""
    draft_traces: dict[str, DraftTrace] | None = None
    """What became of each request's drafts, if somebody watches (`hooks.DRAFT_EVENTS`)."""
    order: np.ndarray | None = None
    """i64 [r]: the place of each request in the step's schedule, where the runner knows it (V2). Steps of the same
    `scheduled` have the very same array."""
