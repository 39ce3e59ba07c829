"""The engine's configuration: frozen, validated when made, never patched later.

`EngineConfig.from_kwargs` takes the keywords of `LLM(...)` under vLLM's names; an unknown one raises and names the
closest. What depends on the checkpoint or on the machine is settled once, by `resolve`, which returns a new config.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from .config_checks import ConfigError, check_choice, check_positive, closest
from .speculative_config import SpeculativeConfig

__all__ = ["ConfigError", "EngineConfig", "SpeculativeConfig", "closest"]

DTYPES = {
    "float32": torch.float32, "float": torch.float32, "fp32": torch.float32,
    "bfloat16": torch.bfloat16, "bf16": torch.bfloat16,
    "float16": torch.float16, "half": torch.float16, "fp16": torch.float16,
}  # fmt: skip
KERNEL_BACKENDS = ("auto", "triton", "torch", "interpret", "loop")
SCHEDULING_POLICIES = ("fcfs", "priority")
LOAD_FORMATS = ("auto", "dummy")


@dataclass(frozen=True)
class EngineConfig:
    """All knobs of one engine, under vLLM's names. None means: settled by `resolve` from the checkpoint or the
    machine."""

    model: str = "SmolLM2-135M-Instruct"
    tokenizer: str | None = None
    dtype: str = "auto"
    """"auto" is float32 on a CPU and bfloat16 on CUDA."""
    device: str = "auto"
    seed: int = 0
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    """None is 64 on a CPU and 256 on CUDA, or the token budget where that is less."""
    max_num_batched_tokens: int = 2048
    block_size: int = 16
    num_gpu_blocks_override: int | None = None
    gpu_memory_utilization: float = 0.9
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    async_scheduling: bool = True
    use_v2_model_runner: bool | None = None
    speculative_config: SpeculativeConfig | None = None
    load_format: Literal["auto", "dummy"] = "auto"
    enforce_eager: bool = False
    skip_tokenizer_init: bool = False
    kernel_backend: Literal["auto", "triton", "torch", "interpret", "loop"] = "auto"
    cudagraph_capture_sizes: tuple[int, ...] = field(default=())
    """Sizes to which a pure decode batch is padded, and at which CUDA graphs are captured. Left empty: none on a CPU
    (give some to see the padding there) or with enforce_eager; on CUDA 1, 2, 4, 8, 16, 24, 32, 48, 64 and then every
    32nd."""

    @classmethod
    def from_kwargs(cls, **kwargs: Any) -> EngineConfig:
        names = [f.name for f in dataclasses.fields(cls)]
        for key in kwargs:
            if key not in names:
                raise ConfigError(f"unknown keyword {key!r}{closest(key, names)} The keywords are: {', '.join(names)}")
        spec = kwargs.get("speculative_config")
        if isinstance(spec, dict):
            kwargs["speculative_config"] = SpeculativeConfig.from_mapping(spec)
        for key in ("model", "tokenizer"):
            if isinstance(kwargs.get(key), os.PathLike):
                kwargs[key] = os.fspath(kwargs[key])
        sizes = kwargs.get("cudagraph_capture_sizes")
        if isinstance(sizes, list | tuple):
            with contextlib.suppress(TypeError):  # what can't be sorted is refused below
                sizes = sorted(sizes)
            kwargs["cudagraph_capture_sizes"] = tuple(sizes)
        return cls(**kwargs)

    def __post_init__(self) -> None:
        for name in ("max_num_batched_tokens", "block_size"):
            check_positive(name, getattr(self, name))
        for name in ("max_num_seqs", "max_model_len", "num_gpu_blocks_override"):
            if getattr(self, name) is not None:
                check_positive(name, getattr(self, name))
        for name in (
            "enable_prefix_caching",
            "enable_chunked_prefill",
            "async_scheduling",
            "enforce_eager",
            "skip_tokenizer_init",
        ):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name}={getattr(self, name)!r}: must be True or False")
        if self.use_v2_model_runner not in (None, True, False):
            raise ConfigError(
                f"use_v2_model_runner={self.use_v2_model_runner!r}: must be True, False or None (the default)"
            )
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or not -(2**63) <= self.seed < 2**63:
            raise ConfigError(f"seed={self.seed!r}: must be a 64-bit whole number")
        share = self.gpu_memory_utilization
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0.0 < share <= 1.0:
            raise ConfigError(f"gpu_memory_utilization={share!r}: must be above 0 and at most 1")
        if self.num_gpu_blocks_override is not None and self.num_gpu_blocks_override < 2:
            raise ConfigError(
                "num_gpu_blocks_override=1: at least 2, since block 0 is the null block that no request owns"
            )
        if self.max_num_seqs is not None and self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is below max_num_seqs={self.max_num_seqs}: "
                "every running request needs one token of the budget a step; raise the first or lower the second"
            )
        self._check_names()
        if not isinstance(self.cudagraph_capture_sizes, tuple):
            raise ConfigError(
                f"cudagraph_capture_sizes={self.cudagraph_capture_sizes!r}: must be a list of numbers of requests"
            )
        for size in self.cudagraph_capture_sizes:
            check_positive("cudagraph_capture_sizes", size)
        self._check_speculative()
        check_choice("kernel_backend", self.kernel_backend, KERNEL_BACKENDS)
        check_choice("scheduling_policy", self.scheduling_policy, SCHEDULING_POLICIES)
        check_choice("load_format", self.load_format, LOAD_FORMATS)
        check_choice("dtype", self.dtype, ("auto", *DTYPES))
        self._check_device()

    def _check_names(self) -> None:
        for name in ("model", "tokenizer", "device"):
            value = getattr(self, name)
            if (value is not None or name != "tokenizer") and (not isinstance(value, str) or not value):
                raise ConfigError(f"{name}={value!r}: must be a string that is not empty")

    def _check_device(self) -> None:
        index = self.device.removeprefix("cuda:")
        if self.device not in ("auto", "cpu", "cuda") and not (index != self.device and index.isdecimal()):
            raise ConfigError(f"device={self.device!r}: possible are 'auto', 'cpu', 'cuda' and 'cuda:N'")
        if self.device.startswith("cuda") and not torch.cuda.is_available():
            raise ConfigError(f"device={self.device!r}: this torch sees no CUDA device; use device='cpu' or 'auto'")
        if index.isdecimal() and int(index) >= torch.cuda.device_count():
            count = torch.cuda.device_count()
            raise ConfigError(f"device={self.device!r}: this torch sees {count} CUDA devices, numbered from 0")

    def _check_speculative(self) -> None:
        config = self.speculative_config
        if config is not None and not isinstance(config, SpeculativeConfig):
            raise ConfigError(f"speculative_config={config!r}: must be a dict or a SpeculativeConfig")

    @property
    def torch_device(self) -> torch.device:
        name = self.device if self.device != "auto" else ("cuda" if torch.cuda.is_available() else "cpu")
        return torch.device(name, torch.cuda.current_device()) if name == "cuda" else torch.device(name)

    @property
    def torch_dtype(self) -> torch.dtype:
        if self.dtype == "auto":
            return torch.float32 if self.torch_device.type == "cpu" else torch.bfloat16
        return DTYPES[self.dtype]

    def resolve(self, *, model_max_len: int, num_gpu_blocks: int) -> EngineConfig:
        """This config with `max_model_len` and the number of KV blocks settled.

        Raises ConfigError if max_model_len exceeds what the checkpoint's positions allow.
        """
        max_len = self.max_model_len if self.max_model_len is not None else model_max_len
        if max_len > model_max_len:
            raise ConfigError(
                f"max_model_len={max_len} is more than the {model_max_len} positions of {self.model!r}; "
                f"ask for at most {model_max_len}"
            )
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < max_len:
            raise ConfigError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is below max_model_len={max_len} and chunked "
                "prefill is off, so a long prompt could never run; raise the budget, lower max_model_len or set "
                "enable_chunked_prefill=True"
            )
        max_seqs = self.max_num_seqs
        if max_seqs is None:
            max_seqs = min(64 if self.torch_device.type == "cpu" else 256, self.max_num_batched_tokens)
        sizes = self.cudagraph_capture_sizes
        if not sizes and self.torch_device.type == "cuda" and not self.enforce_eager:
            steps = (1, 2, 4, 8, 16, 24, 32, 48, *range(64, max_seqs, 32))
            sizes = (*(n for n in steps if n < max_seqs), max_seqs)
        return dataclasses.replace(
            self,
            max_model_len=max_len,
            num_gpu_blocks_override=num_gpu_blocks,
            max_num_seqs=max_seqs,
            cudagraph_capture_sizes=sizes,
        )
