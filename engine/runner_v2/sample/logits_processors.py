"""The caller's own logits processors: which rows of a batch each one gets, and what it is told of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from ...device import Device
from ...sample.logits_processors import LogitsProcessor, LogitsRows, rows_of_processors, run_processor
from ...sampling_params import SamplingParams
from .tables import DraftRows, TokenTable


@dataclass(frozen=True, eq=False)
class ProcessorCall:
    """One call of a processor. `index` i64 [n] are its rows of the logits; None is all of them.

    Equal to nothing but itself: a batch with one is never like a captured one.
    """

    processor: LogitsProcessor
    index: torch.Tensor | None


class LogitsProcessors:
    def __init__(self, device: Device, num_rows: int, tokens: TokenTable) -> None:
        self._device = device
        self._tokens = tokens
        self._of_row: list[tuple[LogitsProcessor, ...]] = [()] * num_rows

    def add_request(self, row: int, params: SamplingParams) -> None:
        self._of_row[row] = params.logits_processors

    def calls(self, rows: np.ndarray, num_logits: np.ndarray | None) -> tuple[ProcessorCall, ...]:
        """The calls for these state rows, i32 [r], each with `num_logits` i32 [r] rows of logits (None: with one).

        An index is uploaded here, once for as long as the batch stays the same.
        """
        listed = [self._of_row[row] for row in rows.tolist()]
        if not any(listed):
            return ()
        of_logits = listed if num_logits is None else [listed[i] for i in np.arange(len(rows)).repeat(num_logits)]
        calls = []
        for processor, indices in rows_of_processors(of_logits):
            index = None
            if len(indices) < len(of_logits):
                index = self._device.to_device(np.array(indices, dtype=np.int64))
            calls.append(ProcessorCall(processor, index))
        return tuple(calls)

    def apply(
        self,
        calls: tuple[ProcessorCall, ...],
        logits: torch.Tensor,
        idx_mapping: torch.Tensor,
        positions: torch.Tensor,
        drafts: DraftRows,
    ) -> None:
        """Called on the stream; logits f32 [l, V] changed in place, idx_mapping i32 [l], positions i64 [l]."""
        for call in calls:
            if call.index is None:
                rows = self._rows(idx_mapping, positions, drafts, torch.arange(logits.shape[0], device=logits.device))
                logits.copy_(run_processor(call.processor, logits, rows))
            else:
                rows = self._rows(idx_mapping, positions, drafts, call.index)
                logits.index_copy_(0, call.index, run_processor(call.processor, logits[call.index], rows))

    def _rows(
        self, idx_mapping: torch.Tensor, positions: torch.Tensor, drafts: DraftRows, index: torch.Tensor
    ) -> LogitsRows:
        states, lens = idx_mapping[index].long(), positions[index]
        token_ids = self._tokens.all_token_ids[states].long()
        for back in range(drafts.max_drafts):
            is_draft = drafts.expanded_local_pos[index] > back
            column = (lens - 1 - back).clamp_(0, token_ids.shape[1] - 1).unsqueeze(1)
            draft = drafts.token_ids[(index - back).clamp_(min=0)].long().unsqueeze(1)
            token_ids.scatter_(1, column, torch.where(is_draft.unsqueeze(1), draft, token_ids.gather(1, column)))
        return LogitsRows(token_ids, lens, self._tokens.prompt_len[states].long())
