"""One interface over the formats of a model: its config, its tensors' shapes, and the tensors one by one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path

from torch import Tensor

from .config import ModelConfig


class CheckpointError(ValueError):
    """A checkpoint that is damaged or incomplete; names the file, what is wrong and what to do."""


class Checkpoint(ABC):
    """A model on disk. Making one reads the headers only, and fails there if the files are damaged.

    Attributes:
        path: the file or the directory.
        config: shape of the model.
        shapes: of every tensor, under its Hugging Face name.
    """

    path: Path
    config: ModelConfig
    shapes: Mapping[str, tuple[int, ...]]

    @abstractmethod
    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor under its Hugging Face name, dequantised to float32 or as stored, one at a time."""


def read_checkpoint(path: str | Path) -> Checkpoint:
    """Open a GGUF file, or a directory with ``config.json`` and safetensors or with one GGUF file.

    Raises:
        CheckpointError: nothing there that can be read, or damaged.
    """
    from .gguf_checkpoint import GgufCheckpoint
    from .safetensors_checkpoint import SafetensorsCheckpoint

    path = Path(path)
    if path.is_file():
        if path.suffix == ".gguf":
            return GgufCheckpoint(path)
        raise CheckpointError(
            f"{path}: not a checkpoint this engine reads. Give a .gguf file, or the directory that holds config.json"
        )
    if (path / "config.json").is_file():
        return SafetensorsCheckpoint(path)
    found = sorted(path.glob("*.gguf"))
    if len(found) == 1:
        return GgufCheckpoint(found[0])
    if found:
        names = ", ".join(p.name for p in found)
        raise CheckpointError(f"{path}: holds several GGUF files ({names}). Give the path of one of them")
    if not path.exists():
        raise CheckpointError(f"{path}: no such file or directory. Check the path")
    raise CheckpointError(f"{path}: holds neither config.json with *.safetensors nor a .gguf file. Check the path")
