"""The shape of a draft that is to be trained: what follows from the target, and what can be chosen."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..models.config import ModelConfig
from .config import DSparkConfig


def draft_config_for(target: ModelConfig, given: Mapping[str, Any]) -> DSparkConfig:
    """A draft for ``target``: its heads and widths, with the fields in ``given`` on top.

    ``given`` holds fields of DSparkConfig, and ``num_hidden_layers`` and ``intermediate_size`` of its backbone.
    """
    layers = target.num_hidden_layers
    backbone = {name: given[name] for name in ("num_hidden_layers", "intermediate_size") if given.get(name) is not None}
    model = dataclasses.replace(
        target, architecture="qwen3", qk_norm=True, attention_bias=False, tie_word_embeddings=False,
        **({"num_hidden_layers": 1} | backbone),
    )  # fmt: skip
    own = {name: value for name, value in given.items() if name not in backbone and value is not None}
    defaults: dict[str, Any] = {
        "block_size": 7,
        "target_layer_ids": spread_layers(layers, 5),
        "mask_token_id": target.vocab_size - 1,
        "markov_rank": 32,
    }
    return DSparkConfig(model=model, num_target_layers=layers, **(defaults | own))


def spread_layers(num_layers: int, count: int) -> tuple[int, ...]:
    """``count`` layers from the second to the third from the end, evenly: [1, 9, 17, 25, 33] of 36."""
    last = max(num_layers - 3, 0)
    if last <= 1:
        return tuple(range(max(1, num_layers - 1))) if num_layers > 1 else (-1,)
    places = np.linspace(1, last, min(count, last))
    return tuple(dict.fromkeys(round(float(p)) for p in places))
