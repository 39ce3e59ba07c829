"""Logprobs of a prompt's own tokens, in chunks, also within one prompt: kernels 20 and 19.

The logits at a token say what follows it, so a prompt of n tokens has n - 1 of them. All n - 1 rows of logits at once
would be gigabytes; a chunk of rows is computed, ranked, sent to the host and forgotten before the next. A prompt that
is itself computed in several steps gives the part that each step has the hidden states of.

R max requests, T max batched tokens, V vocabulary, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from kernels import prompt_logprobs_token_ids, topk_logprobs

from ...device import Device
from ...sample.logprobs import rows_to_dicts
from ...sample.prompt_logprobs import PromptLogprobs
from ...sampling_params import SamplingParams
from .logprobs import FEW_LOGPROBS, NO_LOGPROBS
from .tables import TokenTable

CHUNK_ROWS = 512
"""Rows of logits at a time: 311 MB in float32 for a vocabulary of 151,936."""
SCRATCH_BYTES = 256 * 2**20
"""What sorting a chunk for many logprobs may need."""
_SORT_BYTES = 64
"""For each token that is sorted: its value and its id, in several copies, and the sort's own room."""

ComputeLogits = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class PromptPart:
    """The part of one prompt that a step computes: `num_rows` rows from row `first_row` of the step's tokens.

    The first of them predicts the prompt's token `start`, counted from 0; `k` logprobs were asked for.
    """

    req_id: str
    first_row: int
    num_rows: int
    start: int
    k: int


@dataclass(frozen=True)
class PromptLogprobsOutput:
    """On its way to the host: to be read after an event that was recorded behind `PromptLogprobsStates.compute`."""

    parts: tuple[PromptPart, ...]
    chunk_rows: int
    # ids i32 and logprobs f32 [n, k + 1], ranks i32 [n]
    _ids: torch.Tensor
    _logprobs: torch.Tensor
    _ranks: torch.Tensor

    def result(self) -> dict[str, PromptLogprobs]:
        """Of each request's part, on the host."""
        token_ids, logprobs, ranks = (tensor.numpy() for tensor in (self._ids, self._logprobs, self._ranks))
        result, first = {}, 0
        for part in self.parts:
            rows = range(first, first + part.num_rows)
            entries = [rows_to_dicts(token_ids, logprobs, ranks, row, part.k) for row in rows]
            result[part.req_id] = PromptLogprobs(part.start, entries, part.k, self.chunk_rows)
            first += part.num_rows
        return result


@dataclass
class PromptLogprobsPlan:
    """`groups` are parts that are computed together. What `compute` makes of them comes into `outputs`."""

    groups: tuple[tuple[PromptPart, ...], ...]
    outputs: list[PromptLogprobsOutput] = field(default_factory=list)

    def result(self) -> dict[str, PromptLogprobs]:
        """Of every request of the step, on the host; to be called after the step's output has come."""
        return {req_id: entry for output in self.outputs for req_id, entry in output.result().items()}


