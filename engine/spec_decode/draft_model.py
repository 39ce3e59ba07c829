"""Drafts from a smaller model with the same vocabulary.

Its KV cache lies in the target's blocks: the slot of a token is the same number in both. So it needs no allocator of
its own, and what another request has computed of a shared prefix serves it too, as long as it sees every step. Behind
each step it runs over the step's tokens and the new one, which gives the first draft, then token by token.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from ..attention import allocate_kv_cache, kv_bytes_per_token
from ..config_checks import ConfigError
from ..models import LoadedModel
from .draw import DraftSampler
from .interface import NO_DRAFT, FinishedStep, SpecDecoder


def check_draft_model(draft: LoadedModel, target: LoadedModel, max_model_len: int) -> None:
    """Raises ConfigError unless the draft's tokens are the target's and it knows enough positions."""
    asked = f"speculative_config model={draft.name!r} for the target {target.name!r}"
    own, wanted = draft.config.vocab_size, target.config.vocab_size
    if own != wanted:
        raise ConfigError(
            f"{asked}: its vocabulary has {own} tokens, the target's {wanted}, so that a draft's id would mean another "
            "token; use a model of the target's family, or method 'ngram', which needs none"
        )
    if draft.tokenizer is not None and target.tokenizer is not None:
        own_ids, ids = draft.tokenizer.backend.get_vocab(), target.tokenizer.backend.get_vocab()
        for token, token_id in ids.items():
            if own_ids.get(token) != token_id:
                raise ConfigError(
                    f"{asked}: token {token!r} has id {token_id} in the target's vocabulary and "
                    f"{own_ids.get(token)} in the draft's; use a model of the target's family"
                )
    if draft.config.max_position_embeddings < max_model_len:
        raise ConfigError(
            f"{asked}: it knows {draft.config.max_position_embeddings} positions, fewer than "
            f"max_model_len={max_model_len}; ask for max_model_len={draft.config.max_position_embeddings} or less"
        )


class DraftModelDecoder(SpecDecoder):
    """`check_draft_model` has passed. `sampler` has the same number of drafts."""

    def __init__(self, draft: LoadedModel, num_drafts: int, sampler: DraftSampler, max_model_len: int) -> None:
        super().__init__(num_drafts)
        self._model = draft.model
        self._sampler = sampler
        self._max_model_len = max_model_len
        self._kv_cache: torch.Tensor | None = None

    @property
    def draft_logits(self) -> torch.Tensor | None:
        return self._sampler.logits

    def kv_bytes_per_token(self) -> int:
        return kv_bytes_per_token(self._model.config, self._model.dtype)

    def allocate_kv_cache(self, num_blocks: int, block_size: int) -> None:
        model = self._model
        self._kv_cache = allocate_kv_cache(model.config, num_blocks, block_size, model.dtype, model.device)

    @torch.inference_mode()
    def propose(self, step: FinishedStep) -> torch.Tensor:
        assert self._kv_cache is not None, "propose: allocate_kv_cache comes first"
        has_token = step.num_sampled > 0
        hidden, position = self._catch_up(step, has_token)
        drafts = []
        for j in range(self.num_drafts):
            position = position + 1
            token = self._sampler.draw(step, j, self._model.compute_logits(hidden), position)
            drafts.append(torch.where(has_token & (position < self._max_model_len), token, NO_DRAFT))
            if j + 1 < self.num_drafts:
                hidden = self._extend(step, token, position, j)
        return torch.stack(drafts, dim=1)

    def _catch_up(self, step: FinishedStep, has_token: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The step's own tokens and each request's new one: one place more a request than the step had.

        Returns:
            Hidden states [r, d] and positions i64 [r] of the new tokens.
        """
        metadata, r = step.metadata, step.metadata.num_reqs
        starts = metadata.query_start_loc[: r + 1].long()
        number = torch.arange(r + 1, device=starts.device)
        own_starts, num_tokens = starts + number, metadata.num_tokens + r
        num_valid = starts[1:] - starts[:-1] - step.num_rejected
        flat = torch.arange(num_tokens, device=starts.device)
        request = torch.searchsorted(own_starts[1:], flat, right=True).clamp_(max=r - 1)
        place = flat - own_starts[request]
        is_new = (place == num_valid[request]) & has_token[request]
        source = (starts[request] + place).clamp_(max=metadata.num_tokens - 1)
        last = step.rows.last_sampled_tokens[step.idx_mapping.clamp(min=0).long(), 0]
        # Places behind the new token write nothing, and nothing is read of them.
        token = torch.where(is_new, last[request], step.input_ids[source].clamp(min=0).long())
        first = step.positions[starts[:-1].clamp(max=metadata.num_tokens - 1)]
        position = first[request] + place
        hidden = self._forward(
            step, token, position, request, (place < num_valid[request]) | is_new,
            query_start_loc=own_starts.int(),
            query_start_loc_np=metadata.query_start_loc_np[: r + 1] + np.arange(r + 1),
            num_tokens=num_tokens, max_query_len=metadata.max_query_len + 1, num_decodes=0,
            seq_lens=metadata.seq_lens[:r] + 1, longer=1,
        )  # fmt: skip
        ends = own_starts[:-1] + num_valid
        return hidden[torch.where(has_token, ends, ends - 1)], first + num_valid

    def _extend(self, step: FinishedStep, token: torch.Tensor, position: torch.Tensor, index: int) -> torch.Tensor:
        """Hidden states [r, d] of one token a request."""
        r = step.metadata.num_reqs
        number = torch.arange(r + 1, dtype=torch.int32, device=token.device)
        return self._forward(
            step, token, position, number[:-1].long(), step.num_sampled > 0,
            query_start_loc=number, query_start_loc_np=np.arange(r + 1, dtype=np.int32), num_tokens=r, max_query_len=1,
            num_decodes=r, seq_lens=(position + 1).int(), longer=index + 2,
        )  # fmt: skip

    def _forward(
        self,
        step: FinishedStep,
        token: torch.Tensor,
        position: torch.Tensor,
        request: torch.Tensor,
        is_used: torch.Tensor,
        *,
        seq_lens: torch.Tensor,
        longer: int,
        query_start_loc_np: np.ndarray,
        **sizes: int | torch.Tensor,
    ) -> torch.Tensor:
        """The model over flat tokens i64 [n] of `request` i64 [n]. `longer`: by how much a request may have grown."""
        metadata, limit = step.metadata, self._max_model_len
        limit = min(limit, metadata.block_table.shape[1] * metadata.block_size)
        block = (position // metadata.block_size).clamp(max=metadata.block_table.shape[1] - 1)
        held = step.rows.num_blocks[step.idx_mapping.clamp(min=0).long()][request]
        slot = metadata.block_table[request, block] * metadata.block_size + position % metadata.block_size
        # A place without a block of its request must not write: the table's rest is another's.
        slot = torch.where(is_used & (position < limit) & (block < held), slot, -1)
        own = replace(
            metadata,
            slot_mapping=slot,
            num_tokens_padded=token.shape[0],
            seq_lens=seq_lens.clamp(max=limit).int(),
            seq_lens_np=np.minimum(metadata.seq_lens_np + longer, limit),
            max_seq_len=min(metadata.max_seq_len + longer, limit),
            query_start_loc_np=query_start_loc_np.astype(np.int32),
            **sizes,  # type: ignore[arg-type]
        )
        assert self._kv_cache is not None
        return self._model(token.int(), position.clamp(max=limit - 1), own, self._kv_cache)
