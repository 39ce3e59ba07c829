"""The decoder of the Llama, Qwen2 and Qwen3 families over a paged KV cache.

One class serves all: the families differ in the biases of q, k and v and in the norms of q and k (see registry.py).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ..attention.backend import AttentionBackend
from ..attention.metadata import AttentionMetadata
from ..attention.torch_backend import TorchAttention
from ..attention.triton_backend import TritonAttention
from .config import ModelConfig
from .fused import can_fuse, fused_forward, fused_logits
from .layer_outputs import LayerOutputs
from .layers import Embedding, Linear, RMSNorm
from .rope import RotaryEmbedding, apply_rope_

Rope = tuple[Tensor, Tensor]
Attend = Callable[[Tensor, Tensor], Tensor]
"""The backend's forward for this step: (qkv, the layer's kv_cache) -> attention output."""


class Attention:
    """Fused q, k, v projection, optional norms of q and k, RoPE, paged attention, output projection."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = config.head_dim
        self.qk_split = (heads, kv_heads)
        self.qkv_split = (heads + kv_heads, kv_heads)
        qkv_size = (heads + 2 * kv_heads) * self.head_dim
        self.qkv_proj = Linear(config.hidden_size, qkv_size, config.attention_bias, dtype, device)
        self.o_proj = Linear(heads * self.head_dim, config.hidden_size, config.attention_output_bias, dtype, device)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps, dtype, device) if config.qk_norm else None
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps, dtype, device) if config.qk_norm else None

    def __call__(self, x: Tensor, residual: Tensor, rope: Rope, attend: Attend, kv_cache: Tensor) -> Tensor:
        """x [t, hidden], normalised; returns residual [t, hidden] plus the branch."""
        qkv = self.qkv_proj(x)
        qk, _ = qkv.view(x.shape[0], -1, self.head_dim).split(self.qkv_split, 1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = qk.split(self.qk_split, 1)
            q.copy_(self.q_norm(q))
            k.copy_(self.k_norm(k))
        apply_rope_(qk, *rope)
        return self.o_proj.add_to(residual, attend(qkv, kv_cache))


class MLP:
    """down(silu(gate(x)) * up(x)), gate and up in one product."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        self.gate_up_proj = Linear(config.hidden_size, 2 * config.intermediate_size, False, dtype, device)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, False, dtype, device)

    def __call__(self, x: Tensor, residual: Tensor) -> Tensor:
        """x [t, hidden], normalised; returns residual [t, hidden] plus the branch."""
        gate, up = self.gate_up_proj(x).chunk(2, -1)
        return self.down_proj.add_to(residual, F.silu(gate).mul_(up))


class DecoderLayer:
    """One pre-norm block of attention and MLP."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype, device)
        self.self_attn = Attention(config, dtype, device)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype, device)
        self.mlp = MLP(config, dtype, device)

    def __call__(self, x: Tensor, rope: Rope, attend: Attend, kv_cache: Tensor) -> Tensor:
        """x [t, hidden] plus both branches; x may be overwritten."""
        x = self.self_attn(self.input_layernorm(x), x, rope, attend, kv_cache)
        return self.mlp(self.post_attention_layernorm(x), x)


class CausalLM:
    """A decoder-only language model. Weights are uninitialised until weights.py fills them."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        self.config, self.dtype, self.device = config, dtype, device
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype, device)
        self.layers = [DecoderLayer(config, dtype, device) for _ in range(config.num_hidden_layers)]
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype, device)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, False, dtype, device)
        if config.tie_word_embeddings:
            self.lm_head.set_weight(self.embed_tokens.weight)
        self.rotary_emb = RotaryEmbedding(config, dtype, device)
        heads = (config.num_attention_heads, config.num_key_value_heads, config.head_dim)
        self.attention: AttentionBackend = TorchAttention(*heads, dtype)
        self.triton_attention = TritonAttention(*heads, device) if can_fuse(device) else None
        """Where there is one, a step runs through fused.py; set it to None to run layer by layer."""

    @torch.inference_mode()
    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        metadata: AttentionMetadata,
        kv_cache: Tensor,
        layer_outputs: LayerOutputs | None = None,
    ) -> Tensor:
        """One step over a flat batch of tokens; no device tensor is read on the host.

        Args:
            input_ids: i32 [t], t = metadata.num_tokens_padded.
            positions: i64 [t].
            metadata: the step's requests.
            kv_cache: [num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim], changed in place.
            layer_outputs: filled, where given.

        Returns:
            Hidden states after the last norm, [t, hidden_size], in the model's dtype.
        """
        if self.triton_attention is not None:
            return fused_forward(self, self.triton_attention, input_ids, positions, metadata, kv_cache, layer_outputs)
        x = self.embed_tokens(input_ids)
        rope = self.rotary_emb(positions)
        plan = self.attention.prepare(metadata, kv_cache)
        attend = partial(self.attention.forward, plan)
        if layer_outputs is not None:
            layer_outputs.record(-1, x)
        for i, (layer, cache) in enumerate(zip(self.layers, kv_cache.unbind(0), strict=True)):
            x = layer(x, rope, attend, cache)
            if layer_outputs is not None:
                layer_outputs.record(i, x)
        self.attention.finish(plan, kv_cache)
        return self.norm(x)

    __call__ = forward

    @torch.inference_mode()
    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Logits f32 [l, vocab_size] of hidden states [l, hidden_size]."""
        if self.triton_attention is not None:
            return fused_logits(self, hidden, self.triton_attention.form)
        return self.lm_head(hidden).float()
