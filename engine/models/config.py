"""What a checkpoint says about the shape of its model, in one frozen form for Hugging Face's and GGUF's spellings.

No weights, no torch: only numbers, and the errors for numbers that cannot be.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .registry import architecture_of_gguf, architecture_of_hf, get_architecture

ROPE_KINDS = ("default", "linear", "llama3", "yarn")


class ModelConfigError(ValueError):
    """A model configuration that this engine cannot run; the message says which value and what is possible."""


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a decoder-only model. Sizes are counts of elements; ``rope_theta`` is the RoPE base."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: Mapping[str, Any] | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    qk_norm: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        get_architecture(self.architecture)
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "max_position_embeddings",
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ModelConfigError(f"{name} must be a positive integer, got {value!r}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ModelConfigError(
                f"num_attention_heads ({self.num_attention_heads}) must be a multiple of "
                f"num_key_value_heads ({self.num_key_value_heads})"
            )
        if self.head_dim % 2:
            raise ModelConfigError(f"head_dim must be even for rotary embeddings, got {self.head_dim}")
        kind = rope_kind(self.rope_scaling)
        if kind not in ROPE_KINDS:
            raise ModelConfigError(
                f"RoPE scaling {kind!r} is not supported; supported kinds: {', '.join(ROPE_KINDS)}. "
                "Use a checkpoint without it, or one of the supported kinds"
            )

    @property
    def attention_output_bias(self) -> bool:
        """Whether the output projection of attention has a bias too; in Qwen2 only q, k and v have."""
        return self.attention_bias and not get_architecture(self.architecture).always_attention_bias

    def without_rope_scaling(self) -> ModelConfig:
        """The same model with plain RoPE."""
        return dataclasses.replace(self, rope_scaling=None)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> ModelConfig:
        """Read the fields of a Hugging Face ``config.json`` (both the old and the ``rope_parameters`` spelling).

        Raises:
            ModelConfigError: a field is missing, or has a value that this engine cannot run.
        """
        architecture = architecture_of_hf(config)
        spec = get_architecture(architecture)
        _refuse_unsupported(config)
        try:
            hidden_size = int(config["hidden_size"])
            num_heads = int(config["num_attention_heads"])
            rope_theta, rope_scaling = _rope_of_hf(config)
            return cls(
                architecture=architecture,
                vocab_size=int(config["vocab_size"]),
                hidden_size=hidden_size,
                intermediate_size=int(config["intermediate_size"]),
                num_hidden_layers=int(config["num_hidden_layers"]),
                num_attention_heads=num_heads,
                num_key_value_heads=int(config.get("num_key_value_heads") or num_heads),
                head_dim=int(config.get("head_dim") or spec.default_head_dim or _share(hidden_size, num_heads)),
                max_position_embeddings=int(config.get("max_position_embeddings") or 2048),
                rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
                rope_theta=rope_theta,
                rope_scaling=rope_scaling,
                tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
                attention_bias=bool(config.get("attention_bias", False)) or spec.always_attention_bias,
                qk_norm=spec.qk_norm,
                bos_token_id=_first(config.get("bos_token_id")),
                eos_token_ids=_tuple(config.get("eos_token_id")),
            )
        except KeyError as error:
            raise ModelConfigError(f"config.json of architecture {architecture!r} lacks the field {error}") from None

    @classmethod
    def from_gguf(
        cls,
        metadata: Mapping[str, Any],
        tensor_names: frozenset[str],
        vocab_size: int,
        rope_divisor: float | None = None,
    ) -> ModelConfig:
        """Read the key-value fields of a GGUF file.

        Args:
            metadata: the file's fields, decoded to Python values.
            tensor_names: names of its tensors, which alone tell tied embeddings and biases.
            vocab_size: rows of ``token_embd.weight``.
            rope_divisor: largest value of ``rope_freqs.weight`` where the file has it: Llama 3's scaling factor.
        """
        arch = metadata.get("general.architecture")
        architecture = architecture_of_gguf(arch)
        spec = get_architecture(architecture)

        def field(name: str, default: Any = None) -> Any:
            value = metadata.get(f"{arch}.{name}", default)
            if value is None:
                raise ModelConfigError(f"the GGUF file lacks the field {arch}.{name}")
            return value

        hidden_size = int(field("embedding_length"))
        num_heads = int(field("attention.head_count"))
        eos = [metadata.get("tokenizer.ggml.eos_token_id"), metadata.get("tokenizer.ggml.eot_token_id")]
        return cls(
            architecture=architecture,
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            intermediate_size=int(field("feed_forward_length")),
            num_hidden_layers=int(field("block_count")),
            num_attention_heads=num_heads,
            num_key_value_heads=int(field("attention.head_count_kv", num_heads)),
            head_dim=int(field("attention.key_length", _share(hidden_size, num_heads))),
            max_position_embeddings=int(field("context_length")),
            rms_norm_eps=float(field("attention.layer_norm_rms_epsilon", 1e-6)),
            rope_theta=float(field("rope.freq_base", 10000.0)),
            rope_scaling=_rope_of_gguf(metadata, str(arch), rope_divisor),
            tie_word_embeddings="output.weight" not in tensor_names,
            attention_bias="blk.0.attn_q.bias" in tensor_names,
            qk_norm=spec.qk_norm,
            bos_token_id=_first(metadata.get("tokenizer.ggml.bos_token_id")),
            eos_token_ids=tuple(dict.fromkeys(int(e) for e in eos if e is not None)),
        )

    def to_hf(self) -> dict[str, Any]:
        """The same model as the dictionary of a Hugging Face ``config.json``."""
        spec = get_architecture(self.architecture)
        config: dict[str, Any] = {
            "architectures": [spec.hf_class],
            "model_type": self.architecture,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": self.max_position_embeddings,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "rope_scaling": dict(self.rope_scaling) if self.rope_scaling else None,
            "tie_word_embeddings": self.tie_word_embeddings,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": list(self.eos_token_ids) or None,
        }
        if not spec.always_attention_bias:
            config["attention_bias"] = self.attention_bias
        return config


def rope_kind(rope_scaling: Mapping[str, Any] | None) -> str:
    """The kind of RoPE scaling, in the newer spelling (``rope_type``) or the older one (``type``)."""
    if not rope_scaling:
        return "default"
    return str(rope_scaling.get("rope_type") or rope_scaling.get("type") or "default")


def _rope_of_hf(config: Mapping[str, Any]) -> tuple[float, dict[str, Any] | None]:
    parameters = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = parameters.pop("rope_theta", None) or config.get("rope_theta") or 10000.0
    return float(theta), None if rope_kind(parameters) == "default" else parameters


def _rope_of_gguf(metadata: Mapping[str, Any], arch: str, rope_divisor: float | None) -> dict[str, Any] | None:
    if rope_divisor is not None:
        # Converters write Llama 3's scaling as one divisor a frequency. Of its four parameters only the factor differs
        # between the released models.
        return {
            "rope_type": "llama3",
            "factor": rope_divisor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
    kind = metadata.get(f"{arch}.rope.scaling.type")
    if kind in (None, "none"):
        return None
    scaling: dict[str, Any] = {"rope_type": kind, "factor": float(metadata.get(f"{arch}.rope.scaling.factor", 1.0))}
    original = metadata.get(f"{arch}.rope.scaling.original_context_length")
    if original is not None:
        scaling["original_max_position_embeddings"] = int(original)
    return scaling


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise ModelConfigError(f"hidden_act {activation!r} is not supported; these families use 'silu'")
    if config.get("mlp_bias"):
        raise ModelConfigError("mlp_bias=true is not supported; use a checkpoint without biases in the MLP")
    layer_types = set(config.get("layer_types") or ())
    sliding = config.get("use_sliding_window") or "sliding_attention" in layer_types
    if sliding and layer_types != {"full_attention"}:
        raise ModelConfigError("sliding-window attention is not supported; set use_sliding_window to false")
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "unknown")
        raise ModelConfigError(
            f"quantised safetensors ({method}) are not supported; use the unquantised checkpoint or a GGUF file"
        )


def _share(hidden_size: int, num_heads: int) -> int:
    """The usual head_dim. Heads that can't be are refused by the checks of every field."""
    return hidden_size // max(num_heads, 1)


def _first(value: Any) -> int | None:
    if isinstance(value, list | tuple):
        value = value[0] if value else None
    return None if value is None else int(value)


def _tuple(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(int(v) for v in value) if isinstance(value, list | tuple) else (int(value),)
