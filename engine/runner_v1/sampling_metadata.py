"""What V1's sampler needs of a batch, as device tensors: made anew only when the batch changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from ..sample.logits_processors import LogitsProcessor, rows_of_processors

if TYPE_CHECKING:
    from .input_batch import CpuGpuBuffer, InputBatch


@dataclass(frozen=True)
class Penalties:
    """`prompt_token_ids` i64 [r, longest prompt], padded with V; presence, frequency, repetition f32 [r]."""

    prompt_token_ids: torch.Tensor
    presence: torch.Tensor
    frequency: torch.Tensor
    repetition: torch.Tensor


@dataclass(frozen=True)
class SamplingMetadata:
    """Device tensors of r rows; None where no request uses the feature.

    temperature, top_p, min_p f32 [r], top_k i32 [r]. allowed_token_ids: rows i64 [n], ids i64 [n, longest], padded with
    the row's first. logit_bias: rows and ids i64 [n], biases f32 [n]. logits_processors: each with its rows.
    """

    all_greedy: bool
    temperature: torch.Tensor
    top_p: torch.Tensor | None
    top_k: torch.Tensor | None
    min_p: torch.Tensor | None
    generators: dict[int, torch.Generator]
    max_num_logprobs: int | None
    penalties: Penalties | None = None
    allowed_token_ids: tuple[torch.Tensor, torch.Tensor] | None = None
    logit_bias: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
    logits_processors: tuple[tuple[LogitsProcessor, list[int]], ...] = ()


def make_sampling_metadata(batch: InputBatch) -> SamplingMetadata:
    """For the rows as they stand; sends what is used to the device."""
    r = batch.num_reqs
    params = [batch.params[row] for row in range(r)]
    all_greedy = not batch.random_reqs
    logprobs = [p.logprobs for p in params if p.logprobs is not None]

    def sent(buffer: CpuGpuBuffer, needed: bool = True) -> torch.Tensor | None:
        if not needed or all_greedy:
            return None
        buffer.copy_to_gpu(r)
        return buffer.gpu[:r]

    sent(batch.temperature)
    return SamplingMetadata(
        all_greedy=all_greedy,
        temperature=batch.temperature.gpu[:r],
        top_p=sent(batch.top_p, bool(batch.top_p_reqs)),
        top_k=sent(batch.top_k, bool(batch.top_k_reqs)),
        min_p=sent(batch.min_p, bool(batch.min_p_reqs)),
        generators=dict(batch.generators),
        max_num_logprobs=max(logprobs) if logprobs else None,
        penalties=_penalties(batch) if batch.penalties_reqs else None,
        allowed_token_ids=_allowed_token_ids(batch),
        logit_bias=_logit_bias(batch),
        logits_processors=tuple(rows_of_processors([p.logits_processors for p in params])),
    )


def padded(rows: Sequence[Sequence[int] | np.ndarray], fill: int) -> np.ndarray:
    """Rows of different lengths as i64 [rows, longest], the rest `fill`."""
    result = np.full((len(rows), max(map(len, rows), default=0)), fill, dtype=np.int64)
    for i, row in enumerate(rows):
        result[i, : len(row)] = row
    return result


def _penalties(batch: InputBatch) -> Penalties:
    r = batch.num_reqs
    prompts = [
        batch.token_ids_cpu[row, : batch.num_prompt_tokens[row]] if batch.params[row].uses_penalties else ()
        for row in range(r)
    ]
    buffers = (batch.presence_penalties, batch.frequency_penalties, batch.repetition_penalties)
    for buffer in buffers:
        buffer.copy_to_gpu(r)
    presence, frequency, repetition = (buffer.gpu[:r] for buffer in buffers)
    return Penalties(batch.device.to_device(padded(prompts, batch.vocab_size)), presence, frequency, repetition)


def _allowed_token_ids(batch: InputBatch) -> tuple[torch.Tensor, torch.Tensor] | None:
    allowed = {row: ids for row in range(batch.num_reqs) if (ids := batch.params[row].allowed_token_ids) is not None}
    if not allowed:
        return None
    longest = max(map(len, allowed.values()))
    token_ids = np.array([[*ids, *[ids[0]] * (longest - len(ids))] for ids in allowed.values()], dtype=np.int64)
    return batch.device.to_device(np.array(list(allowed), dtype=np.int64)), batch.device.to_device(token_ids)


def _logit_bias(batch: InputBatch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    entries = [
        (row, token, bias)
        for row in range(batch.num_reqs)
        for token, bias in (batch.params[row].logit_bias or {}).items()
    ]
    if not entries:
        return None
    rows, tokens, biases = zip(*entries, strict=True)
    send = batch.device.to_device
    return send(np.array(rows)), send(np.array(tokens)), send(np.array(biases, dtype=np.float32))
