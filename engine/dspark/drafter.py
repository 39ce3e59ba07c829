"""The draft over our paged cache: what runner V2 calls behind a step, without a host wait, capturable in a graph.

The draft's cache has the target's layout and lies in the target's blocks: slot s of the draft's cache is the same token
as slot s of the target's. So a shared block of the prefix cache has its draft context too, written by whoever computed
the block; nothing has to be recomputed on a hit, and a block never outlives its context.

Symbols: t tokens of the target's step, r requests, Q = block_size queries a request, k drafts, n injected layers.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from kernels import embedding, max_rows, resolve_form, small_linear
from kernels.draft_inputs import DraftInputs
from kernels.markov_drafts import markov_drafts
from kernels.store_context import store_context

from ..attention import allocate_kv_cache
from ..models.decoder import CausalLM, DecoderLayer
from ..models.fused import fused_layers, head_logits
from ..models.layers import Embedding, Linear, RMSNorm
from ..models.rope import RotaryEmbedding
from ..models.weights import FUSED
from ..spec_decode.draw import DraftSampler
from ..spec_decode.interface import FinishedStep
from .attention import BlockAttention, BlockAttentionPlan
from .checkpoint import Weights
from .config import DSparkConfig
from .drawn import confidences_of, drawn_drafts
from .heads import confidence_head, markov_head

ComputeLogits = Callable[[Tensor], Tensor]
Draw = tuple[DraftSampler, FinishedStep]


@dataclass(frozen=True)
class Drafts:
    """What a round proposes."""

    # [r, k] i64
    tokens: Tensor
    # [r, k] f32, before the sigmoid; None without a confidence head
    confidence_logits: Tensor | None


class DSparkDrafter:
    """A draft's weights where they run.

    Args:
        config, weights: of `read_draft`; config.check_target(target.config) has passed.
        target: gives embeddings and output head where the draft has none of its own.
        form: kernel form.
    """

    def __init__(self, config: DSparkConfig, weights: Weights, target: CausalLM, form: str = "auto") -> None:
        config.check_target(target.config)
        model, dtype, device = config.model, target.dtype, target.device
        self.config, self.dtype, self.device, self.form = config, dtype, device, form
        # Where kernels run anyway, the layers run in few launches as the target's do.
        self._fused = resolve_form(form, target.embed_tokens.weight) in ("triton", "interpret")
        self.layers = [DecoderLayer(model, dtype, device) for _ in range(model.num_hidden_layers)]
        self.fc = Linear(len(config.target_layer_ids) * model.hidden_size, model.hidden_size, False, dtype, device)
        self.hidden_norm = RMSNorm(model.hidden_size, model.rms_norm_eps, dtype, device)
        self.norm = RMSNorm(model.hidden_size, model.rms_norm_eps, dtype, device)
        self.rotary_emb = RotaryEmbedding(model, dtype, device)
        heads = _fill(self, weights)
        self.markov_head, self.confidence_head = markov_head(config, heads), confidence_head(config, heads)
        self._context_kv = self._fuse_context_projections()
        self.embed_tokens, self.compute_logits = self._shared(weights, target)
        self.attention = BlockAttention(device, form)

    def allocate_kv_cache(self, num_blocks: int, block_size: int) -> Tensor:
        """Zeroed cache of the draft's layers, [layers, 2, num_blocks, block_size, Hk, D]; blocks as the target's."""
        return allocate_kv_cache(self.config.model, num_blocks, block_size, self.dtype, self.device)

    @torch.inference_mode()
    def inject_context(self, hidden: Tensor, positions: Tensor, slot_mapping: Tensor, kv_cache: Tensor) -> None:
        """Store the draft's context of a step's tokens.

        Call it for every token of every step, prompts too, before `propose` of that step.

        Args:
            hidden: [t, n * d], the target's at `config.target_layer_ids`.
            positions: i64 [t].
            slot_mapping: i64 [t]; -1 for rejected tokens and padding (`DraftInputs.context_slot_mapping`).
            kv_cache: the draft's, changed in place.
        """
        fc, norm, to_kv = self.fc, self.hidden_norm, self._context_kv
        if self._fused and hidden.shape[0] <= max_rows(hidden, self.config.model.hidden_size):
            assert fc.weight is not None and to_kv.weight is not None
            x = small_linear(hidden, fc.weight, form=self.form)
            kv = small_linear(x, to_kv.weight, norm_weight=norm.weight, eps=norm.eps, bias=to_kv.bias, form=self.form)
        else:
            kv = to_kv(norm(fc(hidden)))
        store_context(
            kv, kv_cache, slot_mapping, positions, self.rotary_emb.cos_sin, self._context_k_norm, norm.eps,
            form=self.form,
        )  # fmt: skip

    @torch.inference_mode()
    def backbone(self, inputs: DraftInputs, block_table: Tensor, kv_cache: Tensor, max_seq_len: int) -> Tensor:
        """Hidden states after the last norm, [r, Q, d], of the blocks that ``inputs`` describes.

        Args:
            inputs: cut to r requests (see kernels.draft_inputs); their keys and values go to its slots.
            block_table: i32 [r, B], gathered.
            max_seq_len: an upper bound of inputs.seq_lens, Q counted.
        """
        plan = BlockAttentionPlan(inputs.slot_mapping, block_table, inputs.seq_lens, max_seq_len)
        attend = partial(self.attention.forward, plan)
        if self._fused:
            x = embedding(inputs.input_ids, self.embed_tokens.weight, form=self.form)
            x = fused_layers(self, x, inputs.positions, attend, kv_cache, self.form)
        else:
            x, rope = self.embed_tokens(inputs.input_ids), self.rotary_emb(inputs.positions)
            for layer, cache in zip(self.layers, kv_cache.unbind(0), strict=True):
                x = layer(x, rope, attend, cache)
            x = self.norm(x)
        return x.view(inputs.seq_lens.shape[0], self.config.block_size, -1)

    @torch.inference_mode()
    def propose(self, hidden: Tensor, anchors: Tensor, positions: Tensor, k: int, draw: Draw | None = None) -> Drafts:
        """The sequential part: k drafts for each block, each with the bias that the token before it gives.

        Args:
            hidden: [r, Q, d], of `backbone`.
            anchors: i32 or i64 [r], token ids.
            positions: i64 [r, Q], of the block: draft i will stand at positions[:, i] + 1.
            k: 1 to block_size; fewer are the first k of the whole block's.
            draw: who draws, and for which step; None for the most likely tokens.
        """
        r = hidden.shape[0]
        base = self.compute_logits(hidden[:, :k].reshape(r * k, -1)).view(r, k, -1)
        head, confidence = self.markov_head, self.confidence_head
        if draw is None and head is not None:
            return Drafts(*markov_drafts(base, hidden, anchors, head, confidence, form=self.form))
        if draw is None:
            tokens = base.argmax(-1)
        else:
            tokens = drawn_drafts(base, hidden, anchors, positions, head, *draw, form=self.form)
        return Drafts(tokens, confidences_of(hidden, anchors, tokens, head, confidence) if confidence else None)

    def _fuse_context_projections(self) -> Linear:
        """One product for the context's keys and values of all layers: rows [K of all layers, V of all layers]."""
        model = self.config.model
        kv_size = model.num_key_value_heads * model.head_dim
        parts = [layer.self_attn.qkv_proj for layer in self.layers]
        weights = [part.weight[-2 * kv_size :].split(kv_size) for part in parts if part.weight is not None]
        biased = model.attention_bias
        fused = Linear(model.hidden_size, 2 * kv_size * len(parts), biased, self.dtype, self.device)
        fused.set_weight(torch.cat([k for k, _ in weights] + [v for _, v in weights]))
        if biased:
            biases = [part.bias[-2 * kv_size :].split(kv_size) for part in parts if part.bias is not None]
            fused.bias = torch.cat([k for k, _ in biases] + [v for _, v in biases])
        norms = [layer.self_attn.k_norm for layer in self.layers]
        # [layers, D]
        self._context_k_norm = torch.stack([norm.weight for norm in norms if norm is not None])
        return fused

    def _shared(self, weights: Weights, target: CausalLM) -> tuple[Embedding, ComputeLogits]:
        """Embedding and output head: the draft's own, or else the target's."""
        embedding, head = target.embed_tokens, weights.get("lm_head.weight")
        if "embed_tokens.weight" in weights:
            embedding = Embedding(1, 1, self.dtype, self.device)
            embedding.weight = weights["embed_tokens.weight"].to(self.device, self.dtype)
        if head is None:
            return embedding, target.compute_logits
        own = head.to(self.device, self.dtype)
        if _is_same(own, target.lm_head.weight):
            return embedding, target.compute_logits
        if self._fused:
            return embedding, lambda hidden: head_logits(own, hidden, self.form)
        return embedding, lambda hidden: torch.mm(hidden, own.t()).float()


