"""The bench of the samplers, on the smallest model."""

from __future__ import annotations

import json

import pytest
import torch

from engine.bench.sampling import CASES, measure_prompt_logprobs, measure_sampling
from engine.models import load_model
from runnerscope import main

pytestmark = pytest.mark.slow


def test_every_case_is_measured_on_both_sides() -> None:
    loaded = load_model(
        "tiny-qwen3", dtype=torch.float32, device=torch.device("cpu"), load_format="dummy", skip_tokenizer_init=True
    )
    costs = measure_sampling(loaded, 3)
    assert [(c.case, c.side) for c in costs] == [(case, side) for case in CASES for side in ("V2", "V1")]
    costs += measure_prompt_logprobs(loaded, 20)
    assert [c.side for c in costs[-2:]] == ["V2", "V1"] and all(c.seconds > 0 for c in costs)
    assert all(c.peak_bytes is None for c in costs), "nobody counts a CPU's memory"
    assert costs[-2].chunk_bytes == 4 * 512 * loaded.config.vocab_size


def test_the_command_prints_a_table_or_json(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["bench", "--sampling", "--model", "tiny-qwen3", "--dtype", "float32", "--requests", "2"]
    assert main([*command, "--input-len", "16"]) == 0
    out = capsys.readouterr().out
    assert all(case in out for case in CASES) and "prompt logprobs 5, 16 tokens" in out and "V1 / V2" in out
    assert main([*command, "--input-len", "16", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert len(report["costs"]) == 2 * len(CASES) + 2 and report["logits_bytes"] == 4 * 2 * 384
    for wrong, why in (
        (["--input-len", "1"], "a prompt of 2 tokens"),
        (["--observe"], "--observe"),
        (["--peer", "vllm"], "not --peer; drop it"),
        ([], "needs a CUDA device"),
    ):
        assert main([*command, *wrong]) == 2
        assert why in capsys.readouterr().err
