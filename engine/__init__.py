"""runnerscope's inference engine: both of vLLM's model runners over one scheduler, KV cache and model."""

from .config import ConfigError, EngineConfig, SpeculativeConfig
from .llm import LLM
from .request import CompletionOutput, Logprob, RequestOutput
from .sample.structured_outputs_params import StructuredOutputsParams
from .sampling_params import SamplingParams

__all__ = [
    "LLM",
    "CompletionOutput",
    "ConfigError",
    "EngineConfig",
    "Logprob",
    "RequestOutput",
    "SamplingParams",
    "SpeculativeConfig",
    "StructuredOutputsParams",
]
