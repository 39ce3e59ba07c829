"""The peer: vLLM itself on the same prompts, in a process of its own. As a program: that process.

vLLM is no dependency of this project; where it is not installed there is no peer.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from engine.models import LoadedModel

from .measure import Timing
from .workload import Workload
from .workloads import WorkloadSpec

_PEER = "vllm"
_ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
"""Its engine core in the caller's process: not its default, but its best offline figure."""


@dataclass(frozen=True)
class PeerResult:
    """Seconds from the process's start to the first token, and what it did on each workload, by name."""

    side: str
    to_first_token: float
    timings: dict[str, Timing]


def check_installed() -> None:
    """Raises ValueError if vLLM can't be imported here."""
    if importlib.util.find_spec(_PEER) is None:
        raise ValueError("--peer vllm: vllm is not installed here; install it beside this package, or leave --peer out")


def run_vllm(
    specs: Sequence[WorkloadSpec], runner: str, repeats: int, loaded: LoadedModel, max_num_seqs: int, max_model_len: int
) -> PeerResult:
    """vLLM with its runner `runner` ("v1" or "v2") and its defaults otherwise, on the runs that ours get too.

    Raises ValueError for a model that it can't be given, RuntimeError with vLLM's last line if it fails.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ask = {
            "begin": time.time(),
            "specs": [asdict(spec) for spec in specs],
            "repeats": repeats,
            "vocab_size": loaded.config.vocab_size,
            "llm": _model(loaded, folder) | {"max_num_seqs": max_num_seqs, "max_model_len": max_model_len},
            "answer": str(folder / "answer.json"),
        }
        environment = os.environ | _ENVIRONMENT | {"VLLM_USE_V2_MODEL_RUNNER": str(int(runner == "v2"))}
        command = [sys.executable, "-m", "engine.bench.peer_vllm"]
        done = subprocess.run(
            command, input=json.dumps(ask), capture_output=True, text=True, env=environment, check=False
        )
        if done.returncode:
            raise RuntimeError(f"vllm failed: {(done.stderr.strip() or 'it said nothing').splitlines()[-1]}")
        answer = json.loads((folder / "answer.json").read_text(encoding="utf-8"))
    timings = {
        spec.name: Timing(tuple(seconds[1:]), seconds[0], spec.steps, spec.output_tokens, ())
        for spec, seconds in zip(specs, answer["seconds"], strict=True)
    }
    return PeerResult(f"vllm {runner.upper()}", answer["to_first_token"], timings)


def _model(loaded: LoadedModel, folder: Path) -> dict[str, Any]:
    """vLLM's keywords for the same model: the same checkpoint, or random weights of the same config."""
    dtype = str(loaded.model.embed_tokens.weight.dtype).removeprefix("torch.")
    common = {"dtype": dtype, "skip_tokenizer_init": True}
    if loaded.load_format == "dummy":
        (folder / "config.json").write_text(json.dumps(loaded.config.to_hf()), encoding="utf-8")
        return common | {"model": str(folder), "load_format": "dummy"}
    if loaded.source is None or not (loaded.source / "config.json").is_file():
        raise ValueError(
            f"--peer vllm: {loaded.name!r} is no folder with config.json and safetensors; "
            "give such a checkpoint, or --load-format dummy"
        )
    return common | {"model": str(loaded.source)}


def _serve(ask: Mapping[str, Any]) -> dict[str, Any]:
    """In the peer's process: the seconds of each run of each workload, the warm-up first."""
    vllm = importlib.import_module(_PEER)
    specs = [WorkloadSpec(**_tuples(spec)) for spec in ask["specs"]]
    llm = vllm.LLM(**ask["llm"])

    def run(spec: WorkloadSpec, workload: Workload) -> float:
        prompts = [{"prompt_token_ids": list(one.prompt_token_ids)} for one in workload.asks]
        params = [
            vllm.SamplingParams(max_tokens=one.max_tokens, ignore_eos=True, detokenize=False, **spec.sampling)
            for one in workload.asks
        ]
        begin = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - begin
        made = sum(len(output.outputs[0].token_ids) for output in outputs)
        if made != workload.wanted_tokens:
            raise RuntimeError(f"{spec.name}: vllm made {made} tokens instead of {workload.wanted_tokens}")
        return seconds

    vocab_size = ask["vocab_size"]
    run(specs[0], Workload("first token", (specs[0].first_ask(vocab_size),)))
    to_first_token = time.time() - ask["begin"]
    seconds = [[run(spec, spec.draw(number, vocab_size)) for number in range(ask["repeats"] + 1)] for spec in specs]
    return {"to_first_token": to_first_token, "seconds": seconds}


def _tuples(spec: Mapping[str, Any]) -> dict[str, Any]:
    """JSON has no tuples."""
    return {key: tuple(value) if isinstance(value, list) else value for key, value in spec.items()}


def main() -> None:
    """Reads what to run from stdin and writes the answer where it says: vLLM logs to stdout."""
    ask = json.loads(sys.stdin.read())
    Path(ask["answer"]).write_text(json.dumps(_serve(ask)), encoding="utf-8")


if __name__ == "__main__":
    main()
