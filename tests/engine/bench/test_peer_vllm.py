"""The peer's process, with a package of vllm's name and call signature in vllm's place: no GPU is needed to see what it
would be asked, and with what environment."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from engine.bench import peer_vllm
from engine.bench.workloads import STANDARD
from engine.models import LoadedModel

STAND_IN = """
import json, os
from types import SimpleNamespace as S

class SamplingParams:
    def __init__(self, *, max_tokens, ignore_eos, detokenize, temperature, top_p=1.0, top_k=0):
        assert ignore_eos and not detokenize
        self.n, self.asked = max_tokens, [temperature, top_p, top_k]

class LLM:
    def __init__(self, **keywords):
        with open(os.path.join(keywords["model"], "config.json")) as file:
            config = json.load(file)
        self.log = {"llm": {k: v for k, v in keywords.items() if k != "model"}, "config": config, "runs": [],
                    "v2": os.environ["VLLM_USE_V2_MODEL_RUNNER"], "own": os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"]}

    def generate(self, prompts, params, use_tqdm):
        print("INFO: what vllm says on stdout")
        self.log["runs"].append([[len(p["prompt_token_ids"]), p["prompt_token_ids"][:4], s.n, s.asked]
                                 for p, s in zip(prompts, params)])
        with open(os.environ["STAND_IN_LOG"], "w") as file:
            json.dump(self.log, file)
        short = int(os.environ.get("STAND_IN_SHORT", "0"))
        return [S(outputs=[S(token_ids=[0] * (s.n - short))]) for s in params]
"""


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "vllm.py").write_text(STAND_IN)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(Path.cwd())]))
    monkeypatch.setenv("STAND_IN_LOG", str(tmp_path / "log.json"))
    return tmp_path / "log.json"


@pytest.mark.slow
def test_it_gets_the_same_model_and_the_same_prompts(log: Path, tiny_model: LoadedModel) -> None:
    specs = [STANDARD["AT"].resized(3, 16, 4), STANDARD["C"].resized(2, 20, 5)]
    result = peer_vllm.run_vllm(specs, "v2", 3, tiny_model, 256, 512)
    assert result.side == "vllm V2" and result.to_first_token > 0.1
    timing = result.timings["AT"]
    assert len(timing.seconds) == 3 and timing.wanted_tokens == 12 and timing.steps == 4 and timing.warm_up > 0
    seen = json.loads(log.read_text())
    assert seen["llm"] == {
        "dtype": "bfloat16", "skip_tokenizer_init": True, "load_format": "dummy", "max_num_seqs": 256,
        "max_model_len": 512,
    }  # fmt: skip
    assert seen["config"]["architectures"] == ["Qwen3ForCausalLM"] and seen["config"]["hidden_size"] == 64
    assert (seen["v2"], seen["own"]) == ("1", "0")
    vocab = tiny_model.config.vocab_size
    draws = [spec.draw(number, vocab) for spec in specs for number in range(4)]
    asked = [[1.0, 0.95, 50]] * 4 + [[0.0, 1.0, 0]] * 4
    assert seen["runs"][1:] == [
        [[len(ask.prompt_token_ids), list(ask.prompt_token_ids[:4]), ask.max_tokens, how] for ask in draw.asks]
        for draw, how in zip(draws, asked, strict=True)
    ]
    assert [row[2] for row in seen["runs"][0]] == [1], "one token first, for the start-up time"


@pytest.mark.slow
def test_too_few_tokens_are_an_error(log: Path, tiny_model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAND_IN_SHORT", "1")
    with pytest.raises(RuntimeError, match=r"vllm failed: .*0 tokens instead of 1"):
        peer_vllm.run_vllm([STANDARD["B1"].resized(1, 16, 4)], "v1", 3, tiny_model, 256, 512)


def test_where_it_is_not_installed_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_vllm, "_PEER", "a_package_that_nobody_has")
    with pytest.raises(ValueError, match="not installed here; install it beside this package, or leave --peer out"):
        peer_vllm.check_installed()


def test_a_model_it_cannot_read_is_refused(tiny_model: LoadedModel, tmp_path: Path) -> None:
    from dataclasses import replace

    gguf = replace(tiny_model, load_format="auto", source=tmp_path / "model.gguf")
    with pytest.raises(ValueError, match="is no folder with"):
        peer_vllm.run_vllm([STANDARD["B1"]], "v2", 3, gguf, 256, 512)
