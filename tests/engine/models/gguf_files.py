"""Small GGUF files, written with the gguf package from transformers models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    stem, _, suffix = name.removeprefix("model.").rpartition(".")
    if stem.startswith("layers."):
        _, index, inner = stem.split(".", 2)
        return f"blk.{index}.{NAMES[inner]}.{suffix}"
    return f"{ {'embed_tokens': 'token_embd', 'norm': 'output_norm', 'lm_head': 'output'}[stem] }.{suffix}"


def permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to the q and k rows of Llama models."""
    rows = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return rows.swapaxes(1, 2).reshape(weight.shape)


def quantize(values: np.ndarray, kind: str) -> np.ndarray:
    """Blocks of the type. The K types have no quantiser in Python: their blocks are random but well-formed."""
    if not kind.endswith("_K"):
        return gguf.quantize(values, gguf.GGMLQuantizationType[kind])
    per_block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (values.size // per_block, size), dtype=np.uint8)
    scale = np.full((len(blocks), 1), 0.002, dtype=np.float16).view(np.uint8)
    if kind == "Q4_K":  # d and dmin lead
        blocks[:, 0:2], blocks[:, 2:4] = scale, scale
    else:  # Q6_K: d is last
        blocks[:, -2:] = scale
    return blocks.reshape(*values.shape[:-1], -1)


def write_gguf(
    path: Path,
    model: Any,
    kind: str = "F32",
    drop: str | None = None,
    tensors: dict[str, np.ndarray] | None = None,
    fields: dict[str, Any] | None = None,
) -> Path:
    """``model`` as a GGUF file: matrices of type ``kind``, vectors F32; without ``drop``, with extra tensors."""
    config = model.config
    arch = config.model_type
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(float(config.rope_parameters["rope_theta"]))
    for name, value in (fields or {}).items():
        {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}[type(value)](name, value)
    for name, tensor in model.state_dict().items():
        if gguf_name(name) == drop or (name == "lm_head.weight" and config.tie_word_embeddings):
            continue
        values = tensor.detach().float().numpy()
        if arch == "llama" and ".q_proj." in name:
            values = permute(values, config.num_attention_heads)
        if arch == "llama" and ".k_proj." in name:
            values = permute(values, config.num_key_value_heads)
        if values.ndim == 2 and kind != "F32":
            dtype = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(gguf_name(name), quantize(np.ascontiguousarray(values), kind), raw_dtype=dtype)
        else:
            writer.add_tensor(gguf_name(name), np.ascontiguousarray(values))
    for name, values in (tensors or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def fill(reference: torch.nn.Module, tensors: Any) -> None:
    """Give a transformers model the weights of a checkpoint."""
    missing, unexpected = reference.load_state_dict(dict(tensors), strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    reference.tie_weights()
