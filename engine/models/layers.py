"""The layers of a decoder: linear, embedding, RMS norm.

Plain objects and not torch modules, since a step of a small model makes thousands of short calls and torch's module
machinery would be a tenth of it. Inference only: no gradients, and results may be in place.
"""

from __future__ import annotations

from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

_PACKED_ROWS_HINT = 32


class Linear:
    """x W^T + b, with W [out_features, in_features].

    On a CPU the weight may also be held in oneDNN's layout (see packing.py), which is faster for some numbers of rows.
    """

    def __init__(
        self, in_features: int, out_features: int, bias: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.bias = torch.empty(out_features, dtype=dtype, device=device) if bias else None
        self.set_weight(torch.empty((out_features, in_features), dtype=dtype, device=device))
        self.packed: Tensor | None = None
        self.packed_rows = range(0)

    def set_weight(self, weight: Tensor | None) -> None:
        """Use another plain weight, or none where the packed one is enough."""
        self.weight = weight
        self._weight_t = torch.empty(0) if weight is None else weight.t()

    def pack(self, rows: range, keep_plain: bool) -> None:
        """Hold the weight in oneDNN's layout too, used for ``rows`` rows; or only so, used always."""
        self.packed = torch.ops.mkldnn._reorder_linear_weight(self.weight, _PACKED_ROWS_HINT)
        self.packed_rows = rows
        if not keep_plain:
            self.set_weight(None)

    def __call__(self, x: Tensor) -> Tensor:
        """[t, in_features] -> [t, out_features]."""
        if self._use_packed(x):
            return torch.ops.mkldnn._linear_pointwise.default(x, self.packed, self.bias, "none", [], "")
        if self.bias is None:
            return torch.mm(x, self._weight_t)
        return torch.addmm(self.bias, x, self._weight_t)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual [t, out_features] plus the product, in one operation; residual may be overwritten."""
        if self._use_packed(x):
            return torch.ops.mkldnn._linear_pointwise.binary(x, residual, self.packed, self.bias, "add")
        if self.bias is not None:
            residual.add_(self.bias)
        return residual.addmm_(x, self._weight_t)

    def _use_packed(self, x: Tensor) -> bool:
        return self.packed is not None and (self.weight is None or x.shape[0] in self.packed_rows)


class Embedding:
    """Rows of a table, [vocab_size, hidden_size]."""

    def __init__(self, vocab_size: int, hidden_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.weight = torch.empty((vocab_size, hidden_size), dtype=dtype, device=device)

    def __call__(self, input_ids: Tensor) -> Tensor:
        """Ids i32 or i64 [t] -> [t, hidden_size], in memory of its own."""
        return self.weight.index_select(0, input_ids)


class RMSNorm:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, computed in float32."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        self.size, self.eps = size, eps
        self.weight = torch.empty(size, dtype=dtype, device=device)
        self._sqrt_sum_eps = torch.tensor((size * eps) ** 0.5, dtype=torch.float32, device=device)

    def __call__(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size], in memory of its own."""
        if x.is_cuda:
            return F.rms_norm(x, (self.size,), self.weight, self.eps)
        # F.rms_norm is a chain of many small operations on a CPU, which takes twice as long. This is the same as
        # x / sqrt(sum(x^2) + size * eps) * (weight * sqrt(size)).
        root = torch.linalg.vector_norm(x, 2, -1, True, dtype=torch.float32).hypot_(self._sqrt_sum_eps)
        return (x / root).mul_(self._scaled_weight).to(x.dtype)

    @cached_property
    def _scaled_weight(self) -> Tensor:
        """Made at the first use, when the weight has been loaded."""
        return self.weight.float() * self.size**0.5