class PromptLogprobsStates:
    def __init__(self, device: Device, num_rows: int, form: str, tokens: TokenTable) -> None:
        self._device = device
        self._form = form
        self._tokens = tokens
        self._num_logprobs = np.full(num_rows, NO_LOGPROBS, dtype=np.int32)
        self._prompt_len = np.zeros(num_rows, dtype=np.int32)

    def add_request(self, row: int, params: SamplingParams, prompt_len: int, prefill_len: int) -> None:
        # A request that comes back with tokens of its own has delivered its prompt's logprobs before.
        not_new = prefill_len > prompt_len
        self._num_logprobs[row] = NO_LOGPROBS if params.prompt_logprobs is None or not_new else params.prompt_logprobs
        self._prompt_len[row] = prompt_len

    def in_use(self, rows: np.ndarray) -> bool:
        """Whether a request of these rows has asked for logprobs of its prompt."""
        return bool((self._num_logprobs[rows] != NO_LOGPROBS).any())

    def plan(
        self, req_ids: tuple[str, ...], rows: np.ndarray, query_start_loc: np.ndarray, num_computed_tokens: np.ndarray
    ) -> PromptLogprobsPlan | None:
        """What a step of these requests has to do; None if nothing.

        Args:
            rows: i32 [r], their state rows.
            query_start_loc: i32 [>= r + 1].
            num_computed_tokens: i32 [r], before the step. Exact for a prompt that isn't done.
        """
        begin, end = query_start_loc[: len(rows)], query_start_loc[1 : len(rows) + 1]
        # The prompt's last token predicts the first one of the output.
        counts = np.minimum(end - begin, self._prompt_len[rows] - 1 - num_computed_tokens)
        wanted = np.flatnonzero((counts > 0) & (self._num_logprobs[rows] != NO_LOGPROBS))
        if not len(wanted):
            return None
        parts = [
            PromptPart(
                req_ids[i], int(begin[i]), int(counts[i]), int(num_computed_tokens[i]) + 1,
                int(self._num_logprobs[rows[i]]),
            )
            for i in wanted
        ]  # fmt: skip
        few = tuple(part for part in parts if part.k <= FEW_LOGPROBS)
        return PromptLogprobsPlan(((few,) if few else ()) + tuple((p,) for p in parts if p.k > FEW_LOGPROBS))

    def compute(
        self,
        plan: PromptLogprobsPlan,
        hidden: torch.Tensor,
        compute_logits: ComputeLogits,
        idx_mapping: torch.Tensor,
        query_start_loc: torch.Tensor,
        num_computed_tokens: torch.Tensor,
    ) -> None:
        """Called on the stream, before the step's counts are advanced: fills `plan.outputs`.

        Args:
            hidden: [t, H], of the step's tokens.
            compute_logits: hidden states [n, H] -> logits f32 [n, V].
            idx_mapping: i32 [r]; query_start_loc: i32 [>= r + 1]; num_computed_tokens: i32 [R].
        """
        targets = prompt_logprobs_token_ids(
            idx_mapping, query_start_loc, self._tokens.all_token_ids, num_computed_tokens, hidden.shape[0],
            form=self._form,
        )  # fmt: skip
        for parts in plan.groups:
            plan.outputs.append(self._compute_group(parts, hidden, compute_logits, targets))

    def _compute_group(
        self, parts: tuple[PromptPart, ...], hidden: torch.Tensor, compute_logits: ComputeLogits, targets: torch.Tensor
    ) -> PromptLogprobsOutput:
        index = np.concatenate([np.arange(p.first_row, p.first_row + p.num_rows) for p in parts])
        num_rows, k = len(index), max(part.k for part in parts)
        on_device = None if len(parts) == 1 else self._device.to_device(index)
        host = [
            torch.empty(shape, dtype=dtype, pin_memory=self._device.is_cuda)
            for shape, dtype in (
                ((num_rows, k + 1), torch.int32),
                ((num_rows, k + 1), torch.float32),
                ((num_rows,), torch.int32),
            )
        ]
        chunk = chunk_rows(k)
        for begin in range(0, num_rows, chunk):
            end = min(begin + chunk, num_rows)
            if on_device is None:
                rows = slice(parts[0].first_row + begin, parts[0].first_row + end)
                states, tokens = hidden[rows], targets[rows]
            else:
                states, tokens = hidden[on_device[begin:end]], targets[on_device[begin:end]]
            self._compute_chunk(compute_logits(states), tokens, k, [target[begin:end] for target in host])
        return PromptLogprobsOutput(parts, chunk, *host)

    def _compute_chunk(self, logits: torch.Tensor, tokens: torch.Tensor, k: int, host: list[torch.Tensor]) -> None:
        # A function of its own, so that nothing of a chunk is left when the next one is made.
        found = topk_logprobs(logits, tokens, k, form=self._form)
        for target, tensor in zip(host, found, strict=True):
            target.copy_(tensor.to(target.dtype), non_blocking=True)


def chunk_rows(k: int) -> int:
    """How many rows of logits are made at a time if `k` tokens of each have to be put in order."""
    return min(CHUNK_ROWS, max(1, SCRATCH_BYTES // (_SORT_BYTES * max(k, 1))))
