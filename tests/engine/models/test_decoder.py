"""The decoder against transformers' own models with the same random weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from engine.attention import allocate_kv_cache
from engine.models import load_model
from tests.engine.attention.batches import make_batch

CPU = torch.device("cpu")
BASE = {
    "vocab_size": 211,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
FAMILIES = {
    "llama": {"model_type": "llama"},
    "llama-mha": {"model_type": "llama", "num_key_value_heads": 6},
    "llama-one-kv-head": {"model_type": "llama", "num_key_value_heads": 1},
    "llama-bias": {"model_type": "llama", "attention_bias": True},
    "llama-head-dim": {"model_type": "llama", "head_dim": 16},
    "llama-tied": {"model_type": "llama", "tie_word_embeddings": True},
    "llama-llama3": {"model_type": "llama", "rope_theta": 500000.0, "rope_scaling": LLAMA3},
    "llama-linear": {"model_type": "llama", "rope_scaling": {"rope_type": "linear", "factor": 2.5}},
    "llama-yarn": {"model_type": "llama", "rope_scaling": YARN},
    "qwen2": {"model_type": "qwen2", "rope_theta": 1000000.0},
    "qwen2-tied": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "head_dim": 32, "rope_theta": 1000000.0},
    "qwen3-tied-bias": {"model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": True, "attention_bias": True},
    "qwen3-yarn": {"model_type": "qwen3", "head_dim": 32, "rope_scaling": YARN},
}


def save_reference(path: Path, **fields: object) -> torch.nn.Module:
    """A transformers model with random weights, every norm and bias included, saved as safetensors."""
    config = AutoConfig.for_model(**{**BASE, **fields})
    torch.manual_seed(0)
    reference = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            spread = 0.3 if "norm" in name or "bias" in name else parameter.shape[-1] ** -0.5
            parameter.copy_(torch.randn_like(parameter) * spread + ("norm" in name))
    reference.save_pretrained(path)
    return reference


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers(family: str, tmp_path: Path) -> None:
    """One request prefilled in chunks and decoded, beside another, through shuffled blocks."""
    reference = save_reference(tmp_path, **FAMILIES[family])
    model = load_model(tmp_path, dtype=torch.float32, device=CPU, skip_tokenizer_init=True).model
    cache = allocate_kv_cache(model.config, 24, 4, torch.float32, CPU)
    ids = torch.randint(0, 211, (2, 40), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    with torch.inference_mode():
        expected = reference(ids.long()).logits
    tables = [[7, 3, 12, 1, 9, 5, 20, 2, 22, 11], [4, 6, 8, 10, 13, 14, 15, 16, 17, 18]]
    done = [0, 0]
    for step in ([17, 1], [1, 30], [1, 1], [15, 8], [6, 0]):
        live = [i for i in (0, 1) if step[i]]
        positions, metadata = make_batch([(done[i], step[i]) for i in live], [tables[i] for i in live], 4)
        tokens = torch.cat([ids[i, done[i] : done[i] + step[i]] for i in live])
        logits = model.compute_logits(model(tokens, positions, metadata, cache))
        wanted = torch.cat([expected[i, done[i] : done[i] + step[i]] for i in live])
        torch.testing.assert_close(logits, wanted, atol=1e-4, rtol=1e-4)
        done = [a + b for a, b in zip(done, step, strict=True)]
    assert done == [40, 40]


@pytest.mark.parametrize("family", ["llama-llama3", "llama-yarn", "qwen2", "qwen3-tied-bias"])
def test_config_survives_the_way_to_transformers_and_back(family: str, tmp_path: Path) -> None:
    save_reference(tmp_path, **FAMILIES[family])
    loaded = load_model(tmp_path, dtype=torch.float32, device=CPU, skip_tokenizer_init=True)
    (tmp_path / "config.json").write_text(json.dumps(loaded.config.to_hf()))
    again = load_model(tmp_path, dtype=torch.float32, device=CPU, skip_tokenizer_init=True)
    assert again.config == loaded.config
    hf = AutoConfig.from_pretrained(tmp_path)
    assert (hf.model_type, hf.head_dim if hasattr(hf, "head_dim") else 8) == (
        loaded.config.architecture,
        loaded.config.head_dim,
    )
