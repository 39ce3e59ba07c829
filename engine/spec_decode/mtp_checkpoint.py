"""A multi-token-prediction head on disk: ``config.json`` and safetensors.

The head is DeepSeek-V3's (arXiv 2412.19437, section 2.2): the target's hidden state of a token and the embedding of the
next one, each normalised, are projected together and go through one decoder layer of the target's own kind; the
target's output head then gives the token after the next. Embedding and output head are the target's.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..models.checkpoint import CheckpointError
from ..models.config import ModelConfig, ModelConfigError
from ..models.int8_rows import computed_dtype, restored, stored
from ..models.safetensors_checkpoint import read_json
from ..models.tensor_shapes import check_tensor_shapes
from ..models.weights import expected_shapes as shapes_of_model

MTP_CLASS = "MtpHead"
Weights = dict[str, Tensor]
_SAME_AS_TARGET = (
    "architecture",
    "vocab_size",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)


def mtp_config(target: ModelConfig) -> ModelConfig:
    """The shape of a head for `target`: one layer of it."""
    return dataclasses.replace(target, num_hidden_layers=1)


def check_target(config: ModelConfig, target: ModelConfig) -> None:
    """Raises ModelConfigError unless a head of this shape sits on `target`; says what differs."""
    different = [
        f"{name} is {getattr(config, name)!r}, the target's {getattr(target, name)!r}"
        for name in _SAME_AS_TARGET
        if getattr(config, name) != getattr(target, name)
    ]
    if different:
        raise ModelConfigError(
            f"this MTP head was made for another model: {'; '.join(different)}. Use the head that was trained for the "
            "target, or train one: runnerscope dspark train"
        )


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a head."""
    d = config.hidden_size
    of_layer = {
        name.removeprefix("model."): shape
        for name, shape in shapes_of_model(config).items()
        if name.startswith("model.layers.") or name == "model.norm.weight"
    }
    return {"enorm.weight": (d,), "hnorm.weight": (d,), "eh_proj.weight": (d, 2 * d), **of_layer}


def init_weights(config: ModelConfig, seed: int) -> Weights:
    """Random f32 weights to train from, the same for a seed everywhere. What is added to the residual starts small."""
    generator = torch.Generator().manual_seed(seed)
    weights: Weights = {}
    for name, shape in expected_shapes(config).items():
        if name.endswith("norm.weight"):
            weights[name] = torch.ones(shape)
        elif name.endswith("bias"):
            weights[name] = torch.zeros(shape)
        else:
            scale = 0.3 if "o_proj" in name or "down_proj" in name else 1.0
            weights[name] = torch.randn(shape, generator=generator).mul_(scale / shape[-1] ** 0.5)
    return weights


def read_mtp(path: str | Path) -> tuple[ModelConfig, Weights]:
    """Config and tensors, as stored or f32 where that is int8, of the head in the directory ``path``.

    Raises:
        CheckpointError: a file is missing or damaged, or its tensors don't fit the config; names them.
        ModelConfigError: the config is not a head's.
    """
    path = Path(path)
    fields = read_json(path / "config.json")
    if fields.pop("architectures", None) != [MTP_CLASS]:
        raise ModelConfigError(f"{path / 'config.json'}: is no MTP head's ('architectures' must be [{MTP_CLASS!r}])")
    fields.pop("dtype", None)
    try:
        config = ModelConfig(**{**fields, "eos_token_ids": tuple(fields.get("eos_token_ids", ()))})
    except TypeError as error:
        raise ModelConfigError(f"{path / 'config.json'}: {error}") from None
    weights: Weights = {}
    file = path / "model.safetensors"
    try:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - it's a method of the file, which is no mapping
                weights[name] = opened.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file}: missing, damaged or cut off ({error}). Fetch the file again") from error
    weights = restored(weights, path)
    check_shapes(config, weights, path)
    return config, weights


def check_shapes(config: ModelConfig, weights: Mapping[str, Tensor], path: Path) -> None:
    """Raise CheckpointError, which names missing, unknown and misshapen tensors, unless they fit ``config``."""
    check_tensor_shapes(weights, expected_shapes(config), path, "an MTP head")


def write_mtp(path: Path, config: ModelConfig, weights: Mapping[str, Tensor], dtype: torch.dtype) -> None:
    """Write ``config.json`` and ``model.safetensors``; an interrupted write leaves what was there before. int8:
    see models/int8_rows.py."""
    check_shapes(config, weights, path)
    path.mkdir(parents=True, exist_ok=True)
    save_file(stored(weights, dtype), path / "model.safetensors.part", metadata={"format": "pt"})
    os.replace(path / "model.safetensors.part", path / "model.safetensors")
    fields = {"architectures": [MTP_CLASS], **dataclasses.asdict(config), "dtype": computed_dtype(dtype)}
    (path / "config.json").write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
