"""Reading a GGUF file: header, metadata and dequantised tensors.

The header is parsed here rather than by gguf.GGUFReader, which makes several numpy views for each of the vocabulary's
strings and takes seconds; the enums, the block sizes and the dequantisation are the gguf package's.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from .checkpoint import CheckpointError

SUPPORTED_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K")
_RETRY = "Delete the file and fetch it again"
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class GgufTensor:
    """Where a tensor lies. ``shape`` is in torch's order; ``offset`` and ``nbytes`` are bytes in the file."""

    name: str
    shape: tuple[int, ...]
    type_name: str
    offset: int
    nbytes: int


class GgufFile:
    """A GGUF file with a complete, consistent header; every tensor lies within the file.

    Raises:
        CheckpointError: not a GGUF file, damaged, cut off, or with tensors of a type that is not supported.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._data = np.memmap(path, mode="r") if path.stat().st_size else np.empty(0, dtype=np.uint8)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, GgufTensor] = {}
        try:
            self._parse(_Cursor(self._data.data))
        except (_CutOff, UnicodeDecodeError) as error:
            raise CheckpointError(f"{path}: the GGUF header is cut off or damaged ({error}). {_RETRY}") from None

    def _parse(self, cursor: _Cursor) -> None:
        if bytes(self._data[:4]) != b"GGUF":
            raise CheckpointError(f"{self.path}: not a GGUF file (it does not begin with 'GGUF'). {_RETRY}")
        cursor.position = 4
        version = cursor.scalar("I")
        if version not in (2, 3):
            raise CheckpointError(
                f"{self.path}: GGUF version {version} is not supported (2 and 3, little-endian, are). "
                "Convert it with a recent llama.cpp"
            )
        tensor_count, field_count = cursor.scalar("Q"), cursor.scalar("Q")
        for _ in range(field_count):
            name = cursor.string()
            self.metadata[name] = cursor.value(cursor.scalar("I"))
        found = [self._tensor_info(cursor) for _ in range(tensor_count)]
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise CheckpointError(f"{self.path}: alignment {alignment} is not a power of two. {_RETRY}")
        data_start = -(-cursor.position // alignment) * alignment
        for name, shape, type_name, offset, nbytes in found:
            if name in self.tensors:
                raise CheckpointError(f"{self.path}: has two tensors named {name!r}. {_RETRY}")
            end = data_start + offset + nbytes
            if end > self._data.size:
                raise CheckpointError(
                    f"{self.path}: cut off: tensor {name!r} ends at byte {end:,} but the file has "
                    f"{self._data.size:,}. {_RETRY}"
                )
            self.tensors[name] = GgufTensor(name, shape, type_name, data_start + offset, nbytes)

    def _tensor_info(self, cursor: _Cursor) -> tuple[str, tuple[int, ...], str, int, int]:
        name = cursor.string()
        rank = cursor.scalar("I")
        if rank > 4:
            raise _CutOff(f"tensor {name!r} claims {rank} dimensions")
        shape = tuple(cursor.scalar("Q") for _ in range(rank))[::-1]
        type_id, offset = cursor.scalar("I"), cursor.scalar("Q")
        try:
            ggml_type = gguf.GGMLQuantizationType(type_id)
        except ValueError:
            raise _CutOff(f"tensor {name!r} has the unknown type {type_id}") from None
        if ggml_type.name not in SUPPORTED_TYPES:
            raise CheckpointError(
                f"{self.path}: tensor {name!r} is of type {ggml_type.name}; supported: {', '.join(SUPPORTED_TYPES)}. "
                "Choose a file quantised as one of these"
            )
        per_block, block_bytes = gguf.GGML_QUANT_SIZES[ggml_type]
        if not shape or 0 in shape or shape[-1] % per_block:
            raise _CutOff(f"tensor {name!r} of shape {shape} is not made of blocks of {per_block}")
        nbytes = int(np.prod(shape, dtype=object)) // per_block * block_bytes
        return name, shape, ggml_type.name, offset, nbytes

    def load(self, name: str) -> Tensor:
        """The tensor dequantised to float32, in memory of its own."""
        info = self.tensors[name]
        raw = self._data[info.offset : info.offset + info.nbytes]
        ggml_type = gguf.GGMLQuantizationType[info.type_name]
        if info.type_name in ("F32", "F16"):
            values = raw.view(np.float32 if info.type_name == "F32" else np.float16).astype(np.float32)
        else:
            values = gguf.dequantize(raw.reshape(-1, info.nbytes // int(np.prod(info.shape[:-1]))), ggml_type)
        return torch.from_numpy(values.reshape(info.shape))


class _CutOff(Exception):
    """The header does not make sense or runs beyond the file."""


class _Cursor:
    """Reads the header's values one after the other."""

    def __init__(self, data: memoryview) -> None:
        self.data = data
        self.position = 0

    def take(self, size: int) -> memoryview:
        """The next ``size`` bytes."""
        end = self.position + size
        if end > len(self.data):
            raise _CutOff(f"it needs {end:,} bytes, the file has {len(self.data):,}")
        part = self.data[self.position : end]
        self.position = end
        return part

    def scalar(self, code: str) -> Any:
        """One little-endian value of struct code ``code``."""
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def string(self) -> str:
        """A string with its length before it."""
        return str(self.take(self.scalar("Q")), "utf-8")

    def value(self, type_id: int) -> Any:
        """A metadata value of any type."""
        if type_id in _SCALARS:
            return self.scalar(_SCALARS[type_id])
        if type_id == _STRING:
            return self.string()
        if type_id != _ARRAY:
            raise _CutOff(f"unknown value type {type_id} at byte {self.position:,}")
        item_type, count = self.scalar("I"), self.scalar("Q")
        if item_type == _ARRAY:
            raise _CutOff(f"an array of arrays at byte {self.position:,}")
        if item_type in _SCALARS:
            code = _SCALARS[item_type]
            return list(struct.unpack(f"<{count}{code}", self.take(count * struct.calcsize("<" + code))))
        return [self.value(item_type) for _ in range(count)]
