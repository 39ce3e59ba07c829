"""The seam between the model and attention's kernels: a backend prepares a step once and then serves every layer."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from .metadata import AttentionMetadata


class AttentionBackend(Protocol):
    """Causal grouped-query attention over a paged KV cache.

    Symbols: t tokens, Hq query heads, Hk KV heads, D head_dim.
    """

    def prepare(self, metadata: AttentionMetadata, kv_cache: Tensor) -> Any:
        """What all layers of a step share (gather indices, masks), without a host read of a device tensor.

        kv_cache is that of all layers, [num_layers, 2, num_blocks, block_size, Hk, D].
        """

    def forward(self, plan: Any, qkv: Tensor, kv_cache: Tensor) -> Tensor:
        """Store K and V of this step's tokens in their slots, then attend.

        Args:
            plan: what ``prepare`` returned for this step.
            qkv: [t, (Hq + 2 Hk) * D], rotated, rows contiguous. Rows beyond ``num_tokens`` are padding.
            kv_cache: [2, num_blocks, block_size, Hk, D] of one layer, changed in place.

        Returns:
            [t, Hq * D]; padding rows are finite and mean nothing.
        """

    def finish(self, plan: Any, kv_cache: Tensor) -> None:
        """After the last layer of a step; kv_cache as in ``prepare``."""
