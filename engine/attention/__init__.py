"""Attention over a paged KV cache: the metadata of a step, the backends, and the cache's memory."""

from __future__ import annotations

import torch
from torch import Tensor

from ..models.config import ModelConfig
from .backend import AttentionBackend
from .metadata import AttentionMetadata
from .torch_backend import TorchAttention

__all__ = [
    "AttentionBackend",
    "AttentionMetadata",
    "TorchAttention",
    "allocate_kv_cache",
    "kv_bytes_per_token",
]


def allocate_kv_cache(
    config: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Zeroed cache of all layers, [num_layers, 2 (K, V), num_blocks, block_size, num_kv_heads, head_dim].

    Zeros rather than raw memory: a masked slot is multiplied by a weight of zero, and zero times NaN is NaN.
    """
    shape = (config.num_hidden_layers, 2, num_blocks, block_size, config.num_key_value_heads, config.head_dim)
    return torch.zeros(shape, dtype=dtype, device=device)


def kv_bytes_per_token(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of cache that one token takes over all layers, K and V."""
    return 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * dtype.itemsize
