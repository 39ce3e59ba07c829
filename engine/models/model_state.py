"""ModelState keeps what is particular to a model family out of both runners.

The base class is a plain decoder: its input is token ids and positions, its attention is paged, it has no state
beyond the KV cache. A family with more (multimodal embeddings, recurrent state, other rope inputs) overrides what
differs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ..attention import AttentionMetadata
from ..sched_output import NewRequestData


class ModelState:
    num_new_sampled_tokens_per_step = 1

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size

    def add_request(self, row: int, new: NewRequestData) -> None:
        """A request got `row`; a family with state per request stages it here."""

    def remove_request(self, req_id: str) -> None:
        """The request finished, was aborted or preempted."""

    def apply_staged_writes(self) -> None:
        """Sends what add_request staged; after new requests only."""

    def prepare_inputs(self, input_ids: torch.Tensor, positions: torch.Tensor) -> dict[str, Any]:
        """The model's keyword arguments beside metadata and kv_cache. input_ids i32 [t], positions i64 [t]."""
        return {"input_ids": input_ids, "positions": positions}

    def prepare_attn(
        self,
        *,
        num_reqs: int,
        num_tokens: int,
        num_tokens_padded: int,
        query_start_loc: torch.Tensor,
        query_start_loc_np: np.ndarray,
        seq_lens: torch.Tensor,
        seq_lens_np: np.ndarray,
        block_table: torch.Tensor,
        slot_mapping: torch.Tensor,
        num_decodes: int,
        has_admitted: bool = False,
        max_query_len: int | None = None,
    ) -> AttentionMetadata:
        """The attention metadata of one step; sizes come from the host's integers, never from a device tensor.

        `max_query_len` where the device shares the queries out, so that query_start_loc_np has their number alone.
        """
        if max_query_len is None:
            max_query_len = int(np.diff(query_start_loc_np[: num_reqs + 1]).max())
        return AttentionMetadata(
            num_reqs=num_reqs,
            num_tokens=num_tokens,
            num_tokens_padded=num_tokens_padded,
            query_start_loc=query_start_loc,
            query_start_loc_np=query_start_loc_np,
            seq_lens=seq_lens,
            seq_lens_np=seq_lens_np,
            block_table=block_table,
            slot_mapping=slot_mapping,
            block_size=self.block_size,
            max_query_len=max_query_len,
            max_seq_len=int(seq_lens_np.max()),
            num_decodes=num_decodes,
            has_admitted=has_admitted,
        )

    def prepare_dummy_inputs(self, num_tokens: int, device: torch.device) -> dict[str, Any]:
        """Inputs of the right shape and no meaning, for warm-up and capture."""
        zeros = torch.zeros(num_tokens, dtype=torch.int32, device=device)
        return self.prepare_inputs(zeros, zeros.long())
