"""Filling a model: from a checkpoint, with every name and shape checked first, or with seeded random numbers."""

from __future__ import annotations

import re
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from .checkpoint import Checkpoint, CheckpointError
from .config import ModelConfig
from .decoder import CausalLM

FUSED = {
    "self_attn.q_proj": ("self_attn.qkv_proj", 0),
    "self_attn.k_proj": ("self_attn.qkv_proj", 1),
    "self_attn.v_proj": ("self_attn.qkv_proj", 2),
    "mlp.gate_proj": ("mlp.gate_up_proj", 0),
    "mlp.up_proj": ("mlp.gate_up_proj", 1),
}
"""Projections of a checkpoint that are rows of one weight here: name there -> (name here, place among the rows)."""

_IGNORED = re.compile(r".*rotary_emb\.inv_freq")


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a Hugging Face checkpoint of this config must have."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q_size = config.num_attention_heads * config.head_dim
    kv_size = config.num_key_value_heads * config.head_dim
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (q_size, hidden),
        "self_attn.k_proj.weight": (kv_size, hidden),
        "self_attn.v_proj.weight": (kv_size, hidden),
        "self_attn.o_proj.weight": (hidden, q_size),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    if config.attention_bias:
        sizes = {"q": q_size, "k": kv_size, "v": kv_size}
        layer |= {f"self_attn.{name}_proj.bias": (size,) for name, size in sizes.items()}
    if config.attention_output_bias:
        layer["self_attn.o_proj.bias"] = (hidden,)
    if config.qk_norm:
        layer |= {f"self_attn.{name}_norm.weight": (config.head_dim,) for name in "qk"}
    shapes = {f"model.layers.{i}.{name}": s for i in range(config.num_hidden_layers) for name, s in layer.items()}
    shapes |= {"model.embed_tokens.weight": (config.vocab_size, hidden), "model.norm.weight": (hidden,)}
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def weight_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of the weights that one forward pass reads: all of them, but of an untied embedding only single rows."""
    shapes = expected_shapes(config)
    if not config.tie_word_embeddings:
        del shapes["model.embed_tokens.weight"]
    return sum(torch.Size(shape).numel() for shape in shapes.values()) * dtype.itemsize


def check_shapes(checkpoint: Checkpoint) -> None:
    """Compare a checkpoint's header with its config. CheckpointError names what is missing, extra or mis-shaped."""
    expected = expected_shapes(checkpoint.config)
    found = {name: shape for name, shape in checkpoint.shapes.items() if not _ignored(name, checkpoint.config)}
    problems = [f"{name} is missing" for name in expected.keys() - found.keys()]
    problems += [f"{name} is not part of {checkpoint.config.architecture}" for name in found.keys() - expected.keys()]
    problems += [
        f"{name} has shape {list(found[name])}, the config says {list(shape)}"
        for name, shape in expected.items()
        if name in found and found[name] != shape
    ]
    if problems:
        problems.sort()
        shown = "; ".join(problems[:5]) + (f"; and {len(problems) - 5} more" if len(problems) > 5 else "")
        raise CheckpointError(
            f"{checkpoint.path}: the tensors do not fit the config: {shown}. "
            "Use the config and the weights of one model"
        )


def load_weights(model: CausalLM, checkpoint: Checkpoint) -> None:
    """Fill the model. Call check_shapes first: this function relies on it."""
    targets = weight_views(model)
    for name, tensor in checkpoint.tensors():
        if not _ignored(name, model.config):
            targets[name].copy_(tensor)


def weight_views(model: CausalLM) -> dict[str, Tensor]:
    """The model's weights under their Hugging Face names; parts of fused weights are views of their rows."""
    config = model.config
    q_size, kv_size = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    sizes = {"self_attn.qkv_proj": [q_size, kv_size, kv_size], "mlp.gate_up_proj": [config.intermediate_size] * 2}
    views: dict[str, Tensor] = {}
    for name in expected_shapes(config):
        path, _, kind = name.removeprefix("model.").rpartition(".")
        layer = re.fullmatch(r"layers\.(\d+)\.(.+)", path)
        owner: Any = model.layers[int(layer[1])] if layer else model
        inner = layer[2] if layer else path
        fused, place = FUSED.get(inner, (inner, None))
        weight = getattr(attrgetter(fused)(owner), kind)
        views[name] = weight if place is None else weight.split(sizes[fused])[place]
    return views


def init_dummy_weights(model: CausalLM, seed: int) -> None:
    """Random weights that are the same for the same seed on every device.

    Scaled so that a greedy choice is decided by far more than rounding and by the whole context: attention is
    peaked, and what the layers add outweighs the embedding of the last token, which tied embeddings would only repeat.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, view in weight_views(model).items():
        values = torch.randn(view.shape, generator=generator)
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            values.mul_(0.2).add_(2.0)
        elif name.endswith("norm.weight"):
            values.mul_(0.1).add_(1.0)
        elif name.endswith("bias"):
            values.mul_(0.5)
        else:
            scale = next((scale for part, scale in _DUMMY_SCALES.items() if part in name), 1.0)
            values.mul_(scale / view.shape[1] ** 0.5)
        view.copy_(values)


_DUMMY_SCALES = {"embed_tokens": 4.0, "lm_head": 4.0, "q_proj": 2.0, "k_proj": 2.0, "o_proj": 6.0, "down_proj": 6.0}


def _ignored(name: str, config: ModelConfig) -> bool:
    """Tensors that checkpoints carry and that say nothing new."""
    return bool(_IGNORED.fullmatch(name)) or (config.tie_word_embeddings and name == "lm_head.weight")
