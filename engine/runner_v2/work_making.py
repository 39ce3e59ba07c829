"""Makes the work of a step of runner V2: that of a batch, to be launched piece by piece, or that of a size, to be
captured."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from ..attention import AttentionMetadata
from ..hooks import DRAFT_EVENTS
from .input_batch import InputBatch
from .speculation import DraftedWork
from .step_graphs import StepSize, is_verification
from .step_work import StepWork

if TYPE_CHECKING:
    from .runner import ModelRunnerV2


def eager_work(runner: ModelRunnerV2, batch: InputBatch) -> StepWork:
    """The step of `batch`, whose index is sent."""
    budget = _eager_budget(runner, batch)
    num_tokens, padded = batch.num_tokens, batch.num_tokens_padded
    if budget is not None:
        num_tokens = padded = batch.num_reqs + budget
    metadata = _attention_metadata(
        runner,
        num_reqs=batch.num_reqs,
        num_tokens=num_tokens,
        num_tokens_padded=padded,
        query_start_loc=_query_start_loc(runner, budget),
        query_start_loc_np=batch.query_start_loc_np,
        # An upper bound of the device's, until the next step's `update_states`.
        seq_lens_np=runner.req_states.num_computed_tokens_np[batch.idx_mapping_np] + batch.num_scheduled_tokens,
        num_decodes=batch.num_decodes if budget is None else 0,
        has_admitted=batch.has_prefill,  # a little wider: an admitted request computes prompt tokens
    )
    num_logits = batch.num_logits if budget is None else num_tokens
    watched = runner.hooks.wants(DRAFT_EVENTS)
    return _work(runner, batch.num_reqs, batch.num_reqs_padded, metadata, num_logits, budget, watched)


def padding_work(runner: ModelRunnerV2, size: StepSize) -> StepWork:
    """A step of `size` requests of which none is there: it may run at any time and changes nothing."""
    num_reqs, num_tokens, is_mixed = size
    whole = num_reqs * (1 + runner.num_drafts)
    num_logits = min(num_tokens, whole) if is_mixed else num_tokens
    budget = None if is_mixed or num_tokens == whole else num_tokens - num_reqs
    runner.input_buffers.hold_nobody(runner.req_states.padding_row, cu_num_logits=runner.arange)
    longest = -(-num_tokens // num_reqs)
    metadata = _attention_metadata(
        runner,
        num_reqs=num_reqs,
        num_tokens=num_tokens,
        num_tokens_padded=num_tokens,
        query_start_loc=_query_start_loc(runner, budget),
        query_start_loc_np=np.minimum(np.arange(num_reqs + 1, dtype=np.int32) * longest, num_tokens),
        seq_lens_np=np.full(num_reqs, runner.config.max_model_len, dtype=np.int32),
        num_decodes=num_reqs if num_tokens == num_reqs and not is_mixed else 0,
        has_admitted=is_mixed,
        max_query_len=None if is_mixed else 1 + runner.num_drafts,
    )
    return _work(runner, num_reqs, num_reqs, metadata, num_logits, budget)


def _eager_budget(runner: ModelRunnerV2, batch: InputBatch) -> int | None:
    """How many drafts the step verifies in all; None for every one."""
    if runner.speculation is None or not is_verification(batch):
        return None
    budget = runner.speculation.verification.budget(batch.num_reqs, batch.num_reqs)
    return budget if batch.num_reqs + budget < batch.num_tokens else None


def _query_start_loc(runner: ModelRunnerV2, budget: int | None) -> torch.Tensor:
    """i32 [R + 1]: the host's, or what the device makes of it under a budget."""
    if budget is None or runner.speculation is None:
        return runner.input_buffers.query_start_loc
    return runner.speculation.verification.query_start_loc


def _attention_metadata(
    runner: ModelRunnerV2,
    *,
    num_reqs: int,
    num_tokens: int,
    num_tokens_padded: int,
    query_start_loc: torch.Tensor,
    query_start_loc_np: np.ndarray,
    seq_lens_np: np.ndarray,
    num_decodes: int,
    has_admitted: bool,
    max_query_len: int | None = None,
) -> AttentionMetadata:
    return runner.model_state.prepare_attn(
        num_reqs=num_reqs,
        num_tokens=num_tokens,
        num_tokens_padded=num_tokens_padded,
        query_start_loc=query_start_loc,
        query_start_loc_np=query_start_loc_np,
        seq_lens=runner.input_buffers.seq_lens,
        seq_lens_np=seq_lens_np,
        block_table=runner.block_tables.input_block_table,
        slot_mapping=runner.block_tables.slot_mapping[:num_tokens_padded],
        num_decodes=num_decodes,
        has_admitted=has_admitted,
        max_query_len=max_query_len,
    )


def _work(
    runner: ModelRunnerV2, num_reqs: int, num_reqs_padded: int, metadata: AttentionMetadata, num_logits: int,
    budget: int | None, watched: bool = False,
) -> StepWork:  # fmt: skip
    idx_mapping = runner.input_buffers.idx_mapping[:num_reqs]
    padded = (num_reqs_padded, metadata.num_tokens_padded)
    if runner.speculation is None:
        return StepWork(runner, idx_mapping, *padded, metadata)
    return DraftedWork(
        runner, idx_mapping, *padded, metadata, runner.speculation, num_logits=num_logits, budget=budget,
        watched=watched,
    )  # fmt: skip
