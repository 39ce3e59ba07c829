"""Runner V1 with a drafter above it: the host knows the tokens and the drafts, and writes them into the batch; a step's
verification is V1's own sampler and generators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..config import EngineConfig
from ..device import Device
from ..models import CausalLM
from ..sample.draft_trace import draft_tensors, padded_drafts
from ..sched_output import GrammarOutput
from ..spec_decode import SpecDecoder
from .device_drafts import DeviceDrafts
from .forward_graphs import ForwardGraphs
from .input_batch import InputBatch
from .rejection_sampler import (
    RejectionSamplerOutput,
    SpecDecodeMetadata,
    make_drafted_sampling,
    make_spec_decode_metadata,
    rejection_sample,
)
from .sampling_metadata import SamplingMetadata
from .step_sampling import StepSampling, grammar_rows


@dataclass(frozen=True)
class DraftedSampling:
    """What the device needs to judge a step's drafts."""

    spec: SpecDecodeMetadata
    metadata: SamplingMetadata
    step: StepSampling
    method: str
    acceptance_rates: torch.Tensor | None

    def sample(
        self, logits: torch.Tensor, token_ids: torch.Tensor, generator: torch.Generator
    ) -> RejectionSamplerOutput:
        """Called on the stream: logits f32 [l, V], the input token of each row [l]."""
        return rejection_sample(
            logits, token_ids, self.spec, self.metadata, self.step, generator, method=self.method,
            acceptance_rates=self.acceptance_rates,
        )  # fmt: skip

    def trace(self, output: RejectionSamplerOutput, token_ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """Called on the stream, with what `sample` returned and was given: for `read_draft_traces`."""
        drafts = padded_drafts(token_ids, self.spec.cu_num_logits, self.spec.max_drafts)
        return draft_tensors(self.method, drafts, output.target_probs, output.draft_probs, output.uniforms, None)


class HostSpeculation:
    """`device_drafts`: None for a drafter that works from the host's tokens."""

    def __init__(
        self,
        decoder: SpecDecoder,
        method: str,
        acceptance_rates: Sequence[float],
        device: Device,
        device_drafts: DeviceDrafts | None,
    ) -> None:
        self._decoder = decoder
        self.device_drafts = device_drafts
        self._method = method
        self._device = device
        rates = np.array(acceptance_rates, dtype=np.float32)
        self._acceptance_rates = device.to_device(rates) if len(rates) else None

    def write_drafts(self, batch: InputBatch, drafts: Sequence[Sequence[int]]) -> None:
        """Behind each row's known tokens, where the step's input is read from; they count as none of them."""
        for row, own in enumerate(drafts):
            begin = batch.num_tokens[row]
            batch.token_ids_cpu[row, begin : begin + len(own)] = own

    def sampling(
        self,
        batch: InputBatch,
        query_start_loc: np.ndarray,
        drafts: Sequence[Sequence[int]],
        discarded: frozenset[int],
        grammar_output: GrammarOutput | None,
    ) -> DraftedSampling:
        """For the rows as they stand, i32 [>= r + 1] `query_start_loc`."""
        counts = [len(own) for own in drafts]
        spec = make_spec_decode_metadata(self._device, query_start_loc, counts)
        grammar = None
        if grammar_output is not None:
            first = np.cumsum([0, *(count + 1 for count in counts)])
            row_of = {req_id: int(first[row]) for req_id, row in batch.req_id_to_index.items()}
            grammar = grammar_rows(self._device, row_of, grammar_output)
        metadata, step = make_drafted_sampling(batch, spec, drafts, discarded, grammar)
        return DraftedSampling(spec, metadata, step, self._method, self._acceptance_rates)

    def propose(self, batch: InputBatch, rows: Mapping[str, int]) -> dict[str, list[int]]:
        """Drafts behind the tokens of `rows` (request id -> row) as they stand."""
        tokens = [batch.token_ids_cpu[row, : batch.num_tokens[row]] for row in rows.values()]
        return dict(zip(rows, self._decoder.propose_from_tokens(tokens), strict=True))


def make_speculation(
    config: EngineConfig, model: CausalLM, decoder: SpecDecoder | None, device: Device, graphs: ForwardGraphs
) -> HostSpeculation | None:
    """None without a decoder. `graphs`: behind whose forwards a drafter on the device will be captured."""
    spec = config.speculative_config
    if spec is None or decoder is None:
        return None
    assert config.max_num_seqs is not None
    rates = spec.conditional_acceptance_rates(decoder.num_drafts)
    drafts = None if decoder.on_host else DeviceDrafts(decoder, device, config.max_num_seqs, model, graphs)
    return HostSpeculation(decoder, spec.rejection_sample_method, rates, device, drafts)
