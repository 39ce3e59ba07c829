"""GGUF files: every type, every family, and every way of being broken."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from engine.attention import allocate_kv_cache
from engine.models import CheckpointError, ModelConfigError, UnknownArchitectureError, load_model, read_checkpoint
from engine.models.gguf_file import SUPPORTED_TYPES
from tests.engine.attention.batches import make_batch
from tests.engine.models.gguf_files import fill, write_gguf

CPU = torch.device("cpu")
CONFIG = {
    "vocab_size": 64,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}


def reference(model_type: str = "llama", **fields: Any) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **{**CONFIG, **fields})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "bias" in name:
                parameter.normal_(float("norm" in name), 0.3)
            else:
                parameter.normal_(0.0, parameter.shape[-1] ** -0.5)
    return model


def logits_of(path: Path, ids: torch.Tensor) -> torch.Tensor:
    model = load_model(path, dtype=torch.float32, device=CPU, skip_tokenizer_init=True).model
    positions, metadata = make_batch([(0, len(ids))], [[1, 2, 3, 4]], 8)
    cache = allocate_kv_cache(model.config, 5, 8, torch.float32, CPU)
    return model.compute_logits(model.forward(ids, positions, metadata, cache))


def check_against_transformers(path: Path, model: Any) -> None:
    ids = torch.randint(0, 64, (20,), generator=torch.Generator().manual_seed(2), dtype=torch.int32)
    with torch.inference_mode():
        expected = model(ids.long()[None]).logits[0]
    torch.testing.assert_close(logits_of(path, ids), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("model_type", "fields"),
    [
        ("llama", {}),
        ("llama", {"attention_bias": True, "num_key_value_heads": 4}),
        ("qwen2", {}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen3", {"head_dim": 32}),
    ],
)
def test_families_equal_the_model_the_file_was_made_from(
    model_type: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    model = reference(model_type, **fields)
    path = write_gguf(tmp_path / "m.gguf", model)
    for name, tensor in read_checkpoint(path).tensors():
        assert torch.equal(tensor, model.state_dict()[name]), name
    check_against_transformers(path, model)


@pytest.mark.parametrize("kind", SUPPORTED_TYPES)
def test_types_equal_transformers_on_the_dequantised_weights(kind: str, tmp_path: Path) -> None:
    model = reference()
    path = write_gguf(tmp_path / "m.gguf", model, kind)
    tensors = dict(read_checkpoint(path).tensors())
    if kind not in ("Q4_K", "Q6_K"):  # their blocks are random
        error = {"F32": 0.0, "F16": 1e-3, "BF16": 8e-3, "Q8_0": 1e-2, "Q4_0": 0.15, "Q4_1": 0.12}[kind]
        original = model.state_dict()["model.layers.1.self_attn.q_proj.weight"]
        found = tensors["model.layers.1.self_attn.q_proj.weight"]
        assert (found - original).abs().max() <= error * original.abs().max()
    fill(model, tensors)
    check_against_transformers(path, model)


def test_llama3_scaling_comes_back_from_the_divisors(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    model = reference(rope_theta=500000.0, rope_scaling=dict(scaling))
    plain = 1.0 / 500000.0 ** (torch.arange(0, 64, 2).float() / 64)
    divisors = (plain / model.model.rotary_emb.inv_freq).numpy()
    path = write_gguf(tmp_path / "m.gguf", model, tensors={"rope_freqs.weight": divisors})
    assert read_checkpoint(path).config.rope_scaling == scaling
    check_against_transformers(path, model)
    write_gguf(path, model, tensors={"rope_freqs.weight": divisors[::-1].copy()})
    with pytest.raises(ModelConfigError, match="rope_freqs"):
        read_checkpoint(path)


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_scaling_of_the_header(kind: str, tmp_path: Path) -> None:
    scaling = {"rope_type": kind, "factor": 4.0, "original_max_position_embeddings": 16}
    model = reference(rope_scaling=dict(scaling))
    prefix = "llama.rope.scaling"
    fields = {f"{prefix}.type": kind, f"{prefix}.factor": 4.0, f"{prefix}.original_context_length": 16}
    check_against_transformers(write_gguf(tmp_path / "m.gguf", model, fields=fields), model)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A whole, valid file."""
    model = reference(hidden_size=64, intermediate_size=64, num_hidden_layers=1)
    return write_gguf(tmp_path_factory.mktemp("gguf") / "m.gguf", model).read_bytes()


def broken(tmp_path: Path, data: bytes) -> Path:
    path = tmp_path / "broken.gguf"
    path.write_bytes(data)
    return path


