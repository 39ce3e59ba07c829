"""V1's prompt logprobs: per request, by a host loop over the batch, in the step that computes the prompt's chunk."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from .input_batch import InputBatch


@dataclass(frozen=True)
class PromptChunk:
    """A stretch of a prompt in this step: `targets` i64 [n] stand at positions `start` .. `start + n - 1`; the hidden
    states before them begin at row `first` of the step's tokens."""

    req_id: str
    start: int
    first: int
    targets: torch.Tensor
    k: int


def prompt_chunks(batch: InputBatch, query_start_loc: np.ndarray) -> tuple[PromptChunk, ...]:
    """Of the rows as they stand, i32 [r + 1] `query_start_loc`."""
    chunks = []
    for row in range(batch.num_reqs):
        k, req_id = batch.params[row].prompt_logprobs, batch.req_ids[row]
        num_prompt = int(batch.num_prompt_tokens[row])
        # With an output token it has had its logprobs: it was preempted and computes its prompt once more.
        if k is None or req_id is None or batch.num_tokens[row] > num_prompt:
            continue
        start, first = int(batch.num_computed_tokens_cpu[row]) + 1, int(query_start_loc[row])
        end = min(start + int(query_start_loc[row + 1]) - first, num_prompt)
        if start < end:
            targets = batch.token_ids_cpu[row, start:end].astype(np.int64)
            chunks.append(PromptChunk(req_id, start, first, batch.device.to_device(targets), k))
    return tuple(chunks)
