"""Built-in configs, and what a dummy model of them is like."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

import engine.models.loader
from engine.attention import allocate_kv_cache
from engine.models import BUILTIN_CONFIGS, ModelConfig, ModelConfigError, ModelNotFoundError, load_model, weight_bytes
from engine.models.weights import weight_views
from tests.engine.attention.batches import make_batch

CPU = torch.device("cpu")
TINY = ("tiny-llama", "tiny-qwen2", "tiny-qwen3")


def builtin(name: str) -> ModelConfig:
    path = Path(engine.models.loader.__file__).parent / "configs" / f"{name}.json"
    return ModelConfig.from_hf(json.loads(path.read_text()))


def test_the_names() -> None:
    assert set(BUILTIN_CONFIGS) == {*TINY, "qwen3-0.6b"}
    with pytest.raises(ModelNotFoundError, match="load_format='dummy' a built-in config: qwen3-0.6b, tiny-llama"):
        load_model("tiny-lama", dtype=torch.float32, device=CPU, load_format="dummy")


def test_a_number_of_heads_that_cannot_be() -> None:
    with pytest.raises(ModelConfigError, match="num_attention_heads must be a positive integer, got 0"):
        ModelConfig.from_hf({**builtin("tiny-llama").to_hf(), "num_attention_heads": 0, "head_dim": None})


@pytest.mark.parametrize("name", BUILTIN_CONFIGS)
def test_the_way_to_transformers_and_back_loses_nothing(name: str) -> None:
    config = builtin(name)
    hf = AutoConfig.for_model(**config.to_hf())
    again = ModelConfig.from_hf({**hf.to_dict(), "architectures": config.to_hf()["architectures"]})
    assert again == config


@pytest.mark.parametrize("name", TINY)
def test_tiny_configs_are_tiny_and_use_grouped_queries(name: str) -> None:
    config = builtin(name)
    assert config.vocab_size <= 512 and config.hidden_size <= 64 and config.num_hidden_layers == 2
    assert config.num_key_value_heads < config.num_attention_heads
    assert config.max_position_embeddings == 512


def test_qwen3_has_the_published_size() -> None:
    config = builtin("qwen3-0.6b")
    parameters = weight_bytes(config, torch.bfloat16) // 2
    assert parameters == 596_049_920
    assert (config.head_dim, config.num_attention_heads, config.qk_norm) == (128, 16, True)


@pytest.mark.parametrize("name", TINY)
def test_weight_bytes_count_an_untied_embedding_by_its_head_only(name: str) -> None:
    loaded = load_model(name, dtype=torch.float32, device=CPU, load_format="dummy")
    views = weight_views(loaded.model)
    total = sum(view.nbytes for view in views.values())
    untied = 0 if loaded.config.tie_word_embeddings else views["model.embed_tokens.weight"].nbytes
    assert weight_bytes(loaded.config, torch.float32) == total - untied


@pytest.mark.parametrize("name", TINY)
def test_greedy_choices_of_a_dummy_model_are_decided_by_more_than_rounding(name: str) -> None:
    model = load_model(name, dtype=torch.float32, device=CPU, load_format="dummy").model
    cache = allocate_kv_cache(model.config, 9, 16, torch.float32, CPU)
    ids = torch.randint(0, model.config.vocab_size, (128,), generator=torch.Generator().manual_seed(0))
    positions, metadata = make_batch([(0, 128)], [list(range(1, 9))], 16)
    logits = model.compute_logits(model.forward(ids.int(), positions, metadata, cache))
    assert torch.isfinite(logits).all()
    best = logits.topk(2).values
    gaps = best[:, 0] - best[:, 1]
    assert gaps.min() > 1e-3 and gaps.median() > 0.3
    assert len(logits.argmax(-1).unique()) > 30