def _fill(drafter: DSparkDrafter, weights: Weights) -> Weights:
    """Copies the weights into the layers; returns those of the small heads, where the draft runs."""
    heads: Weights = {}
    model = drafter.config.model
    kv_size = model.num_key_value_heads * model.head_dim
    sizes = {
        "self_attn.qkv_proj": [model.num_attention_heads * model.head_dim, kv_size, kv_size],
        "mlp.gate_up_proj": [model.intermediate_size] * 2,
    }
    for name, tensor in weights.items():
        if name.startswith(("markov_head.", "confidence_head.")):
            heads[name] = tensor.to(drafter.device, drafter.dtype)
            continue
        path, _, kind = name.rpartition(".")
        layer = re.fullmatch(r"layers\.(\d+)\.(.+)", path)
        owner: Any = drafter.layers[int(layer[1])] if layer else drafter
        inner = layer[2] if layer else path
        if inner in ("embed_tokens", "lm_head"):
            continue
        fused, place = FUSED.get(inner, (inner, None))
        view = getattr(attrgetter(fused)(owner), kind)
        (view if place is None else view.split(sizes[fused])[place]).copy_(tensor)
    return heads


def _is_same(own: Tensor, other: Tensor | None) -> bool:
    """A copy of the target's would cost its memory twice."""
    return other is not None and own.shape == other.shape and bool(torch.equal(own, other))
