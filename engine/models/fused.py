"""The decoder's step in few launches: what a GPU runs instead of decoder.py's operations layer by layer.

The result is the same up to rounding. Up to max_rows rows a layer is five launches: attention, and each projection
with the norm before it and the gate or the residual after it; beyond, projections are torch's and what stands between
them is one kernel each.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from kernels import HeadRotation, add_rms_norm, embedding, max_rows, silu_mul, small_linear
from kernels.triton_support import TRITON_IMPORT_ERROR

from ..attention.metadata import AttentionMetadata
from ..attention.triton_backend import TritonAttention
from .layer_outputs import LayerOutputs
from .layers import Linear, RMSNorm
from .rope import RotaryEmbedding

if TYPE_CHECKING:
    from .decoder import CausalLM, DecoderLayer

Attend = Callable[[Tensor, Tensor, HeadRotation, bool], Tensor]
"""The backend's forward for this step: (qkv, the layer's kv_cache, rotation, start_early) -> attention output."""


MAX_HEAD_ROWS = 8
"""Rows up to which small_linear is the faster one for an output head."""


class Stack(Protocol):
    """Decoder layers and the norm behind them: a model's, or a drafter's."""

    layers: list[DecoderLayer]
    norm: RMSNorm
    rotary_emb: RotaryEmbedding


def can_fuse(device: torch.device) -> bool:
    """Whether the kernels run here at more than an interpreter's speed."""
    return device.type == "cuda" and TRITON_IMPORT_ERROR is None


def fused_forward(
    model: CausalLM,
    attention: TritonAttention,
    input_ids: Tensor,
    positions: Tensor,
    metadata: AttentionMetadata,
    kv_cache: Tensor,
    layer_outputs: LayerOutputs | None = None,
) -> Tensor:
    """As :meth:`engine.models.decoder.CausalLM.forward`; may be captured in a CUDA graph."""
    plan = attention.prepare(metadata, kv_cache)

    residual = embedding(input_ids, model.embed_tokens.weight, form=attention.form)
    attend = partial(attention.forward, plan)
    return fused_layers(model, residual, positions, attend, kv_cache, attention.form, layer_outputs)


def fused_layers(
    model: Stack,
    residual: Tensor,
    positions: Tensor,
    attend: Attend,
    kv_cache: Tensor,
    form: str,
    layer_outputs: LayerOutputs | None = None,
    few: bool | None = None,
) -> Tensor:
    """The layers and the last norm over residual [t, hidden], which is overwritten; kv_cache has one for each layer.

    `few`: by small_linear instead of torch's products; None is whichever is the faster one.
    """
    branch = None
    if layer_outputs is not None:
        layer_outputs.record(-1, residual)
    if few is None:
        few = residual.shape[0] <= max_rows(residual, residual.shape[1])
    for i, (layer, cache) in enumerate(zip(model.layers, kv_cache.unbind(0), strict=True)):
        rotation = _rotation(layer, model, positions)
        if few:
            kept = None if layer_outputs is None else layer_outputs.place(i, residual.shape[0])
            _few_rows(layer, residual, cache, rotation, attend, form, kept)
            continue
        branch = _many_rows(layer, branch, residual, cache, rotation, attend, form)
        if layer_outputs is not None:
            layer_outputs.record(i, residual, branch)
    return add_rms_norm(branch, residual, model.norm.weight, model.norm.eps, form=form)


def fused_logits(model: CausalLM, hidden: Tensor, form: str) -> Tensor:
    """As :meth:`engine.models.decoder.CausalLM.compute_logits`, with the sums left in float32."""
    return head_logits(_weight(model.lm_head), hidden, form)


def head_logits(weight: Tensor, hidden: Tensor, form: str) -> Tensor:
    """Logits f32 [l, V] of hidden states [l, hidden] by an output head's weight [V, hidden]."""
    if hidden.shape[0] <= min(MAX_HEAD_ROWS, max_rows(hidden, hidden.shape[1])):
        return small_linear(hidden, weight, out_dtype=torch.float32, form=form)
    if hidden.is_cuda and hidden.dtype != torch.float32:
        return torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    return torch.mm(hidden, weight.t()).float()


def _weight(linear: Linear) -> Tensor:
    if linear.weight is None:
        raise ValueError("this projection is packed for a CPU alone: the fused step needs its plain weight")
    return linear.weight


def _rotation(layer: DecoderLayer, model: Stack, positions: Tensor) -> HeadRotation:
    q_norm, k_norm = layer.self_attn.q_norm, layer.self_attn.k_norm
    cos_sin = model.rotary_emb.cos_sin
    if q_norm is None or k_norm is None:
        return HeadRotation(positions, cos_sin)
    return HeadRotation(positions, cos_sin, q_norm.weight, k_norm.weight, q_norm.eps)


def _few_rows(
    layer: DecoderLayer, residual: Tensor, cache: Tensor, rotation: HeadRotation, attend: Attend, form: str,
    kept: Tensor | None,
) -> None:  # fmt: skip
    """Add both branches of a layer to residual [t, hidden] in place; what comes out is also put into `kept`."""
    attn, mlp = layer.self_attn, layer.mlp
    norm = layer.input_layernorm
    qkv = small_linear(
        residual, _weight(attn.qkv_proj), norm_weight=norm.weight, eps=norm.eps, bias=attn.qkv_proj.bias, form=form
    )
    out = attend(qkv, cache, rotation, True)
    small_linear(out, _weight(attn.o_proj), bias=attn.o_proj.bias, residual=residual, form=form)
    norm = layer.post_attention_layernorm
    gated = small_linear(
        residual, _weight(mlp.gate_up_proj), norm_weight=norm.weight, eps=norm.eps, gated=True, form=form
    )
    small_linear(gated, _weight(mlp.down_proj), residual=residual, copy=kept, form=form)


def _many_rows(
    layer: DecoderLayer,
    branch: Tensor | None,
    residual: Tensor,
    cache: Tensor,
    rotation: HeadRotation,
    attend: Attend,
    form: str,
) -> Tensor:
    """Add `branch`, then the attention branch to residual [t, hidden] in place; returns the branch of the MLP."""
    attn, mlp = layer.self_attn, layer.mlp
    norm = layer.input_layernorm
    x = add_rms_norm(branch, residual, norm.weight, norm.eps, form=form)
    # Beside torch's projections an early start only takes room from them.
    branch = attn.o_proj(attend(attn.qkv_proj(x), cache, rotation, False))
    norm = layer.post_attention_layernorm
    x = add_rms_norm(branch, residual, norm.weight, norm.eps, form=form)
    return mlp.down_proj(silu_mul(mlp.gate_up_proj(x), form=form))
