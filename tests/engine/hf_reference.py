"""transformers' own models on the engine's weights: the truth that the engine is held to."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from engine.models import LoadedModel
from engine.models.weights import weight_views


def hf_model(loaded: LoadedModel) -> torch.nn.Module:
    """A float32 transformers model with the weights of `loaded`."""
    fields = loaded.config.to_hf()
    config = AutoConfig.for_model(**fields)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32).eval()
    state = {name: view.float() for name, view in weight_views(loaded.model).items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected and all(name == "lm_head.weight" for name in missing), (missing, unexpected)
    model.tie_weights()
    return model


@torch.inference_mode()
def hf_logits(model: torch.nn.Module, token_ids: Sequence[int]) -> torch.Tensor:
    """Logits f32 [len(token_ids), V] of one pass over all tokens."""
    return model(torch.tensor([list(token_ids)])).logits[0].float()
