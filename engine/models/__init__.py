"""Models: what a checkpoint is, how it is found and loaded, and the decoder that runs it."""

from __future__ import annotations

from .checkpoint import Checkpoint, CheckpointError, read_checkpoint
from .config import ModelConfig, ModelConfigError
from .decoder import CausalLM
from .loader import BUILTIN_CONFIGS, LoadedModel, load_model
from .registry import UnknownArchitectureError
from .resolve import DEFAULT_MODEL, resolve_model
from .tokenizer import Tokenizer
from .weights import weight_bytes

__all__ = [
    "BUILTIN_CONFIGS",
    "DEFAULT_MODEL",
    "CausalLM",
    "Checkpoint",
    "CheckpointError",
    "LoadedModel",
    "ModelConfig",
    "ModelConfigError",
    "Tokenizer",
    "UnknownArchitectureError",
    "load_model",
    "read_checkpoint",
    "resolve_model",
    "weight_bytes",
]
