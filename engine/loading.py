"""Which weights an engine runs on: another engine's, or those that it loads."""

from __future__ import annotations

from typing import Any

from .config import ConfigError, EngineConfig
from .cpu_stream import run_on_compute_worker
from .models import LoadedModel, load_model, resolve_model


def sharing(kwargs: dict[str, Any], loaded: LoadedModel) -> dict[str, Any]:
    """The keywords of an engine on the weights of `loaded`; ConfigError if they ask for another model, dtype or
    device."""
    taken = [key for key in ("model", "tokenizer", "load_format") if key in kwargs]
    if taken:
        raise ConfigError(
            f"{', '.join(taken)} can't be given together with loaded=, which brings the model {loaded.name!r}"
        )
    weight = loaded.model.embed_tokens.weight
    own = {"dtype": str(weight.dtype).removeprefix("torch."), "device": str(weight.device)}
    asked = {key: kwargs.get(key, "auto") for key in own}
    merged = kwargs | {key: own[key] for key, value in asked.items() if value == "auto"}
    config = EngineConfig.from_kwargs(**merged)
    if config.torch_dtype != weight.dtype or config.torch_device != weight.device:
        raise ConfigError(
            f"dtype={asked['dtype']!r}, device={asked['device']!r} with loaded=: "
            f"the weights of {loaded.name!r} are {own['dtype']} on "
            f"{own['device']}; leave dtype and device out, or load the model anew"
        )
    return merged | {"model": loaded.name, "load_format": loaded.load_format}


def load_for(config: EngineConfig) -> LoadedModel:
    """The model that `config` names; on a CPU loaded by the thread that will compute."""

    def load() -> LoadedModel:
        return load_model(
            config.model, tokenizer=config.tokenizer, dtype=config.torch_dtype, device=config.torch_device,
            load_format=config.load_format, seed=config.seed, skip_tokenizer_init=config.skip_tokenizer_init,
        )  # fmt: skip

    if config.torch_device.type == "cuda":
        return load()
    if config.load_format == "auto":
        resolve_model(config.model)  # here, where a Ctrl-C ends a download
    return run_on_compute_worker(load)
