"""The worker of one engine: its device, its KV cache and its runner. The only place where a runner is chosen."""

from __future__ import annotations

import torch

from . import switches
from .attention import allocate_kv_cache, kv_bytes_per_token
from .config import ConfigError, EngineConfig
from .device import Device
from .dspark.factory import build_dspark_decoder
from .hooks import Hooks
from .models import LoadedModel, ModelConfig
from .models.model_state import ModelState
from .runner_v1 import ModelRunnerV1
from .runner_v2 import ModelRunnerV2
from .spec_decode import SpecDecoder
from .spec_decode.factory import build_spec_decoder

ModelRunner = ModelRunnerV1 | ModelRunnerV2


def unsupported_features(config: EngineConfig, use_v2: bool) -> list[str]:
    """What of `config` the runner cannot do, as sentences for a person; empty if it can do all of it."""
    problems = []
    method = config.speculative_config.method if config.speculative_config else None
    if not use_v2 and method == "dspark":
        problems.append("Speculative method 'dspark' is fused into runner V2's step and does not exist on V1.")
    if not use_v2 and config.speculative_config and config.speculative_config.draft_sample_method != "greedy":
        problems.append(
            "Runner V1's rows move, and what a drawn draft was drawn from lies in a row: it drafts greedily only "
            "(draft_sample_method='greedy')."
        )
    if not use_v2 and method not in (None, "dspark") and config.async_scheduling:
        problems.append(
            "Runner V1's drafts are made of tokens that have reached the host, so it needs the plain loop: "
            "async_scheduling=False."
        )
    if not use_v2 and config.cudagraph_capture_sizes and config.torch_device.type == "cpu":
        problems.append(
            "Runner V1 on a CPU runs every batch at its own size, so cudagraph_capture_sizes has no effect on it."
        )
    return problems


def choose_runner(config: EngineConfig) -> bool:
    """True for V2. The config decides if it says so, then VLLM_USE_V2_MODEL_RUNNER; "dspark" forces V2; V2 is the
    default.

    Raises ConfigError if V1 is asked for with what V1 cannot do.
    """
    asked = config.use_v2_model_runner
    if asked is None:
        asked = switches.get("VLLM_USE_V2_MODEL_RUNNER")
    use_v2 = True if asked is None else asked
    problems = unsupported_features(config, use_v2)
    if problems:
        raise ConfigError(
            f"runner {'V2' if use_v2 else 'V1'} can't run this config: {' '.join(problems)} Use the other runner"
        )
    return use_v2


def build_decoder(config: EngineConfig, loaded: LoadedModel) -> SpecDecoder | None:
    """What drafts for a resolved config, if anything does. ConfigError if it doesn't suit the model."""
    spec = config.speculative_config
    if spec is None:
        return None
    assert config.max_num_seqs is not None
    build = build_dspark_decoder if spec.method == "dspark" else build_spec_decoder
    return build(config, loaded, config.max_num_seqs + 1)  # V2's table has a row for padding


def num_kv_blocks(config: EngineConfig, model: ModelConfig, draft_bytes_per_token: int = 0) -> int:
    """Blocks of the KV cache: as asked for, or what memory allows, and no more than max_num_seqs requests can fill. A
    drafter's cache lies beside it, with the same blocks."""
    if config.num_gpu_blocks_override is not None:
        return config.num_gpu_blocks_override
    bytes_per_token = kv_bytes_per_token(model, config.torch_dtype) + draft_bytes_per_token
    bytes_per_block = bytes_per_token * config.block_size
    if config.torch_device.type == "cuda":
        free, total = torch.cuda.mem_get_info(config.torch_device)
        budget = int(free - total * (1 - config.gpu_memory_utilization))
    else:
        budget = int(switches.get("RUNNERSCOPE_CPU_KVCACHE_SPACE") * 2**30)
    max_len = config.max_model_len or model.max_position_embeddings
    useful = (config.max_num_seqs or 256) * -(-max_len // config.block_size) + 1
    blocks = min(useful, budget // bytes_per_block)
    if blocks < 2:
        raise ConfigError(
            f"the KV cache has room for {max(blocks, 0)} blocks of {bytes_per_block / 2**20:.1f} MiB and "
            "needs at least 2; lower block_size, raise gpu_memory_utilization (CUDA) or RUNNERSCOPE_CPU_KVCACHE_SPACE "
            "(CPU), or set num_gpu_blocks_override"
        )
    return blocks


def build_model_runner(
    config: EngineConfig,
    use_v2: bool,
    loaded: LoadedModel,
    kv_cache: torch.Tensor,
    device: Device,
    hooks: Hooks,
    decoder: SpecDecoder | None = None,
) -> ModelRunner:
    """The one place where a runner's class is picked."""
    parts = config, loaded.model, ModelState(config.block_size), kv_cache, device, hooks
    return ModelRunnerV2(*parts, decoder) if use_v2 else ModelRunnerV1(*parts, decoder)


class Worker:
    def __init__(
        self,
        config: EngineConfig,
        use_v2: bool,
        loaded: LoadedModel,
        hooks: Hooks,
        decoder: SpecDecoder | None = None,
    ) -> None:
        assert config.num_gpu_blocks_override is not None, "the worker needs a resolved config"
        self.device = Device(config.torch_device, hooks)
        num_blocks, block_size = config.num_gpu_blocks_override, config.block_size
        try:
            self.kv_cache = allocate_kv_cache(
                loaded.config, num_blocks, block_size, config.torch_dtype, config.torch_device
            )
            if decoder is not None:
                decoder.allocate_kv_cache(num_blocks, block_size)
        except RuntimeError as error:  # what torch raises for memory that isn't there, and for sizes beyond 64 bits
            gib = num_blocks * block_size * kv_bytes_per_token(loaded.config, config.torch_dtype) / 2**30
            raise ConfigError(
                f"num_gpu_blocks_override={num_blocks}: a KV cache of {num_blocks} blocks of block_size={block_size} "
                f"takes {gib:,.1f} GiB, which this machine hasn't; lower it, or leave it out for what fits"
            ) from error
        self.runner = build_model_runner(config, use_v2, loaded, self.kv_cache, self.device, hooks, decoder)
