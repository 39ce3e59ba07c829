"""Drafts from a smaller model with the same vocabulary.

Its KV cache lies in the target's blocks: the slot of a token is the same number in both. So it needs no allocator of
its own, and what another request has computed of a shared prefix serves it too, as long as it sees every step. Behind
each step it runs over the step's tokens and the new one, which gives the first draft, then token by token.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from kernels.extend_inputs import Blocks, extend_inputs
from kernels.keep_drafts import keep_drafts

from ..attention import AttentionMetadata, allocate_kv_cache, kv_bytes_per_token
from ..config_checks import ConfigError
from ..models import LoadedModel
from .draw import DraftSampler
from .interface import FinishedStep, SpecDecoder


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

    keeps_drafts = True

    def __init__(
        self, draft: LoadedModel, num_drafts: int, sampler: DraftSampler, max_model_len: int, form: str = "auto"
    ) -> None:
        super().__init__(num_drafts)
        self._form = form
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
        metadata, has_token = step.metadata, step.num_sampled > 0
        blocks = Blocks(metadata.block_table, step.rows.num_blocks, metadata.block_size, self._max_model_len)
        hidden, position = self._catch_up(step, blocks)
        first, tokens = position + 1, []
        for j in range(self.num_drafts):
            position = position + 1
            token = self._sampler.draw(step, j, self._model.compute_logits(hidden), position)
            tokens.append(token)
            if j + 1 < self.num_drafts:
                hidden = self._advance(step, blocks, token, position, has_token, longer=j + 2)
        drafts = torch.stack(tokens, dim=1)
        keep_drafts(
            drafts, step.idx_mapping, step.num_sampled, first, self._max_model_len, step.rows.draft_tokens,
            form=self._form,
        )  # fmt: skip
        return drafts

    def _catch_up(self, step: FinishedStep, blocks: Blocks) -> tuple[torch.Tensor, torch.Tensor]:
        """The step's own tokens and each request's new one.

        Returns:
            Hidden states [r, d] and positions i64 [r] of the new tokens.
        """
        metadata, r = step.metadata, step.metadata.num_reqs
        inputs = extend_inputs(
            step.idx_mapping, metadata.query_start_loc, step.input_ids, step.positions, step.rows.last_sampled_tokens,
            step.num_sampled, step.num_rejected, blocks, metadata.num_tokens, form=self._form,
        )  # fmt: skip
        number = torch.arange(r + 1, dtype=torch.int32, device=step.idx_mapping.device)
        own = replace(
            metadata,
            num_tokens=metadata.num_tokens + r,
            query_start_loc=metadata.query_start_loc[: r + 1] + number,
            query_start_loc_np=metadata.query_start_loc_np[: r + 1] + np.arange(r + 1, dtype=np.int32),
            max_query_len=metadata.max_query_len + 1,
            num_decodes=0,
        )
        hidden = self._forward(
            own, blocks, inputs.token_ids, inputs.positions, inputs.slot_mapping, metadata.seq_lens[:r] + 1, longer=1
        )
        return hidden[inputs.last_indices], inputs.last_positions

    def _advance(
        self, step: FinishedStep, blocks: Blocks, token: torch.Tensor, position: torch.Tensor, is_used: torch.Tensor,
        *, longer: int,
    ) -> torch.Tensor:  # fmt: skip
        """Hidden states [r, d] of one draft a request."""
        r = step.metadata.num_reqs
        number = torch.arange(r + 1, dtype=torch.int32, device=token.device)
        own = replace(
            step.metadata,
            num_tokens=r,
            query_start_loc=number,
            query_start_loc_np=np.arange(r + 1, dtype=np.int32),
            max_query_len=1,
            num_decodes=r,
        )
        slots = blocks.slots(step.idx_mapping, number[:-1].long(), position, is_used)
        return self._forward(own, blocks, token.int(), position, slots, position + 1, longer=longer)

    def _forward(
        self, metadata: AttentionMetadata, blocks: Blocks, token: torch.Tensor, position: torch.Tensor,
        slots: torch.Tensor, seq_lens: torch.Tensor, *, longer: int,
    ) -> torch.Tensor:  # fmt: skip
        """The model over flat tokens i32 [n]. `longer`: by how much a request may have grown since the step."""
        limit = blocks.limit
        own = replace(
            metadata,
            num_tokens_padded=token.shape[0],
            slot_mapping=slots,
            seq_lens=seq_lens.clamp(max=limit).int(),
            seq_lens_np=np.minimum(metadata.seq_lens_np + longer, limit),
            max_seq_len=min(metadata.max_seq_len + longer, limit),
        )
        assert self._kv_cache is not None
        return self._model(token, position.clamp(max=limit - 1), own, self._kv_cache)
