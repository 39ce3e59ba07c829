"""What an engine tells those who observe it: an event is a frozen dataclass with the step, the runner and a time.

Who gets them, and at what cost: hooks.py, from where they are imported too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .sample.trace import SamplingTrace

Lane = Literal["host", "compute", "copy"]


@dataclass(frozen=True, slots=True)
class Event:
    """What every event carries. `step` counts engine steps from 1; `time_ns` is `time.perf_counter_ns()`."""

    step: int
    runner: str
    time_ns: int


@dataclass(frozen=True, slots=True)
class RequestAdded(Event):
    request_id: str
    prompt_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RequestScheduled(Event):
    """`num_tokens` of the request run in this step, from position `num_computed_tokens` on."""

    request_id: str
    num_tokens: int
    num_computed_tokens: int
    kind: Literal["new", "running", "resumed"]
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class RequestPreempted(Event):
    request_id: str
    num_computed_tokens: int
    by: str
    """The request whose need for a block caused it."""


@dataclass(frozen=True, slots=True)
class RequestResumed(Event):
    request_id: str


@dataclass(frozen=True, slots=True)
class RequestFinished(Event):
    request_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class RowWritten(Event):
    """A request got a row: of the persistent batch (V1) or of the state table (V2)."""

    request_id: str
    row: int


@dataclass(frozen=True, slots=True)
class RowMoved(Event):
    """V1 only: `condense` fills a hole (`src` -> `dst`); `swap` exchanges two rows."""

    request_id: str
    src: int
    dst: int
    how: Literal["condense", "swap"]


@dataclass(frozen=True, slots=True)
class RowFreed(Event):
    request_id: str
    row: int


@dataclass(frozen=True, slots=True)
class BlockTableGathered(Event):
    """V2 only: batch position i of this step reads state row `idx_mapping[i]`."""

    idx_mapping: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class InputsPrepared(Event):
    """`made_by` names, for each input tensor, who made it: a kernel, a host loop, a copy."""

    num_reqs: int
    num_tokens: int
    num_tokens_padded: int
    made_by: dict[str, str]


@dataclass(frozen=True, slots=True)
class KernelLaunched(Event):
    name: str
    form: str


@dataclass(frozen=True, slots=True)
class HostWait(Event):
    """The host stood still for a stream. `inside_step` is False for the wait that fetches a finished step's output."""

    reason: str
    begin_ns: int
    end_ns: int
    inside_step: bool


@dataclass(frozen=True, slots=True)
class Sampled(Event):
    """A token of a step reached the host. `position` is its absolute position in the request."""

    request_id: str
    token_id: int
    position: int
    sampled_in_step: int


@dataclass(frozen=True, slots=True)
class SamplingTraced(Event):
    """How the token at `position` was drawn; it follows the token's `Sampled`. See `ON_REQUEST`."""

    request_id: str
    position: int
    sampled_in_step: int
    trace: SamplingTrace


@dataclass(frozen=True, slots=True)
class DraftProposed(Event):
    """k drafts that a step judged, the first of them for `position`. Told when that step's tokens reach the host, on
    either runner: on V2 the host sees the drafts no sooner.

    `draft_probs` [k] is q, the drafter's probability of each draft, 1 for one that was not drawn; `confidences` [k],
    None where the drafter has none. See `ON_REQUEST`.
    """

    request_id: str
    position: int
    verified_in_step: int
    token_ids: tuple[int, ...]
    draft_probs: tuple[float, ...]
    confidences: tuple[float, ...] | None


@dataclass(frozen=True, slots=True)
class DraftVerified(Event):
    """What became of the drafts of the `DraftProposed` just before.

    `target_probs` [k] is p, the target's probability of each draft, `uniforms` [k] the u that decided. The first
    `num_accepted` drafts stand; `next_token_id` follows them, a bonus behind all k and a correction otherwise. A
    request that ends inside them drops the rest. `method` is the rule, as in `rejection_sample_method`; what
    "synthetic" accepts says nothing about the drafter. See `ON_REQUEST`.
    """

    request_id: str
    position: int
    verified_in_step: int
    method: str
    target_probs: tuple[float, ...]
    uniforms: tuple[float, ...]
    num_accepted: int
    next_token_id: int


@dataclass(frozen=True, slots=True)
class VerificationBudgeted(Event):
    """The host decided that a step verifies `budget` of the drafts of its `num_reqs` requests, who have up to
    `num_drafts`; `expected_tokens` is what it expects of them, None while no confidences have arrived. The step runs
    `num_tokens` tokens besides the drafts: one of each request, and prompts or a captured step's padding."""

    num_reqs: int
    num_drafts: int
    num_tokens: int
    budget: int
    expected_tokens: float | None


@dataclass(frozen=True, slots=True)
class PromptLogprobsComputed(Event):
    """Logprobs of a prompt's own tokens at the positions `start` .. `start + num_positions - 1` reached the host: those
    of the part of the prompt that `computed_in_step` ran, the `k` most likely tokens of each. Logits of `chunk_rows`
    positions existed at a time."""

    request_id: str
    computed_in_step: int
    start: int
    num_positions: int
    k: int
    chunk_rows: int


@dataclass(frozen=True, slots=True)
class GrammarBitmaskFilled(Event):
    """A request's grammar has said what may follow, for the step under way: `num_allowed_tokens` of each of its rows of
    logits, one behind its last known token and one behind each of its drafts.

    The grammar goes along with the first `num_allowed_drafts` of the drafts (-1 is none); its matcher has walked over
    them and was rolled back. Rows behind the draft that it refuses allow everything, as no token of theirs is kept.
    """

    request_id: str
    draft_token_ids: tuple[int, ...]
    num_allowed_drafts: int
    num_allowed_tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GrammarAdvanced(Event):
    """A step's tokens reached the host, and the request's grammar has taken `token_ids` of them. With `is_terminated`
    the output is complete; `error` says why it can't be held to the grammar any longer. What the step sampled behind
    either is dropped."""

    request_id: str
    sampled_in_step: int
    token_ids: tuple[int, ...]
    is_terminated: bool
    error: str | None


@dataclass(frozen=True, slots=True)
class OutputDelivered(Event):
    request_id: str
    new_token_ids: tuple[int, ...]
    new_text: str
    finish_reason: str | None


@dataclass(frozen=True, slots=True)
class SpanBegun(Event):
    """A phase of the host begins (device spans come whole, as `SpanEnded`)."""

    name: str
    lane: Lane


@dataclass(frozen=True, slots=True)
class SpanEnded(Event):
    """A measured stretch of time in one lane, `begin_ns`..`end_ns` on the clock of `time.perf_counter_ns`."""

    name: str
    lane: Lane
    begin_ns: int
    end_ns: int


DRAFT_EVENTS: tuple[type[Event], ...] = (DraftProposed, DraftVerified)
ON_REQUEST: tuple[type[Event], ...] = (SamplingTraced, *DRAFT_EVENTS)
"""Events that cost the device work of its own: only who names the type gets them, `Event` is all of the others."""
