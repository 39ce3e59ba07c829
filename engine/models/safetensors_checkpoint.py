"""A directory with config.json and safetensors, in one file or sharded under an index."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from .checkpoint import Checkpoint, CheckpointError
from .config import ModelConfig, ModelConfigError
from .registry import UnknownArchitectureError

_INDEX = "model.safetensors.index.json"
_RETRY = "Delete the file and fetch it again"


class SafetensorsCheckpoint(Checkpoint):
    """See :class:`Checkpoint`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = read_config(path)
        self._files = _names_by_file(path)
        self.shapes = {}
        for file, names in self._files.items():
            self.shapes |= _shapes(file, names)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """See :meth:`Checkpoint.tensors`. In the type they are stored in."""
        for file, names in self._files.items():
            with safe_open(file, framework="pt") as opened:
                for name in names or opened.keys():
                    yield name, opened.get_tensor(name)


def read_config(path: Path) -> ModelConfig:
    """The ``config.json`` of a directory; its ``generation_config.json`` may add end-of-sequence ids."""
    config = dict(read_json(path / "config.json"))
    generation = path / "generation_config.json"
    if generation.is_file():
        extra = read_json(generation).get("eos_token_id")
        if extra is not None:
            config["eos_token_id"] = extra
    try:
        return ModelConfig.from_hf(config)
    except (ModelConfigError, UnknownArchitectureError) as error:
        raise type(error)(f"{path / 'config.json'}: {error}") from None
    except (TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path / 'config.json'}: a value makes no sense ({error})") from None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises CheckpointError where it is missing, damaged or not an object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"{path}: not valid JSON ({error}). {_RETRY}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: holds a JSON {type(value).__name__}, an object is wanted. {_RETRY}")
    return value


def _names_by_file(path: Path) -> dict[Path, list[str]]:
    """The weight files and the tensor names to take from each; an empty list means all."""
    if (path / _INDEX).is_file():
        weight_map = read_json(path / _INDEX).get("weight_map")
        if not isinstance(weight_map, dict):
            raise CheckpointError(f"{path / _INDEX}: has no 'weight_map'. {_RETRY}")
        files: dict[Path, list[str]] = {}
        for name, file in weight_map.items():
            # Only the name: an index must not lead out of its directory.
            files.setdefault(path / Path(str(file)).name, []).append(name)
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise CheckpointError(f"{path}: the index names files that are not there: {', '.join(missing)}. Fetch them")
        return files
    found = sorted(path.glob("*.safetensors"))
    if not found:
        raise CheckpointError(
            f"{path}: has config.json but no *.safetensors. Fetch the weights, "
            "or use load_format='dummy' for random ones"
        )
    return {file: [] for file in found}


def _shapes(file: Path, names: list[str]) -> dict[str, tuple[int, ...]]:
    try:
        with safe_open(file, framework="pt") as opened:
            present = set(opened.keys())
            absent = [name for name in names if name not in present]
            if absent:
                raise CheckpointError(f"{file}: lacks the tensor {absent[0]!r} that the index places there. {_RETRY}")
            return {name: tuple(opened.get_slice(name).get_shape()) for name in names or present}
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file}: damaged or cut off ({error}). {_RETRY}") from error
