"""Sampling parameters as rows of V2's state table: one row a request, gathered in kernels by `expanded_idx_mapping`."""

from __future__ import annotations

import numpy as np
import torch

from ...device import Device
from ...sampling_params import MAX_STOP_IDS, SamplingParams
from ..buffers import StagedWriteTensor, UvaBackedTensor, publish

NO_LOGPROBS = -1


def derive_seed(engine_seed: int, request_seed_index: int) -> int:
    """A seed for a request that brought none: a pure function of the engine's seed and of the request's number."""
    entropy = (engine_seed % 2**64, request_seed_index)
    return int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0].astype(np.int64))


class SamplingStates:
    """The four verbs of a feature: add_request, apply_staged_writes, use (in the sampler), and numpy mirrors that
    decide whether a batch needs it at all."""

    def __init__(
        self, device: Device, max_num_reqs: int, vocab_size: int, engine_seed: int, ring_depth: int, form: str
    ) -> None:
        def uva(dtype: torch.dtype) -> UvaBackedTensor:
            return UvaBackedTensor(device, (max_num_reqs + 1,), dtype, ring_depth)

        self.vocab_size = vocab_size
        self._device = device
        self.engine_seed = engine_seed
        self.temperature = uva(torch.float32)
        self.top_p = uva(torch.float32)
        self.top_k = uva(torch.int32)
        self.min_p = uva(torch.float32)
        self.seeds = uva(torch.int64)
        # Position below which the stop ids are forbidden: prompt_len + min_tokens
        self.min_len = uva(torch.int32)
        self.stop_ids = StagedWriteTensor(device, (max_num_reqs + 1, MAX_STOP_IDS), torch.int64, form)
        self.num_logprobs = np.full(max_num_reqs, NO_LOGPROBS, dtype=np.int32)

    def add_request(
        self, row: int, params: SamplingParams, prompt_len: int, stop_ids: frozenset[int], request_seed_index: int
    ) -> None:
        self.temperature.set(row, params.temperature)
        self.top_p.set(row, params.top_p)
        self.top_k.set(row, params.top_k if params.top_k > 0 else self.vocab_size)
        self.min_p.set(row, params.min_p)
        seed = params.seed if params.seed is not None else derive_seed(self.engine_seed, request_seed_index)
        self.seeds.set(row, seed)
        self.min_len.set(row, prompt_len + params.min_tokens if params.min_tokens else 0)
        if params.min_tokens:
            ids = np.full(MAX_STOP_IDS, -1, dtype=np.int64)
            ids[: len(stop_ids)] = sorted(stop_ids)
            self.stop_ids.stage(row, 0, ids)
        self.num_logprobs[row] = NO_LOGPROBS if params.logprobs is None else params.logprobs

    def apply_staged_writes(self) -> bool:
        publish(
            self._device,
            "publish sampling",
            self.temperature,
            self.top_p,
            self.top_k,
            self.min_p,
            self.seeds,
            self.min_len,
        )
        return self.stop_ids.apply("write stop_token_ids")
