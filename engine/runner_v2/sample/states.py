"""What a request's sampling parameters alone decide, as rows of V2's state table.

Kernels gather a row of it for each row of the logits, by `expanded_idx_mapping`.
"""

from __future__ import annotations

import numpy as np
import torch

from ...device import Device
from ...sampling_params import SamplingParams
from ..buffers import UvaBackedTensor, publish
from .logit_bias import LogitBias
from .logprobs import NO_LOGPROBS
from .tables import set_if_new


def derive_seed(engine_seed: int, request_seed_index: int) -> int:
    """A seed for a request that brought none: a pure function of the engine's seed and of the request's number."""
    entropy = (engine_seed % 2**64, request_seed_index)
    return int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0].astype(np.int64))


class SamplingStates:
    """A feature has four verbs: add_request, apply_staged_writes, its use in the sampler, and a numpy mirror that
    decides whether a batch needs it at all."""

    def __init__(
        self, device: Device, max_num_reqs: int, vocab_size: int, engine_seed: int, ring_depth: int, form: str
    ) -> None:
        self.num_rows = max_num_reqs + 1  # the last one is the padding's

        def uva(dtype: torch.dtype) -> UvaBackedTensor:
            return UvaBackedTensor(device, (self.num_rows,), dtype, ring_depth)

        self.vocab_size = vocab_size
        self.device = device
        self.ring_depth = ring_depth
        self.engine_seed = engine_seed
        self.temperature = uva(torch.float32)
        self.top_p = uva(torch.float32)
        self.top_k = uva(torch.int32)
        self.min_p = uva(torch.float32)
        self.seeds = uva(torch.int64)
        self.logit_bias = LogitBias(device, self.num_rows, ring_depth, form)
        self.num_logprobs = np.full(max_num_reqs, NO_LOGPROBS, dtype=np.int32)
        self.structured_outputs = np.zeros(max_num_reqs, dtype=bool)

    def add_request(
        self, row: int, params: SamplingParams, prompt_len: int, stop_ids: frozenset[int], request_seed_index: int
    ) -> None:
        set_if_new(self.temperature, row, params.temperature)
        set_if_new(self.top_p, row, params.top_p)
        set_if_new(self.top_k, row, params.top_k if params.top_k > 0 else self.vocab_size)
        set_if_new(self.min_p, row, params.min_p)
        seed = params.seed if params.seed is not None else derive_seed(self.engine_seed, request_seed_index)
        set_if_new(self.seeds, row, seed)
        self.logit_bias.add_request(row, params, prompt_len, stop_ids)
        self.num_logprobs[row] = NO_LOGPROBS if params.logprobs is None else params.logprobs
        self.structured_outputs[row] = params.structured_outputs is not None

    def apply_staged_writes(self) -> list[str]:
        """Sends what changed; returns the names of the launches."""
        publish(self.device, "publish sampling", self.temperature, self.top_p, self.top_k, self.min_p, self.seeds)
        return self.logit_bias.apply_staged_writes()
