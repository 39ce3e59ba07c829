"""A draft on disk: ``config.json`` and safetensors, under the tensor names of the published checkpoints.

Embeddings and output head may be left out, and are the target's then. They are most of a small draft's bytes, and
training freezes them anyway. A matrix may also be stored as int8, with a factor for each row beside it: half the bytes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..models.checkpoint import CheckpointError
from ..models.int8_rows import computed_dtype, restored, stored
from ..models.tensor_shapes import check_tensor_shapes
from .config import DSparkConfig, read_draft_config

Weights = dict[str, Tensor]
"""A draft's tensors under their names on disk."""

SHARED = ("embed_tokens.weight", "lm_head.weight")
"""The target's own where a checkpoint has none."""


def expected_shapes(config: DSparkConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a draft, apart from the `SHARED` ones."""
    model, rank = config.model, config.markov_rank
    d, inner = model.hidden_size, model.intermediate_size
    q_size, kv_size = model.num_attention_heads * model.head_dim, model.num_key_value_heads * model.head_dim
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (d,),
        "post_attention_layernorm.weight": (d,),
        "self_attn.q_proj.weight": (q_size, d),
        "self_attn.k_proj.weight": (kv_size, d),
        "self_attn.v_proj.weight": (kv_size, d),
        "self_attn.o_proj.weight": (d, q_size),
        "self_attn.q_norm.weight": (model.head_dim,),
        "self_attn.k_norm.weight": (model.head_dim,),
        "mlp.gate_proj.weight": (inner, d),
        "mlp.up_proj.weight": (inner, d),
        "mlp.down_proj.weight": (d, inner),
    }
    if model.attention_bias:
        sizes = {"q": q_size, "k": kv_size, "v": kv_size, "o": d}
        layer |= {f"self_attn.{name}_proj.bias": (size,) for name, size in sizes.items()}
    shapes = {f"layers.{i}.{name}": s for i in range(model.num_hidden_layers) for name, s in layer.items()}
    shapes |= {
        "fc.weight": (d, len(config.target_layer_ids) * d),
        "hidden_norm.weight": (d,),
        "norm.weight": (d,),
    }
    if rank:
        shapes |= {
            "markov_head.markov_w1.weight": (model.vocab_size, rank),
            "markov_head.markov_w2.weight": (model.vocab_size, rank),
        }
        if config.markov_head_type == "gated":
            shapes |= {"markov_head.gate_proj.weight": (rank, d + rank), "markov_head.gate_proj.bias": (rank,)}
        if config.markov_head_type == "rnn":
            shapes |= {
                "markov_head.joint_proj.weight": (3 * rank, 2 * rank + d),
                "markov_head.joint_proj.bias": (3 * rank,),
            }
    if config.enable_confidence_head:
        shapes |= {"confidence_head.proj.weight": (1, config.confidence_width), "confidence_head.proj.bias": (1,)}
    return shapes


def read_draft(path: str | Path) -> tuple[DSparkConfig, Weights]:
    """Config and tensors, as stored or f32 where that is int8, of the draft in the directory ``path``.

    Raises:
        DraftConfigError: the config is missing or not a draft's.
        CheckpointError: a file is damaged, or its tensors don't fit the config; names them.
    """
    path = Path(path)
    config = read_draft_config(path)
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{path}: has config.json but no *.safetensors. Fetch the draft's weights")
    weights: Weights = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - it's a method of the file, which is no mapping
                    weights[name.removeprefix("model.")] = opened.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file}: damaged or cut off ({error}). Fetch the file again") from error
    weights = restored(weights, path)
    check_shapes(config, weights, path)
    return config, weights


def check_shapes(config: DSparkConfig, weights: Mapping[str, Tensor], path: Path) -> None:
    """Raise CheckpointError, which names missing, unknown and misshapen tensors, unless they fit ``config``."""
    table = (config.model.vocab_size, config.model.hidden_size)
    what = f"a {config.markov_head_type} draft"
    check_tensor_shapes(weights, expected_shapes(config), path, what, dict.fromkeys(SHARED, table))


def init_weights(config: DSparkConfig, seed: int) -> Weights:
    """Random f32 weights to train from, the same for a seed everywhere.

    The Markov head's second factor starts at zero, and so does the confidence: the untrained draft is its backbone.
    """
    generator = torch.Generator().manual_seed(seed)
    weights: Weights = {}
    for name, shape in expected_shapes(config).items():
        if name.endswith("norm.weight"):
            weights[name] = torch.ones(shape)
        elif name.endswith("bias") or "markov_w2" in name or "confidence_head" in name:
            weights[name] = torch.zeros(shape)
        else:
            fan_in = shape[-1]
            # What is added to the residual starts small, so that depth doesn't decide the scale.
            scale = 0.3 if "o_proj" in name or "down_proj" in name else 1.0
            weights[name] = torch.randn(shape, generator=generator).mul_(scale / fan_in**0.5)
    return weights


def write_draft(path: Path, config: DSparkConfig, weights: Mapping[str, Tensor], dtype: torch.dtype) -> None:
    """Write ``config.json`` and ``model.safetensors``; an interrupted write leaves what was there before. int8: see
    models/int8_rows.py."""
    check_shapes(config, weights, path)
    path.mkdir(parents=True, exist_ok=True)
    save_file(stored(weights, dtype), path / "model.safetensors.part", metadata={"format": "pt"})
    os.replace(path / "model.safetensors.part", path / "model.safetensors")
    text = json.dumps({**config.to_hf(), "dtype": computed_dtype(dtype)}, indent=2)
    (path / "config.json").write_text(text + "\n", encoding="utf-8")
