"""From a process to its first token, in parts. As a program: once, in a fresh process whose disk caches are warm."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from engine import LLM, SamplingParams
from engine.config import EngineConfig
from engine.models import LoadedModel, load_model


@dataclass(frozen=True)
class StartUp:
    """Seconds. `process`: from the process's start until all was imported; None if others did it before.

    `engine`: KV cache, runner and graphs; `capture`, the graphs alone, is part of it.
    """

    process: float | None
    weights: float
    engine: float
    capture: float
    first_token: float

    @property
    def total(self) -> float:
        """To the first token; `capture` is inside `engine`."""
        return (self.process or 0.0) + self.weights + self.engine + self.first_token


def load(model_keywords: Mapping[str, Any]) -> tuple[LoadedModel, float]:
    """The weights on their device, and the seconds it took. Keywords: model, load_format, dtype, device, seed."""
    begin = time.perf_counter()
    config = EngineConfig.from_kwargs(skip_tokenizer_init=True, **model_keywords)
    loaded = load_model(
        config.model, dtype=config.torch_dtype, device=config.torch_device, load_format=config.load_format,
        seed=config.seed, skip_tokenizer_init=True,
    )  # fmt: skip
    _finish(config.torch_device)
    return loaded, time.perf_counter() - begin


def start(
    loaded: LoadedModel, weights: float, process: float | None, keywords: Mapping[str, Any], prompt: list[int]
) -> tuple[LLM, StartUp]:
    """An engine on `loaded`, taken to the first token of `prompt`. `keywords` are LLM's, without the model's."""
    llm, (built, capture) = build(loaded, {"skip_tokenizer_init": True, **keywords})
    begin = time.perf_counter()
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
    llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    return llm, StartUp(process, weights, built, capture, time.perf_counter() - begin)


def build(loaded: LoadedModel, keywords: Mapping[str, Any]) -> tuple[LLM, tuple[float, float]]:
    """An engine on `loaded`; the seconds until it was made, and of them those that capturing its graphs took."""
    begin = time.perf_counter()
    llm = LLM(loaded=loaded, **keywords)
    _finish(llm.config.torch_device)
    # A runner that captures graphs when it is made says here how long that took.
    return llm, (time.perf_counter() - begin, float(getattr(llm.core.runner, "capture_seconds", 0.0)))


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def start_again(model_keywords: Mapping[str, Any], keywords: Mapping[str, Any], prompt: list[int]) -> StartUp:
    """The same start in a process of its own, from its first instruction on. RuntimeError with its last line if it
    fails."""
    ask = {"begin": time.time(), "model": dict(model_keywords), "engine": dict(keywords), "prompt": prompt}
    command = [sys.executable, "-m", "engine.bench.startup"]
    done = subprocess.run(command, input=json.dumps(ask), capture_output=True, text=True, check=False)
    if done.returncode:
        why = (done.stderr.strip() or "it said nothing").splitlines()[-1]
        raise RuntimeError(f"a fresh process could not start the engine: {why}")
    return StartUp(**json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    """Reads what to start from stdin, writes a StartUp as JSON to stdout."""
    ask = json.loads(sys.stdin.read())
    process = time.time() - ask["begin"]
    loaded, weights = load(ask["model"])
    llm, startup = start(loaded, weights, process, ask["engine"], ask["prompt"])
    llm.close()
    print(json.dumps(asdict(startup)))


if __name__ == "__main__":
    main()
