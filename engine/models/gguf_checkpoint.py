"""A GGUF file as a checkpoint: llama.cpp's tensor names and row order turned back into Hugging Face's."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .checkpoint import Checkpoint, CheckpointError
from .config import ModelConfig, ModelConfigError
from .gguf_file import GgufFile
from .registry import UnknownArchitectureError, get_architecture
from .rope import compute_inv_freq

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FREQS = "rope_freqs.weight"


class GgufCheckpoint(Checkpoint):
    """See :class:`Checkpoint`. ``metadata`` are the file's fields, from which the tokenizer is made too."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = GgufFile(path)
        self.metadata: dict[str, Any] = self._file.metadata
        if "token_embd.weight" not in self._file.tensors:
            raise CheckpointError(f"{path}: has no tensor 'token_embd.weight'. Choose a file that holds a whole model")
        try:
            self.config = self._config()
        except (ModelConfigError, UnknownArchitectureError) as error:
            raise type(error)(f"{path}: {error}") from None
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"{path}: a field of the header has a value that makes no sense ({error})") from None
        self._names = {name: hf_name(name) for name in self._file.tensors if name != _ROPE_FREQS}
        self.shapes = {hf: self._file.tensors[name].shape for name, hf in self._names.items()}

    def _config(self) -> ModelConfig:
        freqs = self._file.load(_ROPE_FREQS) if _ROPE_FREQS in self._file.tensors else None
        vocab_size = self._file.tensors["token_embd.weight"].shape[0]
        divisor = None if freqs is None else round(float(freqs.max()), 4)
        config = ModelConfig.from_gguf(self.metadata, frozenset(self._file.tensors), vocab_size, divisor)
        if freqs is not None:
            plain = compute_inv_freq(config.without_rope_scaling())[0]
            if freqs.shape != plain.shape or not torch.allclose(compute_inv_freq(config)[0] * freqs, plain, rtol=1e-3):
                raise ModelConfigError(
                    "its rope_freqs are not those of Llama 3's scaling from 8192 positions. "
                    "Use the safetensors checkpoint"
                )
        return config

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """See :meth:`Checkpoint.tensors`. All float32."""
        permuted = get_architecture(self.config.architecture).gguf_permutes_qk
        for name, hf in self._names.items():
            tensor = self._file.load(name)
            if permuted and ".q_proj." in hf:
                tensor = _unpermute(tensor, self.config.num_attention_heads)
            elif permuted and ".k_proj." in hf:
                tensor = _unpermute(tensor, self.config.num_key_value_heads)
            yield hf, tensor


def hf_name(name: str) -> str:
    """Hugging Face's name of a GGUF tensor; an unknown one is returned as it is."""
    stem, _, suffix = name.rpartition(".")
    if layer := re.fullmatch(r"blk\.(\d+)\.(\w+)", stem):
        inner = _LAYER.get(layer[2])
        return f"model.layers.{layer[1]}.{inner}.{suffix}" if inner else name
    return f"{_TOP[stem]}.{suffix}" if stem in _TOP else name


def _unpermute(tensor: Tensor, num_heads: int) -> Tensor:
    """Rows [head, pair, 2] of llama.cpp's interleaved RoPE back to [head, 2, pair]."""
    rows = tensor.view(num_heads, -1, 2, *tensor.shape[1:])
    return rows.transpose(1, 2).reshape(tensor.shape)
