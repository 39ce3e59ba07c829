"""The model families this engine runs, and how each differs from the plain Llama decoder. One line a family."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


class UnknownArchitectureError(ValueError):
    """A checkpoint of a family that is not in :data:`ARCHITECTURES`."""


@dataclass(frozen=True)
class Architecture:
    """How a family differs from the plain Llama decoder.

    Attributes:
        hf_class: name of its class in ``config.json``'s ``architectures``.
        qk_norm: queries and keys pass an RMS norm over ``head_dim`` before RoPE.
        always_attention_bias: q, k and v have biases although the config does not say so.
        gguf_permutes_qk: llama.cpp's converter reorders the q and k rows to its interleaved RoPE.
        default_head_dim: the head size where ``config.json`` gives none, or None for hidden_size / heads.
    """

    hf_class: str
    qk_norm: bool = False
    always_attention_bias: bool = False
    gguf_permutes_qk: bool = False
    default_head_dim: int | None = None


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("LlamaForCausalLM", gguf_permutes_qk=True),
    "qwen2": Architecture("Qwen2ForCausalLM", always_attention_bias=True),
    "qwen3": Architecture("Qwen3ForCausalLM", qk_norm=True, default_head_dim=128),
}


def get_architecture(name: str) -> Architecture:
    """The entry of ``name``. Raises UnknownArchitectureError, which lists the known ones."""
    if name not in ARCHITECTURES:
        raise _unknown(name)
    return ARCHITECTURES[name]


def architecture_of_hf(config: Mapping[str, Any]) -> str:
    """The family of a ``config.json``, by its ``architectures`` or else by its ``model_type``."""
    classes = config.get("architectures") or []
    for name, spec in ARCHITECTURES.items():
        if spec.hf_class in classes or (not classes and config.get("model_type") == name):
            return name
    raise _unknown(classes[0] if classes else config.get("model_type"))


def architecture_of_gguf(arch: Any) -> str:
    """The family of a GGUF file's ``general.architecture``; the names are the same."""
    if arch not in ARCHITECTURES:
        raise _unknown(arch)
    return str(arch)


def _unknown(name: Any) -> UnknownArchitectureError:
    known = ", ".join(f"{key} ({spec.hf_class})" for key, spec in ARCHITECTURES.items())
    return UnknownArchitectureError(
        f"model architecture {name!r} is not supported. Supported: {known}. Choose a checkpoint of these"
    )
