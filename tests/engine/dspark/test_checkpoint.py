"""Published drafts load unchanged; anything else is refused with what is wrong and what fits."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.dspark import DraftConfigError, DSparkConfig, init_weights, read_draft, write_draft
from engine.dspark.checkpoint import expected_shapes
from engine.models import CheckpointError, ModelConfig
from tests.engine.dspark.golden import HEADS, ROOT, golden


@pytest.fixture
def fields() -> dict:
    return json.loads((ROOT / "vanilla" / "draft" / "config.json").read_text())


@pytest.mark.parametrize("head", HEADS)
def test_a_published_draft(head: str) -> None:
    config, weights = read_draft(ROOT / head / "draft")
    assert (config.block_size, config.target_layer_ids, config.mask_token_id) == (5, (0, 2, 4), 255)
    assert (config.markov_rank, config.markov_head_type, config.confidence_width) == (16, head, 80)
    assert config.model.qk_norm and config.model.rope_theta == 1e6
    stored = load_file(ROOT / head / "draft" / "model.safetensors")
    assert weights.keys() == stored.keys()
    assert all(torch.equal(weights[name], tensor) for name, tensor in stored.items())
    config.check_target(golden(head).target.config)


@pytest.mark.parametrize("head", HEADS)
def test_what_is_written_reads_back(head: str, tmp_path: Path) -> None:
    config = dataclasses.replace(golden("vanilla").config, markov_head_type=head)
    weights = init_weights(config, seed=1)
    write_draft(tmp_path / "draft", config, weights, torch.float32)
    read_config, read = read_draft(tmp_path / "draft")
    assert read_config == config
    assert read.keys() == weights.keys() == expected_shapes(config).keys()
    assert all(torch.equal(read[name], weights[name]) for name in weights)
    assert not list((tmp_path / "draft").glob("*.part"))


def test_other_spellings_of_fields(fields: dict) -> None:
    plain = DSparkConfig.from_hf(fields)
    for name, other in (
        ("mask_token_id", "dspark_noise_token_id"),
        ("target_layer_ids", "dspark_target_layer_ids"),
        ("markov_rank", "dspark_markov_rank"),
    ):
        fields[other] = fields.pop(name)
    assert DSparkConfig.from_hf(fields) == plain


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["Qwen3ForCausalLM"]}, "is no DSpark draft.*supported: Qwen3DSparkModel"),
        ({"block_size": None}, "'block_size' is missing"),
        ({"block_size": 0}, "at least 1, got 0"),
        ({"target_layer_ids": [2, 0]}, "strictly increasing"),
        ({"target_layer_ids": []}, "not empty"),
        ({"target_layer_ids": [0, 5]}, "possible are -1 .* to 4, all but the last"),
        ({"target_layer_ids": [-2, 1]}, "possible are -1"),
        ({"mask_token_id": 256}, "not in the vocabulary of 256"),
        ({"markov_head_type": "lstm"}, "possible are vanilla, gated, rnn"),
        ({"markov_rank": -1}, "0 .*or more"),
        ({"markov_rank": 0}, "needs a Markov head"),
        ({"markov_rank": "many"}, "makes no sense"),
        ({"draft_vocab_size": 100}, "reduced draft vocabulary is not supported"),
        ({"dspark_bonus_anchor": True}, "dspark_bonus_anchor"),
    ],
)
def test_a_config_that_will_not_do(fields: dict, tmp_path: Path, changes: dict, message: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(fields | changes))
    with pytest.raises(DraftConfigError, match=message) as error:
        read_draft(tmp_path)
    assert "config.json" in str(error.value)


def test_another_target_is_refused_with_every_mismatch() -> None:
    config = golden("vanilla").config
    other = dataclasses.replace(golden("vanilla").target.config, vocab_size=300, num_hidden_layers=8)
    with pytest.raises(DraftConfigError, match="vocab_size is 256, the target's is 300; num_target_layers is 6, .* 8"):
        config.check_target(other)
    wide = ModelConfig("llama", 256, 128, 256, 6, 4, 4, 32, 512)
    with pytest.raises(DraftConfigError, match="hidden_size is 64, the target's is 128"):
        config.check_target(wide)


def test_blocks_up_to_the_trained_one() -> None:
    config = golden("vanilla").config
    for k in (1, 3, 5):
        config.check_num_speculative_tokens(k)
    for k in (0, 6, 7):
        with pytest.raises(DraftConfigError, match="trained for blocks of 5; possible are 1 to 5"):
            config.check_num_speculative_tokens(k)


def test_tensors_that_do_not_fit(tmp_path: Path, fields: dict) -> None:
    weights = load_file(ROOT / "vanilla" / "draft" / "model.safetensors")
    del weights["fc.weight"]
    weights["markov_head.gate_proj.bias"] = torch.zeros(16)
    weights["norm.weight"] = torch.ones(32)
    (tmp_path / "config.json").write_text(json.dumps(fields))
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError) as error:
        read_draft(tmp_path)
    for part in (
        "fc.weight is missing",
        "markov_head.gate_proj.bias is not part of a vanilla draft",
        "norm.weight has shape [32], the config says [64]",
    ):
        assert part in str(error.value)


def test_missing_and_damaged_files(tmp_path: Path, fields: dict) -> None:
    with pytest.raises(DraftConfigError, match="cannot be read"):
        read_draft(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(DraftConfigError, match="holds a JSON list"):
        read_draft(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(CheckpointError, match="no \\*.safetensors"):
        read_draft(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"short")
    with pytest.raises(CheckpointError, match="damaged or cut off"):
        read_draft(tmp_path)


def test_int8_matrices(tmp_path: Path) -> None:
    config, weights = golden("rnn").config, dict(golden("rnn").weights)
    weights["fc.weight"] = weights["fc.weight"].clone()
    weights["fc.weight"][3] = 0.0
    write_draft(tmp_path / "whole", config, weights, torch.float32)
    write_draft(tmp_path / "small", config, weights, torch.int8)
    sizes = [(tmp_path / name / "model.safetensors").stat().st_size for name in ("small", "whole")]
    assert sizes[0] < 0.3 * sizes[1]
    read_config, read = read_draft(tmp_path / "small")
    assert read_config == config and read.keys() == weights.keys()
    for name, weight in weights.items():
        if weight.dim() == 1:
            torch.testing.assert_close(read[name].float(), weight, rtol=0.01, atol=0.0)
        else:
            step = weight.abs().amax(1, keepdim=True) / 127
            assert ((read[name] - weight).abs() <= step * 0.51).all(), name
    assert not read["fc.weight"][3].any()
    stored = load_file(tmp_path / "small" / "model.safetensors")
    del stored["fc.weight.row_factors"]
    save_file(stored, tmp_path / "small" / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"fc\.weight is int8 without the row factors"):
        read_draft(tmp_path / "small")
