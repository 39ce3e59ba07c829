"""Makes a step's index on the host, from numpy mirrors alone: which requests, in which order, and how much of each."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..config import EngineConfig
from ..sched_output import ScheduledRows
from .input_batch import InputBatch, choose_descriptor
from .sample import Sampler
from .states import RequestState
from .step_graphs import CAPTURED_PLANS
from .verification import Verification


class BatchMaker:
    def __init__(
        self, config: EngineConfig, states: RequestState, sampler: Sampler, verification: Verification | None
    ) -> None:
        assert config.max_num_seqs is not None
        self._states, self._sampler, self._verification = states, sampler, verification
        self._sizes = config.cudagraph_capture_sizes
        self._max_num_reqs, self._max_num_tokens = config.max_num_seqs, config.max_num_batched_tokens
        # [R + 1] i32
        self._one_each = np.arange(self._max_num_reqs + 1, dtype=np.int32)
        self._last: InputBatch | None = None
        self._last_scheduled: ScheduledRows | None = None

    def make(self, scheduled: ScheduledRows, rows: np.ndarray) -> InputBatch:
        """The batch of a step, of which `rows` i64 [r] are the state rows; the same one again where the step decodes
        the same requests again.

        Sorted by scheduled tokens, so decodes come first; of those the one with the longest context first: a kernel
        whose programs take the rows in turn then does not end with the long ones.
        """
        states, last = self._states, self._last
        if scheduled is self._last_scheduled and last is not None:
            if not last.has_prefill:
                return last
            computed, rows = states.num_computed_tokens_np[last.idx_mapping_np], last.idx_mapping_np
            self._last = replace(last, has_prefill=bool((computed < states.prefill_len.np[rows]).any()))
            return self._last
        self._last_scheduled = scheduled
        num_reqs, counts, num_drafts = len(rows), scheduled.num_tokens, scheduled.num_drafts
        if scheduled.has_drafts:
            verified = self._verified_drafts(rows, counts, num_drafts)
            counts, num_drafts = counts - (num_drafts - verified), verified
        computed = states.num_computed_tokens_np[rows]
        order = np.lexsort((-computed, counts))
        counts, rows, computed = counts[order], rows[order], computed[order]
        num_tokens = int(counts.sum())
        size = choose_descriptor(num_reqs, num_tokens, self._sizes, self._max_num_reqs, self._max_num_tokens)
        index, ends = np.empty(3 * self._max_num_reqs + 2, dtype=np.int32), self._max_num_reqs + 1
        query_start_loc, idx_mapping, cu_num_logits = index[:ends], index[ends : 2 * ends - 1], index[2 * ends - 1 :]
        query_start_loc[0] = 0
        counts.cumsum(out=query_start_loc[1 : num_reqs + 1])
        query_start_loc[num_reqs + 1 :] = num_tokens
        idx_mapping[:num_reqs] = rows
        idx_mapping[num_reqs:] = states.padding_row
        cu_num_logits[:] = self._one_each
        num_logits = None
        if scheduled.has_drafts:
            num_logits = 1 + num_drafts[order]
            total = num_logits.cumsum(out=cu_num_logits[1 : num_reqs + 1])[-1]
            cu_num_logits[num_reqs + 1 :] += total - num_reqs
        self._last = InputBatch(
            req_ids=tuple(scheduled.ids[order].tolist()),
            order=order,
            index_np=index,
            num_scheduled_tokens=counts.astype(np.int32),
            plan=self._sampler.plan(rows, num_logits),
            num_tokens=num_tokens,
            num_tokens_padded=size.num_tokens,
            num_reqs_padded=size.num_reqs,
            num_decodes=int(np.searchsorted(counts, 1, side="right")),
            has_prefill=bool(np.count_nonzero(computed < states.prefill_len.np[rows])),
        )
        return self._last

    def _verified_drafts(self, rows: np.ndarray, counts: np.ndarray, num_drafts: np.ndarray) -> np.ndarray:
        """i64 [r]: of each request's drafts those that the step verifies. All, but under a budget beside prompts."""
        verification, others = self._verification, int((counts - num_drafts).sum())
        drafted = int((num_drafts > 0).sum())
        if verification is None or not verification.is_budgeted or not drafted or others == len(counts):
            return num_drafts
        if self._sampler.plan(rows, 1 + num_drafts) not in CAPTURED_PLANS:
            return num_drafts
        return np.minimum(num_drafts, verification.budget_beside_prompts(drafted, others))
