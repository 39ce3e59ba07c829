"""runnerscope's inference engine: both of vLLM's model runners over one scheduler, KV cache and model."""

from .config import ConfigError, EngineConfig, SpeculativeConfig
from .llm import LLM
from .request import CompletionOutput, Logprob, RequestOutput, SamplingParams

__all__ = [
    "LLM",
    "CompletionOutput",
    "ConfigError",
    "EngineConfig",
    "Logprob",
    "RequestOutput",
    "SamplingParams",
    "SpeculativeConfig",
]
