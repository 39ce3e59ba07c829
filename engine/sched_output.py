"""What the scheduler tells a runner about a step, and what the runner answers. Plain data only."""

from __future__ import annotations

from dataclasses import dataclass

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
    """The requests of this step that the runner holds already; the lists are parallel to `req_ids`.

    `new_block_ids[i]` is appended to the blocks of `req_ids[i]`, unless it is in `resumed_req_ids` (V1 only): then
    the list holds all its blocks and replaces the old ones. `num_computed_tokens` is before this step.
    `all_token_ids` has the prompt and the output tokens of each request that the runner did not run in the step before
    (resumed, or left out for want of blocks): of these alone it may not know the last tokens (V1 keeps placeholders in
    the overlapped loop).
    """

    req_ids: list[str]
    resumed_req_ids: frozenset[str]
    new_block_ids: list[list[int]]
    num_computed_tokens: list[int]
    all_token_ids: dict[str, list[int]]


@dataclass(frozen=True)
class SchedulerOutput:
    """One step. `num_scheduled_tokens` is in schedule order: running requests, then admitted ones.

    `finished_req_ids` ended since the last schedule and are still held by the runner, which must drop them before it
    adds any request of this step (an id may be used again at once). `preempted_req_ids` lost their blocks in this
    schedule.
    """

    step: int
    scheduled_new_reqs: list[NewRequestData]
    scheduled_cached_reqs: CachedRequestData
    num_scheduled_tokens: dict[str, int]
    total_num_scheduled_tokens: int
    finished_req_ids: frozenset[str]
    preempted_req_ids: frozenset[str]


@dataclass
class ModelRunnerOutput:
    """The tokens of one step. `sampled_token_ids[i]` belongs to `req_ids[i]` and is empty after a partial prefill.

    `logprobs` maps a request to a list parallel to its sampled tokens; an entry maps token id -> (logprob, rank or
    None).
    """

    req_ids: list[str]
    sampled_token_ids: list[list[int]]
    logprobs: dict[str, list[dict[int, tuple[float, int | None]]]] | None = None
