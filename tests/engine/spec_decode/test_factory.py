"""Which drafter a configuration gives, and what it says when there is none."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import ConfigError, SpeculativeConfig
from engine.config import EngineConfig
from engine.dspark import read_draft
from engine.models import ModelNotFoundError, loader
from engine.spec_decode import DraftModelDecoder, NgramDecoder, shipped
from engine.spec_decode.factory import build_spec_decoder
from engine.spec_decode.mtp import MtpDecoder
from engine.spec_decode.mtp_checkpoint import init_weights, mtp_config, read_mtp, write_mtp
from tests.engine.spec_decode.rounds import model


def build(spec: dict[str, Any] | None, **fields: Any) -> Any:
    config = EngineConfig(model="tiny-llama", device="cpu", load_format="dummy", max_model_len=64, **fields)
    # Set behind its check of what the runners of this build can do.
    object.__setattr__(config, "speculative_config", None if spec is None else SpeculativeConfig.from_mapping(spec))
    return build_spec_decoder(config, model(), num_rows=4)


def test_none() -> None:
    assert build(None) is None
    assert build({"method": "dspark", "draft": "lookup", "num_speculative_tokens": 2}) is None


def test_ngram() -> None:
    decoder = build({"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3})
    assert isinstance(decoder, NgramDecoder) and decoder.on_host
    assert decoder.num_drafts == 2 and decoder.draft_logits is None and decoder.kv_bytes_per_token() == 0


@pytest.mark.parametrize("method", ["greedy", "probabilistic"])
def test_draft_model(method: str) -> None:
    spec = {"method": "draft_model", "model": "tiny-qwen3", "num_speculative_tokens": 3, "draft_sample_method": method}
    decoder = build(spec)
    assert isinstance(decoder, DraftModelDecoder) and not decoder.on_host and decoder.kv_bytes_per_token() > 0
    assert decoder.num_drafts == 3
    shape = None if decoder.draft_logits is None else tuple(decoder.draft_logits.shape)
    assert shape == (None if method == "greedy" else (4, 3, 384))


def test_a_draft_model_that_does_not_go_with_the_target(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="nowhere-1b"):
        build({"method": "draft_model", "model": "nowhere-1b", "num_speculative_tokens": 3})
    tiny = json.loads((Path(loader.__file__).parent / "configs" / "tiny-llama.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**tiny, "vocab_size": 100}))
    with pytest.raises(
        ConfigError, match="for the target 'tiny-llama': its vocabulary has 100 tokens, the target's 384"
    ):
        build({"method": "draft_model", "model": str(tmp_path), "num_speculative_tokens": 3})


def test_mtp(tmp_path: Path) -> None:
    config = mtp_config(model().config)
    write_mtp(tmp_path, config, init_weights(config, 0), torch.float32)
    decoder = build({"method": "mtp", "model": str(tmp_path)})
    assert isinstance(decoder, MtpDecoder) and decoder.num_drafts == 1 and not decoder.on_host
    with pytest.raises(ModelNotFoundError, match="speculative_config model '/no/head': no such file"):
        build({"method": "mtp", "model": "/no/head"})
    with pytest.raises(ConfigError, match="'mtp': no head is known for 'tiny-llama'; give model="):
        build({"method": "mtp"})
    other = dataclasses.replace(config, vocab_size=100)
    write_mtp(tmp_path, other, init_weights(other, 0), torch.float32)
    with pytest.raises(ConfigError, match="this MTP head was made for another model: vocab_size is 100"):
        build({"method": "mtp", "model": str(tmp_path)})


def test_a_head_that_comes_with_the_package_is_found_by_the_targets_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shipped, "HEADS", tmp_path)
    with pytest.raises(ConfigError, match="no head is known for 'tiny-llama'.* package comes one for no model"):
        build({"method": "mtp"})
    config = mtp_config(model().config)
    write_mtp(tmp_path / "Tiny-Llama" / "mtp", config, init_weights(config, 0), torch.float32)
    assert isinstance(build({"method": "mtp"}), MtpDecoder)
    for name in ("tiny-llama", "tiny-llama.Q4_1", "tiny-llama-BF16", "Tiny-Llama.f16"):
        found = shipped.shipped_head("mtp", dataclasses.replace(model(), name=name))
        assert found == tmp_path / "Tiny-Llama" / "mtp"
    for name in ("tiny-llama-2", "tiny", "tiny-llama-chat", "q4_1"):
        with pytest.raises(ConfigError, match="With the package comes one for 'Tiny-Llama'"):
            shipped.shipped_head("mtp", dataclasses.replace(model(), name=name))
    with pytest.raises(ConfigError, match="'dspark': no head is known for 'tiny-llama'.*draft='lookup'.*for no model"):
        shipped.shipped_head("dspark", model())
    # One that lies there under the name of another model is not taken on trust.
    other = dataclasses.replace(config, vocab_size=100)
    write_mtp(tmp_path / "Tiny-Llama" / "mtp", other, init_weights(other, 0), torch.float32)
    with pytest.raises(ConfigError, match="made for another model: vocab_size is 100"):
        build({"method": "mtp"})


def test_what_comes_with_the_package_is_small_and_can_be_read() -> None:
    heads = [path for method in ("dspark", "mtp") for path in shipped.shipped_heads(method).values()]
    assert sum(file.stat().st_size for file in shipped.HEADS.rglob("*") if file.is_file()) <= 16 * 2**20
    for path in heads:
        assert (path / "README.md").is_file()
        _, weights = read_mtp(path) if path.name == "mtp" else read_draft(path)
        assert all(bool(tensor.isfinite().all()) for tensor in weights.values())
