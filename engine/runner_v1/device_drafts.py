"""Drafters that work on the device, behind runner V1: their drafts reach the host with the step's tokens.

They draft greedily: what a drawn draft was drawn from lies in a row of the drafter, and V1's rows move. R rows of the
batch, r requests and t tokens in this step, N drafts, d hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch

from ..attention import AttentionMetadata
from ..device import Device
from ..models import CausalLM
from ..spec_decode import NO_DRAFT, FinishedStep, RowTables, SpecDecoder
from .forward_graphs import ForwardGraphs, ForwardSize
from .input_batch import CpuGpuBuffer, InputBatch
from .input_buffers import InputBuffers
from .rejection_sampler import RejectionSamplerOutput
from .sampler import SamplerOutput

Propose = Callable[[SamplerOutput | RejectionSamplerOutput, torch.Tensor], torch.Tensor]
"""Called on the stream with the step's output and hidden states [t, d]: drafts i64 [r, N], then -1."""
_SAMPLES, _NUM_DRAFTS, _NUM_BLOCKS, _NEXT_PREFILL = range(4)


class DeviceDrafts:
    """What the drafter is given lies in buffers that every step writes, so that its launches can be captured: behind
    each size of `graphs`."""

    def __init__(
        self, decoder: SpecDecoder, device: Device, max_num_reqs: int, model: CausalLM, graphs: ForwardGraphs
    ) -> None:
        self._decoder = decoder
        self._graphs = graphs
        # Of each row: whether its token counts, its drafts in this step, its blocks, the token behind its part of a
        # prompt. The host may write them again: a step in the plain loop has waited for its tokens.
        self._rows = CpuGpuBuffer(device, 4, max_num_reqs, dtype=torch.int32)
        self._idx_mapping = torch.arange(max_num_reqs, dtype=torch.int32, device=device.torch_device)
        self._num_sampled = device.zeros(max_num_reqs, dtype=torch.int32)
        self._num_rejected = device.zeros(max_num_reqs, dtype=torch.int32)
        self._last_sampled = device.zeros(max_num_reqs, 1, dtype=torch.int64)
        # [t, d], of the largest captured batch.
        largest = max((size.num_tokens for size in graphs.sizes), default=0)
        self._hidden = torch.zeros(largest, model.config.hidden_size, dtype=model.dtype, device=model.device)
        self._tables = RowTables(
            last_sampled_tokens=self._last_sampled,
            num_blocks=self._rows.gpu[_NUM_BLOCKS],
            temperature=device.zeros(max_num_reqs, dtype=torch.float32),
            seeds=device.zeros(max_num_reqs, dtype=torch.int64),
            next_prefill_tokens=self._rows.gpu[_NEXT_PREFILL],
        )

    def padding_work(self, metadata: AttentionMetadata, buffers: InputBuffers) -> Callable[[], torch.Tensor]:
        """What is captured behind the forward of `metadata`, of whose requests none is there: it drafts nothing and
        writes no cache."""
        self._num_sampled.zero_()
        self._num_rejected.zero_()
        return partial(self._draft, metadata=metadata, hidden=self._hidden, buffers=buffers)

    def prepare(
        self,
        batch: InputBatch,
        scheduled: np.ndarray,
        num_drafts: Sequence[int],
        discarded: frozenset[int],
        metadata: AttentionMetadata,
        buffers: InputBuffers,
        size: ForwardSize | None,
    ) -> Propose:
        """For the rows as they stand: sends what the drafter needs of the host.

        Args:
            scheduled: [r], tokens of the step; `num_drafts` of them, the last ones, are drafts.
            metadata: the step's own.
            size: of the captured forward that the step runs; None: piece by piece, and the drafter too.
        """
        r, rows = batch.num_reqs, self._rows.np
        rows[_SAMPLES, :r] = 1
        rows[_SAMPLES, list(discarded)] = 0
        rows[_NUM_DRAFTS, :r] = num_drafts
        rows[_NUM_BLOCKS, :r] = batch.num_blocks[:r]
        ends = np.minimum(batch.num_computed_tokens_cpu[:r] + scheduled, batch.max_model_len - 1)
        rows[_NEXT_PREFILL, :r] = batch.token_ids_cpu[np.arange(r), ends]
        self._rows.copy_to_gpu(len(rows))

        def propose(output: SamplerOutput | RejectionSamplerOutput, hidden: torch.Tensor) -> torch.Tensor:
            self._take(output, r)
            if size is None:
                return self._draft(metadata, hidden, buffers)
            self._hidden[: hidden.shape[0]].copy_(hidden)
            return self._graphs.replay_drafts(size)[:r]

        return propose

    def _take(self, output: SamplerOutput | RejectionSamplerOutput, num_reqs: int) -> None:
        """On the stream: what the step's requests sampled. Rows of none sample nothing."""
        samples, drafts = self._rows.gpu[_SAMPLES], self._rows.gpu[_NUM_DRAFTS]
        self._num_sampled[num_reqs:].zero_()
        self._num_rejected[num_reqs:].zero_()
        samples, drafts = samples[:num_reqs], drafts[:num_reqs]
        counts = output.num_sampled if isinstance(output, RejectionSamplerOutput) else torch.ones_like(drafts)
        torch.mul(samples, counts, out=self._num_sampled[:num_reqs])
        torch.mul(samples, drafts + 1 - counts, out=self._num_rejected[:num_reqs])
        torch.gather(output.sampled, 1, counts.long().unsqueeze(1) - 1, out=self._last_sampled[:num_reqs])

    @torch.inference_mode()
    def _draft(self, metadata: AttentionMetadata, hidden: torch.Tensor, buffers: InputBuffers) -> torch.Tensor:
        r = metadata.num_reqs
        step = FinishedStep(
            idx_mapping=self._idx_mapping[:r], input_ids=buffers.input_ids.gpu, positions=buffers.positions,
            num_sampled=self._num_sampled[:r], num_rejected=self._num_rejected[:r], metadata=metadata,
            rows=self._tables, hidden_states=hidden,
        )  # fmt: skip
        return self._decoder.propose(step)

    @staticmethod
    def to_lists(drafts: np.ndarray, rows: dict[str, int]) -> dict[str, list[int]]:
        """By request the drafts of its row of i64 [r, N], up to the first that is none."""
        result = {}
        for req_id, row in rows.items():
            own = drafts[row].tolist()
            result[req_id] = own[: own.index(NO_DRAFT)] if NO_DRAFT in own else own
        return result
