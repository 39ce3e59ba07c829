"""What V1's sampler needs of one step: host loops over the rows, from the tokens that the host has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from ..device import Device
from ..sample.bad_words import forbidden_next_tokens
from ..sample.logits_processors import LogitsProcessor, LogitsRows
from ..sched_output import GrammarOutput
from .input_batch import InputBatch
from .sampling_metadata import padded


@dataclass(frozen=True)
class MinTokens:
    """`stop_ids` i64 [r, S], -1 for none, forbidden where `active` bool [r]."""

    stop_ids: torch.Tensor
    active: torch.Tensor


@dataclass(frozen=True)
class ProcessorCall:
    """`processor` on `rows` i64 [n]."""

    processor: LogitsProcessor
    rows: torch.Tensor
    known: LogitsRows


@dataclass(frozen=True)
class StepSampling:
    """None where no row needs it. Rows in `discarded` are still inside their prompt: their token is thrown away.

    grammar: rows i64 [n], bitmask i32 [n, ceil(V / 32)]. output_token_ids: i64 [r, longest], padded with V, for
    penalties. forbidden: rows and ids i64 [n] of tokens that would complete a bad word.
    """

    discarded: frozenset[int] = frozenset()
    grammar: tuple[torch.Tensor, torch.Tensor] | None = None
    min_tokens: MinTokens | None = None
    output_token_ids: torch.Tensor | None = None
    forbidden: tuple[torch.Tensor, torch.Tensor] | None = None
    processors: tuple[ProcessorCall, ...] = ()

    @property
    def changes_logits(self) -> bool:
        return bool(
            self.min_tokens is not None
            or self.output_token_ids is not None
            or self.forbidden is not None
            or self.processors
        )


def make_step_sampling(
    batch: InputBatch, discarded: frozenset[int], grammar_output: GrammarOutput | None = None
) -> StepSampling:
    """For the rows as they stand."""
    return StepSampling(
        discarded=discarded,
        grammar=None if grammar_output is None else grammar_rows(batch.device, batch.req_id_to_index, grammar_output),
        min_tokens=_min_tokens(batch),
        output_token_ids=_output_token_ids(batch) if batch.penalties_reqs else None,
        forbidden=_forbidden(batch) if batch.bad_words_reqs else None,
        processors=_processor_calls(batch) if batch.processors_reqs else (),
    )


def grammar_rows(
    device: Device, row_of: Mapping[str, int], grammar_output: GrammarOutput
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Rows of the logits i64 [n], the first of each request by `row_of`, and their bitmask i32 [n, ceil(V / 32)]; None
    if n is 0."""
    rows = grammar_output.logits_rows(row_of)
    if not len(rows):
        return None
    send = device.to_device
    return send(rows), send(grammar_output.grammar_bitmask)


def _outputs(batch: InputBatch, row: int) -> np.ndarray:
    return batch.token_ids_cpu[row, batch.num_prompt_tokens[row] : batch.num_tokens[row]]


def _min_tokens(batch: InputBatch) -> MinTokens | None:
    """The stop ids of the rows that must not stop yet."""
    produced = batch.num_tokens - batch.num_prompt_tokens
    active = [
        row for row in range(batch.num_reqs) if produced[row] < batch.params[row].min_tokens and batch.stop_ids[row]
    ]
    if not active:
        return None
    stop_ids = padded([sorted(batch.stop_ids[row]) if row in active else () for row in range(batch.num_reqs)], -1)
    mask = np.zeros(batch.num_reqs, dtype=bool)
    mask[active] = True
    return MinTokens(batch.device.to_device(stop_ids), batch.device.to_device(mask))


def _output_token_ids(batch: InputBatch) -> torch.Tensor:
    # Of the other rows the host may have placeholders.
    outputs = [_outputs(batch, row) if batch.params[row].uses_penalties else () for row in range(batch.num_reqs)]
    return batch.device.to_device(padded(outputs, batch.vocab_size))


def _forbidden(batch: InputBatch) -> tuple[torch.Tensor, torch.Tensor] | None:
    pairs = [
        (row, token)
        for row in range(batch.num_reqs)
        if (words := batch.params[row].bad_words_token_ids)
        for token in forbidden_next_tokens(words, _outputs(batch, row).tolist())
    ]
    if not pairs:
        return None
    rows, tokens = np.array(pairs, dtype=np.int64).T
    return batch.device.to_device(rows), batch.device.to_device(tokens)


def _processor_calls(batch: InputBatch) -> tuple[ProcessorCall, ...]:
    assert batch.sampling_metadata is not None
    send: Callable[[np.ndarray], torch.Tensor] = batch.device.to_device
    calls = []
    for processor, rows in batch.sampling_metadata.logits_processors:
        lens = batch.num_tokens[rows].astype(np.int64)
        known = LogitsRows(
            token_ids=send(batch.token_ids_cpu[rows, : lens.max()].astype(np.int64)),
            lens=send(lens),
            prompt_lens=send(batch.num_prompt_tokens[rows].astype(np.int64)),
        )
        calls.append(ProcessorCall(processor, send(np.array(rows, dtype=np.int64)), known))
    return tuple(calls)
