"""Whether the tensors of a checkpoint are those that its config speaks of."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from .checkpoint import CheckpointError

Shapes = Mapping[str, tuple[int, ...]]


def check_tensor_shapes(
    weights: Mapping[str, Tensor], needed: Shapes, path: Path, what: str, optional: Shapes | None = None
) -> None:
    """Raises CheckpointError, which names missing, unknown and misshapen tensors of `what` in `path`."""
    known = {**needed, **(optional or {})}
    problems = [f"{name} is missing" for name in needed.keys() - weights.keys()]
    problems += [f"{name} is not part of {what}" for name in weights.keys() - known.keys()]
    problems += [
        f"{name} has shape {list(weights[name].shape)}, the config says {list(shape)}"
        for name, shape in known.items()
        if name in weights and tuple(weights[name].shape) != shape
    ]
    if problems:
        problems.sort()
        shown = "; ".join(problems[:5]) + (f"; and {len(problems) - 5} more" if len(problems) > 5 else "")
        raise CheckpointError(
            f"{path}: the tensors do not fit the config: {shown}. Use config and weights that were made together"
        )
