"""Directories with config.json and safetensors: whole, sharded, and broken."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from engine.models import (
    CheckpointError,
    ModelConfigError,
    UnknownArchitectureError,
    load_model,
    read_checkpoint,
)
from engine.models.weights import expected_shapes, weight_views

CPU = torch.device("cpu")
CONFIG = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen2", **CONFIG), dtype=torch.float32)
    model.save_pretrained(tmp_path)
    return tmp_path


def load(path: Path, **kwargs: Any) -> Any:
    return load_model(path, dtype=torch.float32, device=CPU, skip_tokenizer_init=True, **kwargs)


def edit_config(path: Path, **fields: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | fields))


def test_weights_are_those_of_the_file(directory: Path) -> None:
    stored = load_file(directory / "model.safetensors")
    views = weight_views(load(directory).model)
    assert set(views) == set(stored)
    for name, view in views.items():
        assert torch.equal(view, stored[name]), name


def shard(directory: Path) -> None:
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, members in parts.items():
        save_file({name: tensors[name] for name in members}, directory / file)
    weight_map = {name: file for file, members in parts.items() for name in members}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_shards_give_the_same_model(directory: Path) -> None:
    whole = weight_views(load(directory).model)
    shard(directory)
    sharded = weight_views(load(directory).model)
    assert all(torch.equal(sharded[name], tensor) for name, tensor in whole.items())


def test_bfloat16_weights_are_widened(directory: Path) -> None:
    tensors = {name: t.bfloat16() for name, t in load_file(directory / "model.safetensors").items()}
    save_file(tensors, directory / "model.safetensors")
    views = weight_views(load(directory).model)
    assert all(torch.equal(view, tensors[name].float()) for name, view in views.items())


def test_a_missing_shard_is_named(directory: Path) -> None:
    shard(directory)
    (directory / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"files that are not there: model-00002-of-00002\.safetensors"):
        read_checkpoint(directory)


def test_an_index_that_lies_is_named(directory: Path) -> None:
    shard(directory)
    index = directory / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.norm.weight"] = "model-00001-of-00002.safetensors"
    content["weight_map"]["model.layers.0.mlp.up_proj.weight"] = "model-00001-of-00002.safetensors"
    index.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"lacks the tensor '.+' that the index places there"):
        read_checkpoint(directory)
    index.write_text("{}")
    with pytest.raises(CheckpointError, match="has no 'weight_map'"):
        read_checkpoint(directory)


def test_an_index_cannot_lead_out_of_its_directory(directory: Path) -> None:
    shard(directory)
    outside = directory.parent / "outside.safetensors"
    save_file({"model.norm.weight": torch.zeros(32)}, outside)
    index = directory / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.norm.weight"] = "../outside.safetensors"
    index.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"not there: outside\.safetensors"):
        read_checkpoint(directory)


@pytest.mark.parametrize("part", [0.0, 0.001, 0.01, 0.5, 0.999])
def test_a_truncated_file_is_refused_before_anything_is_loaded(directory: Path, part: float) -> None:
    file = directory / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * part)])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: damaged or cut off .*fetch it again"):
        read_checkpoint(directory)


def test_wrong_tensors_are_named(directory: Path) -> None:
    tensors = load_file(directory / "model.safetensors")
    del tensors["model.norm.weight"]
    tensors["model.layers.0.mlp.up_proj.weight"] = torch.zeros(48, 31)
    tensors["model.layers.2.mlp.up_proj.weight"] = torch.zeros(48, 32)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(CheckpointError) as error:
        load(directory)
    message = str(error.value)
    assert "model.norm.weight is missing" in message
    assert "model.layers.0.mlp.up_proj.weight has shape [48, 31], the config says [48, 32]" in message
    assert "model.layers.2.mlp.up_proj.weight is not part of qwen2" in message
    assert "inv_freq" not in message


def test_directories_without_a_model_say_what_they_lack(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"holds neither config\.json .* nor a \.gguf file"):
        read_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="no such file or directory"):
        read_checkpoint(tmp_path / "absent")
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], **CONFIG}))
    with pytest.raises(CheckpointError, match=r"has config\.json but no \*\.safetensors"):
        read_checkpoint(tmp_path)
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(CheckpointError, match=r"Give a \.gguf file, or the directory"):
        read_checkpoint(tmp_path / "notes.txt")
    other = tmp_path / "two"
    other.mkdir()
    for name in ("a.gguf", "b.gguf"):
        (other / name).write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match=r"several GGUF files \(a\.gguf, b\.gguf\)"):
        read_checkpoint(other)


@pytest.mark.parametrize(
    ("fields", "error", "says"),
    [
        ({"architectures": ["MambaForCausalLM"]}, UnknownArchitectureError, "'MambaForCausalLM' is not supported"),
        ({"hidden_act": "gelu"}, ModelConfigError, "hidden_act 'gelu'"),
        ({"use_sliding_window": True, "layer_types": None}, ModelConfigError, "sliding-window"),
        ({"quantization_config": {"quant_method": "gptq"}}, ModelConfigError, r"quantised safetensors \(gptq\)"),
        ({"rope_parameters": {"rope_type": "longrope"}}, ModelConfigError, "'longrope' is not supported; supported"),
        ({"num_key_value_heads": 3}, ModelConfigError, "must be a multiple of num_key_value_heads"),
        ({"num_hidden_layers": 0}, ModelConfigError, "num_hidden_layers must be a positive integer"),
        ({"hidden_size": "big"}, CheckpointError, "a value makes no sense"),
        ({"vocab_size": None}, CheckpointError, "a value makes no sense"),
    ],
)
def test_configs_that_cannot_run_are_refused(
    directory: Path, fields: dict[str, Any], error: type[Exception], says: str
) -> None:
    edit_config(directory, **fields)
    with pytest.raises(error, match=says) as raised:
        load(directory)
    assert "config.json" in str(raised.value)


def test_a_missing_field_and_damaged_json_are_named(directory: Path) -> None:
    config = json.loads((directory / "config.json").read_text())
    del config["hidden_size"]
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelConfigError, match="lacks the field 'hidden_size'"):
        load(directory)
    (directory / "config.json").write_text('{"hidden_size": ')
    with pytest.raises(CheckpointError, match=r"config\.json: not valid JSON"):
        load(directory)
    (directory / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"config\.json: holds a JSON list, an object is wanted"):
        load(directory)


def test_end_of_sequence_ids_come_from_the_generation_config(directory: Path) -> None:
    edit_config(directory, eos_token_id=7)
    assert load(directory).config.eos_token_ids == (7,)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    assert load(directory).config.eos_token_ids == (7, 9)


def test_dummy_weights_need_only_a_config_and_follow_the_seed(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    first, again, other = (load(directory, load_format="dummy", seed=seed) for seed in (1, 1, 2))
    a, b, c = (weight_views(loaded.model) for loaded in (first, again, other))
    assert set(a) == set(expected_shapes(first.config))
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not any(torch.equal(a[name], c[name]) for name in a)
    with pytest.raises(ValueError, match="load_format='pickle'"):
        load(directory, load_format="pickle")
