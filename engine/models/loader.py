"""From the name of a model to a model that runs."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch

from .checkpoint import Checkpoint, CheckpointError, read_checkpoint
from .config import ModelConfig
from .decoder import CausalLM
from .gguf_checkpoint import GgufCheckpoint
from .packing import pack_weights
from .resolve import BUILTIN_CONFIGS, CONFIGS, resolve_model
from .safetensors_checkpoint import read_config
from .tokenizer import Tokenizer
from .weights import check_shapes, init_dummy_weights, load_weights


@dataclass(frozen=True)
class LoadedModel:
    """A model in memory. ``source`` is the file or directory it came from, None for a built-in config."""

    name: str
    config: ModelConfig
    model: CausalLM
    tokenizer: Tokenizer | None
    source: Path | None
    load_format: str


def load_model(
    model: str | Path,
    *,
    tokenizer: str | None = None,
    dtype: torch.dtype,
    device: torch.device,
    load_format: str = "auto",
    seed: int = 0,
    skip_tokenizer_init: bool = False,
    progress: bool = True,
) -> LoadedModel:
    """Load a model for inference.

    Args:
        model: a path, the name of a model (see resolve_model), or for "dummy" also the name of a built-in config.
        tokenizer: path or name of another tokenizer than the model's own.
        dtype: of weights, hidden states and KV cache: float32, bfloat16 or float16.
        device: where it runs.
        load_format: "auto" reads the weights, "dummy" makes random ones.
        seed: of the random weights.
        skip_tokenizer_init: leave ``tokenizer`` None.
        progress: show a bar while something is downloaded.

    Raises:
        CheckpointError, ModelConfigError, UnknownArchitectureError, UnsupportedTokenizerError: it will not do.
        ModelNotFoundError, DownloadError: nothing there, or it cannot be fetched.
    """
    if load_format not in ("auto", "dummy"):
        raise ValueError(f"load_format={load_format!r}: possible are 'auto' (reads weights) and 'dummy' (random ones)")
    checkpoint: Checkpoint | None = None
    source: Path | None = None
    if load_format == "dummy":
        config, source = _dummy_config(model, progress)
    else:
        source = resolve_model(model, progress=progress)
        checkpoint = read_checkpoint(source)
        check_shapes(checkpoint)
        config, source = checkpoint.config, checkpoint.path
    own_tokenizer = None if skip_tokenizer_init else _tokenizer(tokenizer, source, load_format, progress)
    network = CausalLM(config, dtype, device)
    if checkpoint is None:
        init_dummy_weights(network, seed)
    else:
        load_weights(network, checkpoint)
    pack_weights(network)
    name = source.stem if source and source.suffix == ".gguf" else Path(model).name
    return LoadedModel(name, config, network, own_tokenizer, source, load_format)


def _dummy_config(model: str | Path, progress: bool) -> tuple[ModelConfig, Path | None]:
    """The config alone; no weights need to be there."""
    path = Path(model)
    if not path.exists():
        if str(model) in BUILTIN_CONFIGS:
            return ModelConfig.from_hf(json.loads((CONFIGS / f"{model}.json").read_text(encoding="utf-8"))), None
        path = resolve_model(model, progress=progress)
    if (path / "config.json").is_file():
        return read_config(path), path
    checkpoint = read_checkpoint(path)
    return checkpoint.config, checkpoint.path


def _tokenizer(tokenizer: str | None, source: Path | None, load_format: str, progress: bool) -> Tokenizer | None:
    if tokenizer is not None:
        source = resolve_model(tokenizer, progress=progress, what="tokenizer")
    if source is None:
        return None
    if (source / "tokenizer.json").is_file():
        return Tokenizer.from_directory(source)
    if source.is_dir() and (load_format == "dummy" and tokenizer is None):
        return None
    if source.suffix != ".gguf" and not list(source.glob("*.gguf")):
        return Tokenizer.from_directory(source)
    checkpoint = read_checkpoint(source)
    if not isinstance(checkpoint, GgufCheckpoint):
        raise CheckpointError(f"{source}: has no tokenizer.json. Give tokenizer=<directory with tokenizer.json>")
    return Tokenizer.from_gguf(checkpoint.metadata)
