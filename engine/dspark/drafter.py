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
import torch.nn.functional as F
from torch import Tensor

from kernels.draft_inputs import DraftInputs

from ..attention import allocate_kv_cache
from ..models.decoder import CausalLM, DecoderLayer
from ..models.layers import Embedding, Linear, RMSNorm
from ..models.rope import RotaryEmbedding
from ..models.weights import FUSED
from .attention import BlockAttention, store_context
from .checkpoint import Weights
from .config import DSparkConfig
from .heads import confidence_logits, markov_bias, markov_embedding, markov_latent

ComputeLogits = Callable[[Tensor], Tensor]
Draw = Callable[[int, Tensor, Tensor], Tensor]
"""A draft's token ids i64 [r] from (its number, logits f32 [r, V] that may be changed, i64 [r] where it will stand)."""


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
        self.layers = [DecoderLayer(model, dtype, device) for _ in range(model.num_hidden_layers)]
        self.fc = Linear(len(config.target_layer_ids) * model.hidden_size, model.hidden_size, False, dtype, device)
        self.hidden_norm = RMSNorm(model.hidden_size, model.rms_norm_eps, dtype, device)
        self.norm = RMSNorm(model.hidden_size, model.rms_norm_eps, dtype, device)
        self.rotary_emb = RotaryEmbedding(model, dtype, device)
        self.heads: Weights = {}
        _fill(self, weights)
        self._context_kv = self._fuse_context_projections()
        self.embed_tokens, self.compute_logits = _shared(weights, target)
        self.attention = BlockAttention(
            model.num_attention_heads, model.num_key_value_heads, model.head_dim, device, form
        )

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
        model, t = self.config.model, hidden.shape[0]
        x = self.hidden_norm(self.fc(hidden))
        kv = self._context_kv(x).view(t, 2, model.num_hidden_layers, model.num_key_value_heads, model.head_dim)
        keys, values = kv.unbind(1)
        root = torch.rsqrt(keys.float().square().mean(-1, keepdim=True) + model.rms_norm_eps)
        keys = (keys.float() * root * self._context_k_norm).to(self.dtype)
        cos, sin = self.rotary_emb(positions)
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        keys = keys * cos + keys.roll(model.head_dim // 2, dims=-1) * sin
        store_context(keys, values, slot_mapping, kv_cache)

    @torch.inference_mode()
    def backbone(self, inputs: DraftInputs, block_table: Tensor, kv_cache: Tensor, max_seq_len: int) -> Tensor:
        """Hidden states after the last norm, [r, Q, d], of the blocks that ``inputs`` describes.

        Args:
            inputs: cut to r requests (see kernels.draft_inputs); their keys and values go to its slots.
            block_table: i32 [r, B], gathered.
            max_seq_len: an upper bound of inputs.seq_lens, Q counted.
        """
        r, query = inputs.seq_lens.shape[0], self.config.block_size
        x = self.embed_tokens(inputs.input_ids)
        rope = self.rotary_emb(inputs.positions)
        plan = self.attention.prepare(inputs.slot_mapping, inputs.seq_lens, block_table, max_seq_len)
        attend = partial(self.attention.forward, plan)
        for layer, cache in zip(self.layers, kv_cache.unbind(0), strict=True):
            x = layer(x, rope, attend, cache)
        return self.norm(x).view(r, query, -1)

    @torch.inference_mode()
    def propose(self, hidden: Tensor, anchors: Tensor, positions: Tensor, k: int, draw: Draw | None = None) -> Drafts:
        """The sequential part: k drafts for each block, each with the bias that the token before it gives.

        Args:
            hidden: [r, Q, d], of `backbone`.
            anchors: i64 [r], token ids.
            positions: i64 [r, Q], of the block: draft i will stand at positions[:, i] + 1.
            k: 1 to block_size; fewer are the first k of the whole block's.
            draw: None for the most likely tokens.
        """
        r = hidden.shape[0]
        base = self.compute_logits(hidden[:, :k].reshape(r * k, -1)).view(r, k, -1)
        previous, state = anchors, None
        tokens, confidences = [], []
        for i in range(k):
            h, e, row = hidden[:, i], None, base[:, i]
            if self.config.markov_rank:
                e = markov_embedding(self.heads, previous)
                latent, state = markov_latent(self.config, self.heads, e, h, state)
                row = row + markov_bias(self.heads, latent)
            if self.config.enable_confidence_head:
                confidences.append(confidence_logits(self.config, self.heads, h, e).float())
            previous = row.argmax(-1) if draw is None else draw(i, row.contiguous(), positions[:, i] + 1)
            tokens.append(previous)
        return Drafts(torch.stack(tokens, 1), torch.stack(confidences, 1) if confidences else None)

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
        # [layers, 1, D] f32
        self._context_k_norm = torch.stack([norm.weight.float() for norm in norms if norm is not None]).unsqueeze(1)
        return fused


def _fill(drafter: DSparkDrafter, weights: Weights) -> None:
    model = drafter.config.model
    kv_size = model.num_key_value_heads * model.head_dim
    sizes = {
        "self_attn.qkv_proj": [model.num_attention_heads * model.head_dim, kv_size, kv_size],
        "mlp.gate_up_proj": [model.intermediate_size] * 2,
    }
    for name, tensor in weights.items():
        if name.startswith(("markov_head.", "confidence_head.")):
            drafter.heads[name] = tensor.to(drafter.device, drafter.dtype)
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


def _shared(weights: Weights, target: CausalLM) -> tuple[Embedding, ComputeLogits]:
    """Embedding and output head: the draft's own, or else the target's."""
    dtype, device = target.dtype, target.device
    embedding, head = target.embed_tokens, weights.get("lm_head.weight")
    if "embed_tokens.weight" in weights:
        embedding = Embedding(1, 1, dtype, device)
        embedding.weight = weights["embed_tokens.weight"].to(device, dtype)
    if head is None:
        return embedding, target.compute_logits
    own = head.to(device, dtype)
    if _is_same(own, target.lm_head.weight):
        return embedding, target.compute_logits
    return embedding, lambda hidden: F.linear(hidden, own).float()


def _is_same(own: Tensor, other: Tensor | None) -> bool:
    """A copy of the target's would cost its memory twice."""
    return other is not None and own.shape == other.shape and bool(torch.equal(own, other))
