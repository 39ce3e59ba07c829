"""Frozen views of an engine's state at a pause: what the workbench draws.

`take(core)` copies the host's state at once and enqueues copies of the device's state on the compute stream, so that
taking a snapshot between two steps waits for nothing; `PendingSnapshot.result()` waits for the copies and builds the
views.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from .request import Request

if TYPE_CHECKING:
    from .core import EngineCore
    from .dspark.calibration import Calibration
    from .dspark.costs import CostTable


@dataclass(frozen=True, slots=True)
class RequestView:
    request_id: str
    status: Literal["waiting", "running", "preempted", "finished"]
    prompt_token_ids: tuple[int, ...]
    output_token_ids: tuple[int, ...]
    """Tokens that have reached the host; `num_output_placeholders` more are in flight."""
    num_computed_tokens: int
    num_cached_tokens: int
    num_output_placeholders: int
    num_preemptions: int
    priority: int
    block_ids: tuple[int, ...]
    finish_reason: str | None


@dataclass(frozen=True, slots=True)
class RowView:
    """One row of V1's persistent batch or V2's state table. `cells` keeps the column order; an empty row has no id."""

    row: int
    request_id: str | None
    cells: dict[str, int | float | None]
    """V1: num_tokens, num_prompt_tokens, num_computed_tokens, last_token, temperature, top_p, top_k.
    V2: total_len, prompt_len, prefill_len, num_computed_tokens (device), num_computed_tokens_np (host bound),
    last_sampled_token, temperature, top_p, top_k, seed."""
    draft_token_ids: tuple[int, ...] = ()
    """What the next step verifies for this request, as far as it is known by now."""
    confidences: tuple[float, ...] | None = None
    """Of each of these drafts, the drafter's chance that it is accepted behind those before it; None without a
    confidence head."""


@dataclass(frozen=True, slots=True)
class BlockTablesView:
    """`persistent[row]` holds the block ids of a row; `gathered[i]` those of batch position i in this step.

    V1's persistent batch is its own input, so there `idx_mapping` is 0..r-1 and `gathered` is `persistent[:r]`.
    """

    persistent: tuple[tuple[int, ...], ...]
    idx_mapping: tuple[int, ...]
    gathered: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class InputsView:
    """The model's input in the last step, as the device had it."""

    req_ids: tuple[str, ...]
    num_scheduled_tokens: tuple[int, ...]
    num_tokens: int
    num_tokens_padded: int
    input_ids: tuple[int, ...]
    positions: tuple[int, ...]
    query_start_loc: tuple[int, ...]
    seq_lens: tuple[int, ...]
    slot_mapping: tuple[int, ...]
    logits_indices: tuple[int, ...]
    made_by: dict[str, str]


@dataclass(frozen=True, slots=True)
class BlockView:
    block_id: int
    ref_cnt: int
    owners: tuple[str, ...]
    block_hash: str | None
    """First 8 hex digits of the chained hash while the block is published in the prefix cache."""


@dataclass(frozen=True, slots=True)
class PoolView:
    block_size: int
    blocks: tuple[BlockView, ...]
    """All blocks, by id; block 0 is the null block and belongs to nobody."""
    free: tuple[int, ...]
    """Free blocks in the order in which they will be given out (a free block may still be cached)."""
    prefix_queries: int
    prefix_hits: int
    """Tokens looked up in, and found in, the prefix cache since the start."""


@dataclass(frozen=True, slots=True)
class InFlightView:
    step: int
    req_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Snapshot:
    step: int
    runner: Literal["v1", "v2"]
    loop: Literal["plain", "overlapped"]
    time_ns: int
    requests: tuple[RequestView, ...]
    waiting: tuple[str, ...]
    running: tuple[str, ...]
    rows: tuple[RowView, ...]
    block_tables: BlockTablesView
    inputs: InputsView | None
    """None before the first step."""
    pool: PoolView
    in_flight: tuple[InFlightView, ...]


@dataclass(frozen=True, slots=True)
class StepCostsView:
    """Microseconds of a whole step of `num_reqs` requests by its tokens, drafting included, as measured at start."""

    num_reqs: int
    table: CostTable


@dataclass(frozen=True, slots=True)
class SpeculationView:
    """How the drafts of an engine are judged: settled when it was made, and the same at every step.

    `calibration` is what the drafter's confidences have gone through, None where they are the head's own. `step_costs`
    are there where the schedule goes by them.
    """

    method: str
    num_drafts: int
    verification_schedule: str
    calibration: Calibration | None
    step_costs: tuple[StepCostsView, ...]


class PendingSnapshot:
    """A snapshot whose device part is still being copied. `result()` waits for the copies, the first time."""

    def __init__(
        self, host: dict[str, Any], device: Callable[[], tuple[tuple[RowView, ...], BlockTablesView, InputsView | None]]
    ):
        self._host = host
        self._device = device
        self._result: Snapshot | None = None

    def result(self) -> Snapshot:
        if self._result is None:
            rows, block_tables, inputs = self._device()
            self._result = Snapshot(rows=rows, block_tables=block_tables, inputs=inputs, **self._host)
        return self._result


def take(core: EngineCore) -> PendingSnapshot:
    """The state of `core` between two phases. The host's part is copied now, the device's in stream order."""
    from .runner_v1 import views as v1_views
    from .runner_v2 import views as v2_views

    scheduler, runner = core.scheduler, core.runner
    requests = {**core.finished, **scheduler.requests}
    host = {
        "step": core.step_count,
        "runner": runner.name,
        "loop": "overlapped" if core.config.async_scheduling else "plain",
        "time_ns": time.perf_counter_ns(),
        "requests": tuple(_request_view(r, scheduler.kv_cache.block_ids(r.request_id)) for r in requests.values()),
        "waiting": tuple(r.request_id for r in scheduler.waiting),
        "running": tuple(r.request_id for r in scheduler.running),
        "pool": scheduler.kv_cache.pool_view(),
        "in_flight": tuple(
            InFlightView(step.scheduler_output.step, tuple(step.scheduler_output.num_scheduled_tokens))
            for step in core.in_flight
        ),
    }
    if core.use_v2:
        return PendingSnapshot(host, v2_views.pending_views(runner))
    drafts = {request.request_id: tuple(request.spec_token_ids) for request in core.scheduler.running}
    return PendingSnapshot(host, v1_views.pending_views(runner, drafts))


def speculation_view(core: EngineCore) -> SpeculationView | None:
    """None for an engine without drafts."""
    spec, decoder = core.config.speculative_config, core.runner.decoder
    if spec is None or decoder is None:
        return None
    costs = core.runner.speculation.verification.step_costs if core.use_v2 else {}
    tables = tuple(StepCostsView(*of) for of in costs.items())
    return SpeculationView(spec.method, decoder.num_drafts, spec.verification_schedule, decoder.calibration, tables)


def _request_view(request: Request, block_ids: list[int]) -> RequestView:
    return RequestView(
        request_id=request.request_id,
        status=request.status.value,
        prompt_token_ids=tuple(request.prompt_token_ids),
        output_token_ids=tuple(request.output_token_ids),
        num_computed_tokens=request.num_computed_tokens,
        num_cached_tokens=max(0, request.num_cached_tokens),
        num_output_placeholders=request.num_output_placeholders,
        num_preemptions=request.num_preemptions,
        priority=request.priority,
        block_ids=tuple(block_ids),
        finish_reason=request.finish_reason,
    )
