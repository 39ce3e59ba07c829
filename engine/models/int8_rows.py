"""Matrices stored as int8 with a factor for each row: half the bytes of bfloat16, for small heads that are shipped."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from .checkpoint import CheckpointError

_FACTORS = ".row_factors"
"""Follows the name of a matrix that is stored as int8: f32 [rows], what its rows are multiplied with."""


def stored(weights: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """What is written to disk for ``weights``, on the host.

    With int8 matrices are rounded, row by row, to 127ths of their largest element, and vectors become bfloat16.
    """
    tensors: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        plain = tensor.detach().cpu()
        if dtype != torch.int8:
            tensors[name] = plain.to(dtype).contiguous()
        elif plain.dim() == 1:
            tensors[name] = plain.to(torch.bfloat16)
        else:
            factors = plain.float().abs().amax(1) / 127
            tensors[name + _FACTORS] = factors
            tensors[name] = (plain.float() / factors.clamp(min=1e-30).unsqueeze(1)).round().to(torch.int8)
    return tensors


def restored(tensors: Mapping[str, Tensor], path: Path) -> dict[str, Tensor]:
    """What `stored` was given, f32 where it was int8. Raises CheckpointError if factors are missing or misshapen."""
    plain: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name.endswith(_FACTORS):
            continue
        if tensor.dtype == torch.int8:
            factors = tensors.get(name + _FACTORS)
            if factors is None or tensor.dim() != 2 or factors.shape != tensor.shape[:1]:
                raise CheckpointError(
                    f"{path}: {name} is int8 without the row factors that belong to it. Fetch the draft again"
                )
            tensor = tensor.float() * factors.unsqueeze(1)
        plain[name] = tensor
    return plain


def computed_dtype(dtype: torch.dtype) -> str:
    """What ``config.json`` gives as the dtype of weights stored as ``dtype``."""
    return str(torch.bfloat16 if dtype == torch.int8 else dtype).removeprefix("torch.")
