"""Drafts from one more head on the target's hidden states: one token a request.

The head runs over the very tokens of the step, with the step's own attention metadata: behind token i it has the
target's hidden state of i and the embedding of token i + 1, and says token i + 2. Its cache lies in the target's
blocks.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import cast

import torch

from kernels import ShiftedInputs, embedding, max_rows, shift_inputs, small_linear
from kernels.keep_drafts import keep_drafts

from ..attention import allocate_kv_cache, kv_bytes_per_token
from ..models.config import ModelConfig
from ..models.decoder import CausalLM, DecoderLayer
from ..models.fused import fused_layers
from ..models.layers import Linear, RMSNorm
from ..models.rope import RotaryEmbedding
from ..models.weights import weight_views
from .draw import DraftSampler
from .interface import FinishedStep, SpecDecoder
from .mtp_checkpoint import Weights, check_target


class MtpHead:
    """The head's weights where they run. `config`, `weights`: of `read_mtp`; `target` gives embedding and output
    head."""

    def __init__(self, config: ModelConfig, weights: Weights, target: CausalLM) -> None:
        check_target(config, target.config)
        dtype, device, d = target.dtype, target.device, config.hidden_size
        self.config, self.target = config, target
        self.embed_tokens, self.lm_head = target.embed_tokens, target.lm_head
        self.enorm, self.hnorm, self.norm = (RMSNorm(d, config.rms_norm_eps, dtype, device) for _ in range(3))
        # eh_proj by its halves, so that neither of its inputs is copied beside the other.
        self.e_proj, self.h_proj = (Linear(d, d, False, dtype, device) for _ in range(2))
        self.layers = [DecoderLayer(config, dtype, device)]
        self.rotary_emb = RotaryEmbedding(config, dtype, device)
        # The layer is named as a model's own.
        views = weight_views(cast(CausalLM, self))
        e_weight, h_weight = weights["eh_proj.weight"].split(d, 1)
        named = weights | {"e_proj.weight": e_weight, "h_proj.weight": h_weight}
        del named["eh_proj.weight"]
        own: dict[str, RMSNorm | Linear] = {"enorm": self.enorm, "hnorm": self.hnorm}
        own |= {"e_proj": self.e_proj, "h_proj": self.h_proj}
        for name, tensor in named.items():
            part = own.get(name.removesuffix(".weight"))
            view = views[f"model.{name}"] if part is None else part.weight
            assert view is not None
            view.copy_(tensor)

    def forward(self, step: FinishedStep, inputs: ShiftedInputs, cache: torch.Tensor) -> torch.Tensor:
        """[t, d] behind the last norm, padding included."""
        assert step.hidden_states is not None, "an MTP head needs the target's hidden states"
        t = inputs.token_ids.shape[0]
        metadata = replace(step.metadata, slot_mapping=inputs.slot_mapping, num_tokens_padded=t)
        hidden, positions = step.hidden_states[:t], step.positions[:t]
        fused = self.target.triton_attention
        if fused is not None:
            embedded = embedding(inputs.token_ids, self.embed_tokens.weight, form=fused.form)
            is_few = t <= max_rows(hidden, hidden.shape[1])
            x = self._few_rows(embedded, hidden, fused.form) if is_few else self._rows(embedded, hidden)
            attend = partial(fused.forward, fused.prepare(metadata, cache))
            return fused_layers(self, x, positions, attend, cache, fused.form)
        attention = self.target.attention
        plan = attention.prepare(metadata, cache)
        rope = self.rotary_emb(positions)
        embedded = self.embed_tokens(inputs.token_ids)
        x = self.layers[0](self._rows(embedded, hidden), rope, partial(attention.forward, plan), cache[0])
        attention.finish(plan, cache)
        return self.norm(x)

    def _rows(self, embedded: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """What the layer gets, [t, d], of the embedding [t, d] of each next token and the target's hidden [t, d]."""
        return self.h_proj.add_to(self.e_proj(self.enorm(embedded)), self.hnorm(hidden))

    def _few_rows(self, embedded: torch.Tensor, hidden: torch.Tensor, form: str) -> torch.Tensor:
        """As `_rows`, in two launches."""
        assert self.e_proj.weight is not None and self.h_proj.weight is not None
        x = small_linear(embedded, self.e_proj.weight, norm_weight=self.enorm.weight, eps=self.enorm.eps, form=form)
        return small_linear(
            hidden, self.h_proj.weight, norm_weight=self.hnorm.weight, eps=self.hnorm.eps, residual=x, form=form
        )


class MtpDecoder(SpecDecoder):
    """`sampler` has one draft."""

    keeps_drafts = True

    def __init__(self, head: MtpHead, sampler: DraftSampler, max_model_len: int, form: str = "auto") -> None:
        super().__init__(num_drafts=1)
        self._form = form
        self._head = head
        self._sampler = sampler
        self._max_model_len = max_model_len
        self._kv_cache: torch.Tensor | None = None

    @property
    def draft_logits(self) -> torch.Tensor | None:
        return self._sampler.logits

    def kv_bytes_per_token(self) -> int:
        return kv_bytes_per_token(self._head.config, self._head.target.dtype)

    def allocate_kv_cache(self, num_blocks: int, block_size: int) -> None:
        target = self._head.target
        self._kv_cache = allocate_kv_cache(self._head.config, num_blocks, block_size, target.dtype, target.device)

    @torch.inference_mode()
    def propose(self, step: FinishedStep) -> torch.Tensor:
        assert self._kv_cache is not None, "propose: allocate_kv_cache comes first"
        rows, metadata = step.rows, step.metadata
        assert rows.next_prefill_tokens is not None
        inputs = shift_inputs(
            step.idx_mapping, metadata.query_start_loc, step.input_ids, metadata.slot_mapping, step.positions,
            rows.last_sampled_tokens, rows.next_prefill_tokens, step.num_sampled, step.num_rejected,
            metadata.num_tokens_padded, form=self._form,
        )  # fmt: skip
        hidden = self._head.forward(step, inputs, self._kv_cache)
        logits = self._head.target.compute_logits(hidden[inputs.last_indices])
        drafts = self._sampler.draw(step, 0, logits, inputs.draft_positions).unsqueeze(1)
        keep_drafts(
            drafts, step.idx_mapping, step.num_sampled, inputs.draft_positions, self._max_model_len, rows.draft_tokens,
            form=self._form,
        )  # fmt: skip
        return drafts
