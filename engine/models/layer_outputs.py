"""The outputs of some layers of a step, for whoever listens to the model from inside."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class LayerOutputs:
    """A buffer that `CausalLM.forward` fills: its address never changes, so that a captured step may write it.

    Args:
        layer_ids: which layers; -1 is the embedding's output.
    """

    def __init__(
        self, layer_ids: Sequence[int], hidden_size: int, max_tokens: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._place = {layer: i * hidden_size for i, layer in enumerate(layer_ids)}
        self._hidden_size = hidden_size
        self.states = torch.zeros(max_tokens, len(self._place) * hidden_size, dtype=dtype, device=device)
        """[T, n * d]: the layers' outputs side by side, of the last step's tokens."""

    def place(self, layer: int, num_rows: int) -> Tensor | None:
        """[num_rows, d], where the output of ``layer`` is kept; None if it isn't one of them."""
        begin = self._place.get(layer)
        return None if begin is None else self.states[:num_rows, begin : begin + self._hidden_size]

    def record(self, layer: int, residual: Tensor, branch: Tensor | None = None) -> None:
        """Keep the output of ``layer``, residual [t, d] plus a branch that isn't added yet, if it is one of them."""
        kept = self.place(layer, residual.shape[0])
        if kept is None:
            return
        if branch is None:
            kept.copy_(residual)
        else:
            torch.add(residual, branch, out=kept)
