"""From `speculative_config` to a decoder, or to an error that says what fits."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.config import ConfigError
from engine.dspark.calibration import Calibration
from engine.dspark.decoder import DSparkDecoder, LookupDecoder
from engine.dspark.factory import build_dspark_decoder
from engine.models import load_model
from engine.spec_decode import shipped
from engine.speculative_config import SpeculativeConfig
from tests.engine.dspark.golden import ROOT

DRAFT = ROOT / "rnn" / "draft"


def build(max_model_len: int = 128, **spec: Any) -> DSparkDecoder | LookupDecoder:
    target = load_model(
        ROOT / "rnn" / "target", dtype=torch.float32, device=torch.device("cpu"), skip_tokenizer_init=True
    )
    config = SimpleNamespace(
        speculative_config=SpeculativeConfig(method="dspark", **spec), max_model_len=max_model_len,
        kernel_backend="auto", torch_device=torch.device("cpu"), max_num_batched_tokens=64,
    )  # fmt: skip
    return build_dspark_decoder(config, target, 9)  # type: ignore[arg-type]


def test_a_trained_draft() -> None:
    decoder = build(model=str(DRAFT))
    assert isinstance(decoder, DSparkDecoder)
    assert (decoder.num_drafts, decoder.target_layer_ids, decoder.draft_logits) == (5, (0, 2, 4), None)
    assert decoder.confidences is not None and decoder.confidences.shape == (9, 5)
    assert decoder.kv_bytes_per_token() == 2 * 2 * 2 * 16 * 4
    drawn = build(model=str(DRAFT), num_speculative_tokens=3, draft_sample_method="probabilistic")
    assert drawn.num_drafts == 3 and drawn.draft_logits is not None and drawn.draft_logits.shape == (9, 3, 256)


def test_no_weights() -> None:
    decoder = build(draft="lookup", num_speculative_tokens=4, prompt_lookup_min=2)
    assert isinstance(decoder, LookupDecoder) and decoder.num_drafts == 4


def test_its_calibration_comes_along(tmp_path: Path) -> None:
    path = tmp_path / "draft"
    shutil.copytree(DRAFT, path)
    Calibration((2.0,) * 5, 10, (), ()).save(path)
    decoder = build(model=str(path))
    assert isinstance(decoder, DSparkDecoder) and decoder._divisors is not None
    assert decoder._divisors.tolist() == [2.0] * 5
    Calibration((2.0,) * 3, 10, (), ()).save(path)
    with pytest.raises(ConfigError, match="calibrated for 3 positions, and a block has 5"):
        build(model=str(path))
    (path / "calibration.json").write_text("{")
    with pytest.raises(ConfigError, match=r"calibration\.json"):
        build(model=str(path))


def test_what_does_not_fit(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="num_speculative_tokens=7: this draft was trained for blocks of 5"):
        build(model=str(DRAFT), num_speculative_tokens=7)
    with pytest.raises(ConfigError, match=r"knows 512 positions, fewer than max_model_len=1024"):
        build(max_model_len=1024, model=str(DRAFT))
    with pytest.raises(ConfigError, match="is no DSpark draft this engine reads; supported: Qwen3DSparkModel"):
        build(model=str(ROOT / "rnn" / "target"))


def test_the_draft_that_comes_with_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipped, "HEADS", tmp_path)
    with pytest.raises(ConfigError, match="'dspark': no head is known for 'target'; give model="):
        build()
    shutil.copytree(DRAFT, tmp_path / "target" / "dspark")
    decoder = build(num_speculative_tokens=2)
    assert isinstance(decoder, DSparkDecoder) and decoder.num_drafts == 2
