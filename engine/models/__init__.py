"""Models: what a checkpoint is, how it is found and loaded, and the decoder that runs it."""

from __future__ import annotations

from .chat_template import ChatTemplateError
from .checkpoint import Checkpoint, CheckpointError, read_checkpoint
from .config import ModelConfig, ModelConfigError
from .decoder import CausalLM
from .download import DownloadError
from .gguf_tokenizer import UnsupportedTokenizerError
from .loader import LoadedModel, load_model
from .registry import UnknownArchitectureError
from .resolve import BUILTIN_CONFIGS, DEFAULT_MODEL, ModelNotFoundError, resolve_model, verify_cached
from .tokenizer import Tokenizer
from .weights import weight_bytes

__all__ = [
    "BUILTIN_CONFIGS",
    "DEFAULT_MODEL",
    "CausalLM",
    "ChatTemplateError",
    "Checkpoint",
    "CheckpointError",
    "DownloadError",
    "LoadedModel",
    "ModelConfig",
    "ModelConfigError",
    "ModelNotFoundError",
    "Tokenizer",
    "UnknownArchitectureError",
    "UnsupportedTokenizerError",
    "load_model",
    "read_checkpoint",
    "resolve_model",
    "verify_cached",
    "weight_bytes",
]
