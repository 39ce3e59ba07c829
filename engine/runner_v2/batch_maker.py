"""Makes a step's index on the host, from numpy mirrors alone: which requests, in which order, and how much of each."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..config import EngineConfig
from ..sched_output import SchedulerOutput
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
        # While the scheduler's object is the same, no request came or went.
        self._last: InputBatch | None = None
        self._last_scheduled: dict[str, int] | None = None

    def make(self, scheduler_output: SchedulerOutput) -> InputBatch:
        """The batch of this step; the same one again where the step decodes the same requests again.

        Sorted by scheduled tokens, so decodes come first; of those the one with the longest context first: a kernel
        whose programs take the rows in turn then does not end with the long ones.
        """
        scheduled, states, last = scheduler_output.num_scheduled_tokens, self._states, self._last
        if scheduled is self._last_scheduled and last is not None:
            if not last.has_prefill:
                return last
            computed, rows = states.num_computed_tokens_np[last.idx_mapping_np], last.idx_mapping_np
            self._last = replace(last, has_prefill=bool((computed < states.prefill_len.np[rows]).any()))
            return self._last
        self._last_scheduled = scheduled
        ids, num_reqs = tuple(scheduled), len(scheduled)
        counts = np.fromiter(scheduled.values(), dtype=np.int32, count=num_reqs)
        rows = np.fromiter((states.req_id_to_index[req_id] for req_id in ids), dtype=np.int32, count=num_reqs)
        drafts = scheduler_output.scheduled_spec_decode_tokens
        num_drafts = np.zeros(num_reqs, dtype=np.int32)
        if drafts:
            num_drafts[:] = [len(drafts.get(req_id, ())) for req_id in ids]
            verified = self._verified_drafts(rows, counts, num_drafts)
            counts, num_drafts = counts - (num_drafts - verified), verified
        order = np.lexsort((-states.num_computed_tokens_np[rows], counts))
        req_ids, counts, rows = tuple(ids[i] for i in order), counts[order], rows[order]
        num_tokens = int(counts.sum())
        size = choose_descriptor(num_reqs, num_tokens, self._sizes, self._max_num_reqs, self._max_num_tokens)
        num_logits = np.ones(self._max_num_reqs, dtype=np.int32)
        num_logits[:num_reqs] += num_drafts[order]
        index = np.full(3 * self._max_num_reqs + 2, num_tokens, dtype=np.int32)
        ends = [self._max_num_reqs + 1, 2 * self._max_num_reqs + 1]
        query_start_loc, idx_mapping, cu_num_logits = np.split(index, ends)
        cu_num_logits[0] = 0
        np.cumsum(num_logits, out=cu_num_logits[1:])
        query_start_loc[0] = 0
        np.cumsum(counts, out=query_start_loc[1 : num_reqs + 1])
        idx_mapping[:num_reqs] = rows
        idx_mapping[num_reqs:] = states.padding_row
        computed = states.num_computed_tokens_np[rows]
        prefill_len = states.prefill_len.np[rows]
        self._last = InputBatch(
            req_ids=req_ids,
            index_np=index,
            num_scheduled_tokens=counts,
            plan=self._sampler.plan(rows, num_logits[:num_reqs] if drafts else None),
            num_tokens=num_tokens,
            num_tokens_padded=size.num_tokens,
            num_reqs_padded=size.num_reqs,
            num_decodes=int((counts == 1).sum()),
            has_prefill=bool((computed < prefill_len).any()),
        )
        return self._last

    def _verified_drafts(self, rows: np.ndarray, counts: np.ndarray, num_drafts: np.ndarray) -> np.ndarray:
        """i32 [r]: of each request's drafts those that the step verifies. All, but under a budget beside prompts."""
        verification, others = self._verification, int((counts - num_drafts).sum())
        drafted = int((num_drafts > 0).sum())
        if verification is None or not verification.is_budgeted or not drafted or others == len(counts):
            return num_drafts
        if self._sampler.plan(rows, 1 + num_drafts) not in CAPTURED_PLANS:
            return num_drafts
        return np.minimum(num_drafts, verification.budget_beside_prompts(drafted, others))
