"""Drafters that work on the device, behind runner V1: their drafts reach the host with the step's tokens.

They draft greedily: what a drawn draft was drawn from lies in a row of the drafter, and V1's rows move.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from ..attention import AttentionMetadata
from ..device import Device
from ..spec_decode import NO_DRAFT, FinishedStep, RowTables, SpecDecoder
from .input_batch import InputBatch
from .rejection_sampler import RejectionSamplerOutput
from .sampler import SamplerOutput

Propose = Callable[[SamplerOutput | RejectionSamplerOutput, torch.Tensor], torch.Tensor]
"""Called on the stream with the step's output and hidden states [t, d]: drafts i64 [r, N], then -1."""


class DeviceDrafts:
    def __init__(self, decoder: SpecDecoder, device: Device, engine_seed: int) -> None:
        self._decoder = decoder
        self._device = device
        self._engine_seed = engine_seed

    def prepare(
        self,
        batch: InputBatch,
        scheduled: np.ndarray,
        num_drafts: Sequence[int],
        discarded: frozenset[int],
        metadata: AttentionMetadata,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
    ) -> Propose:
        """For the rows as they stand: sends what the drafter needs of the host.

        Args:
            scheduled: [r], tokens of the step; `num_drafts` of them, the last ones, are drafts.
            input_ids, positions: [>= t] on the device.
        """
        r, send = batch.num_reqs, self._device.to_device
        sampled_rows = np.ones(r, dtype=bool)
        sampled_rows[list(discarded)] = False
        ends = np.minimum(batch.num_computed_tokens_cpu[:r] + scheduled, batch.max_model_len - 1)
        seeds = [self._engine_seed + row if (seed := batch.params[row].seed) is None else seed for row in range(r)]
        idx_mapping = send(np.arange(r, dtype=np.int32))
        samples, drafts = send(sampled_rows), send(np.asarray(num_drafts, dtype=np.int32))
        num_blocks, temperature = send(batch.num_blocks[:r]), send(batch.temperature.np[:r])
        own_seeds = send(np.array(seeds, dtype=np.int64))
        next_prefill = send(batch.token_ids_cpu[np.arange(r), ends])

        def propose(output: SamplerOutput | RejectionSamplerOutput, hidden: torch.Tensor) -> torch.Tensor:
            counts = output.num_sampled if isinstance(output, RejectionSamplerOutput) else torch.ones_like(drafts)
            last = output.sampled.gather(1, counts.long().unsqueeze(1) - 1)
            rows = RowTables(
                last_sampled_tokens=last, num_blocks=num_blocks, temperature=temperature, seeds=own_seeds,
                next_prefill_tokens=next_prefill,
            )  # fmt: skip
            step = FinishedStep(
                idx_mapping=idx_mapping, input_ids=input_ids, positions=positions,
                num_sampled=torch.where(samples, counts, 0), num_rejected=torch.where(samples, drafts + 1 - counts, 0),
                metadata=metadata, rows=rows, hidden_states=hidden,
            )  # fmt: skip
            return self._decoder.propose(step)

        return propose

    @staticmethod
    def to_lists(drafts: np.ndarray, rows: dict[str, int]) -> dict[str, list[int]]:
        """By request the drafts of its row of i64 [r, N], up to the first that is none."""
        result = {}
        for req_id, row in rows.items():
            own = drafts[row].tolist()
            result[req_id] = own[: own.index(NO_DRAFT)] if NO_DRAFT in own else own
        return result