def test_cut_off_anywhere_is_a_clear_error(small: bytes, tmp_path: Path) -> None:
    header = small.index(b"output_norm.weight")
    lengths = [0, 3, 4, 7, 20, *range(24, header + 64, 37), len(small) // 2, len(small) - 1]
    for length in lengths:
        path = broken(tmp_path, small[:length])
        with pytest.raises(CheckpointError, match=r"broken\.gguf: .*(not a GGUF|cut off|damaged)") as error:
            read_checkpoint(path)
        assert "fetch it again" in str(error.value)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda d: b"GGML" + d[4:], "not a GGUF file"),
        (lambda d: d[:4] + struct.pack("<I", 1) + d[8:], "version 1 is not supported"),
        (lambda d: d[:8] + struct.pack("<Q", 1 << 60) + d[16:], "cut off or damaged"),
        (lambda d: d[:16] + struct.pack("<Q", 1 << 60) + d[24:], "cut off or damaged"),
        (lambda d: d[:24] + struct.pack("<Q", 1 << 62) + d[32:], "cut off or damaged"),
        (lambda d: d.replace(b"blk.0.attn_q.weight", b"blk.0.attn_k.weight"), "two tensors named"),
        (lambda d: d.replace(b"token_embd.weight", b"token_embx.weight"), "no tensor 'token_embd.weight'"),
        (lambda d: d.replace(b"llama.block_count", b"llama.block_kount"), "lacks the field llama.block_count"),
    ],
)
def test_damage_is_named(small: bytes, tmp_path: Path, change: Any, says: str) -> None:
    changed = change(small)
    assert changed != small
    with pytest.raises((CheckpointError, ModelConfigError), match=says):
        read_checkpoint(broken(tmp_path, changed))


def test_no_byte_of_the_header_can_bring_another_kind_of_error(small: bytes, tmp_path: Path) -> None:
    """Flip bytes all over the header: each file loads, or is refused with an error that names it."""
    header = small.index(b"output_norm.weight") + 64
    rng = np.random.default_rng(0)
    refused = 0
    for position in rng.integers(0, header, 250):
        data = bytearray(small)
        data[position] ^= int(rng.integers(1, 256))
        path = broken(tmp_path, bytes(data))
        try:
            load_model(path, dtype=torch.float32, device=CPU, skip_tokenizer_init=True)
        except (CheckpointError, ModelConfigError, UnknownArchitectureError) as error:
            assert "broken.gguf" in str(error)
            refused += 1
    assert refused > 50


def test_unknown_architecture_lists_the_known_ones(small: bytes, tmp_path: Path) -> None:
    path = broken(tmp_path, small.replace(b"llama", b"bloom"))
    with pytest.raises(UnknownArchitectureError, match=r"'bloom' is not supported\. Supported: llama .*qwen2 .*qwen3"):
        load_model(path, dtype=torch.float32, device=CPU)


def test_an_unsupported_type_lists_the_supported_ones(tmp_path: Path) -> None:
    model = reference()
    writer_type = gguf.GGMLQuantizationType.Q5_0
    path = write_gguf(tmp_path / "m.gguf", model)
    data = path.read_bytes()
    at = data.index(b"blk.0.attn_q.weight") + len(b"blk.0.attn_q.weight") + 4 + 16
    path.write_bytes(data[:at] + struct.pack("<I", writer_type) + data[at + 4 :])
    with pytest.raises(CheckpointError, match=r"'blk\.0\.attn_q\.weight' is of type Q5_0; supported: F32, F16, BF16"):
        read_checkpoint(path)


def test_missing_extra_and_misshapen_tensors_are_named(tmp_path: Path) -> None:
    model = reference()
    down, extra = np.zeros((256, 255), np.float32), np.zeros(3, np.float32)
    tensors = {"blk.1.ffn_down.weight": down, "blk.0.extra.weight": extra}
    path = write_gguf(tmp_path / "m.gguf", model, drop="blk.1.ffn_down.weight", tensors=tensors)
    with pytest.raises(CheckpointError) as error:
        load_model(path, dtype=torch.float32, device=CPU)
    assert "blk.0.extra.weight is not part of llama" in str(error.value)
    assert "model.layers.1.mlp.down_proj.weight has shape [256, 255], the config says [256, 256]" in str(error.value)
    path = write_gguf(tmp_path / "m.gguf", model, drop="output_norm.weight")
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight is missing"):
        load_model(path, dtype=torch.float32, device=CPU)
