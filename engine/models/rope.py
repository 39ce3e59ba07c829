"""Rotary position embeddings: the frequencies of each scaling kind, and the rotation itself."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from .config import ModelConfig, ModelConfigError, rope_kind


class RotaryEmbedding:
    """cos and sin of positions, in float32: computed for the tokens of a step, or as a table for kernels."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        inv_freq, self._attention_factor = compute_inv_freq(config)
        self._inv_freq = inv_freq.to(device)
        self._dtype = dtype
        self._num_positions = config.max_position_embeddings
        if device.type == "cuda":
            _ = self.cos_sin  # now, since it must not be made while a graph is captured

    @cached_property
    def cos_sin(self) -> Tensor:
        """f32 [max_position_embeddings, head_dim]: cosines of each position's angles, then their sines."""
        positions = torch.arange(self._num_positions, device=self._inv_freq.device)
        angles = positions.view(-1, 1) * self._inv_freq
        return torch.cat((angles.cos(), angles.sin()), dim=-1) * self._attention_factor

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and signed sin, each [t, 1, head_dim], of positions i64 [t]."""
        angles = positions.view(-1, 1, 1) * self._inv_freq
        cos, sin = angles.cos(), angles.sin()
        # The sign of rotate_half is folded into the second factor.
        cos, sin = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
        if self._attention_factor != 1.0:
            cos, sin = cos * self._attention_factor, sin * self._attention_factor
        return cos.to(self._dtype), sin.to(self._dtype)


def apply_rope_(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [t, heads, head_dim] in place by cos and signed sin [t, 1, head_dim]; returns x."""
    rotated = x.roll(x.shape[-1] // 2, dims=-1).mul_(sin)
    return x.mul_(cos).add_(rotated)


def compute_inv_freq(config: ModelConfig) -> tuple[Tensor, float]:
    """Inverse frequencies f32 [head_dim / 2] and the factor of cos and sin, by the config's scaling kind."""
    scaling = config.rope_scaling or {}
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    inv_freq = 1.0 / (config.rope_theta**exponents)
    try:
        match rope_kind(scaling):
            case "linear":
                return inv_freq / float(scaling["factor"]), 1.0
            case "llama3":
                return _llama3(inv_freq, scaling), 1.0
            case "yarn":
                return _yarn(inv_freq, config, scaling)
    except KeyError as error:
        raise ModelConfigError(f"rope_scaling of kind {rope_kind(scaling)!r} lacks the field {error}") from None
    return inv_freq, 1.0


def _llama3(inv_freq: Tensor, scaling: Mapping[str, Any]) -> Tensor:
    """Llama 3.1: long wavelengths are divided by the factor, short ones kept, those between interpolated."""
    factor, low, high = (float(scaling[k]) for k in ("factor", "low_freq_factor", "high_freq_factor"))
    original = float(scaling["original_max_position_embeddings"])
    turns = original * inv_freq / (2 * math.pi)
    smooth = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - smooth) * inv_freq / factor + smooth * inv_freq


def _yarn(inv_freq: Tensor, config: ModelConfig, scaling: Mapping[str, Any]) -> tuple[Tensor, float]:
    """YaRN: a ramp over the dimensions between keeping and dividing by the factor, and a temperature of attention."""
    dim, base = config.head_dim, config.rope_theta
    original = float(scaling.get("original_max_position_embeddings") or config.max_position_embeddings)
    factor = float(scaling["factor"])

    def dimension_of(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low = dimension_of(float(scaling.get("beta_fast") or 32))
    high = dimension_of(float(scaling.get("beta_slow") or 1))
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / max(high - low, 1e-3)).clamp(0.0, 1.0)
    return inv_freq / factor * ramp + inv_freq * (1 - ramp), _yarn_attention_factor(factor, scaling)


def _yarn_attention_factor(factor: float, scaling: Mapping[str, Any]) -> float:
    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])

    def magnitude(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    mscale, mscale_all_dim = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if mscale and mscale_all_dim:
        return magnitude(float(mscale)) / magnitude(float(mscale_all_dim))
    return magnitude(1.0)
