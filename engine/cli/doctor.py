"""`runnerscope doctor`: is this machine ready? One line a check; what fails says what to do."""

from __future__ import annotations

import argparse
import platform
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from .terminal import printable

_LAB = ("jupyterlab", "ipywidgets", "anywidget", "plotly")


@dataclass(frozen=True)
class Check:
    """One thing that should hold. `find` returns what it found, or raises; `remedy` is shown when it raises."""

    name: str
    find: Callable[[], str]
    remedy: str
    needed: bool = True
    """An optional part that is missing is shown, but doesn't fail the whole."""


def add_parser(commands: Any) -> None:
    """Adds the command to argparse's subparsers."""
    parser = commands.add_parser("doctor", help="check this machine: versions, device, kernels, model, both runners")
    parser.set_defaults(handler=run)


def run(arguments: argparse.Namespace) -> int:
    """Prints a line a check. 0 if all that is needed holds, else 1."""
    failed = 0
    for check in checks():
        try:
            mark, text = "✓", check.find()
        except Exception as error:  # noqa: BLE001 - a doctor reports whatever is broken and goes on
            mark = "✗" if check.needed else "–"
            failed += check.needed
            reason = " ".join(str(error).split()) or type(error).__name__
            text = f"{reason}; {check.remedy}"
        print(f"{mark} {check.name:<12} {printable(text)}", flush=True)
    return 1 if failed else 0


def checks() -> list[Check]:
    """All checks, cheap ones first."""
    return [
        Check("python", _python, "install Python 3.11 or newer"),
        Check("packages", _packages, "run: pip install -e . (in a clone: make model)"),
        Check("triton", _triton, "optional: pip install 'runnerscope[gpu]' (else the torch forms run)", needed=False),
        Check("workbench", _workbench, "for `runnerscope lab`: pip install 'runnerscope[lab]'", needed=False),
        Check("device", _device, "set device='cpu', or repair the driver"),
        Check("streams", _streams, "torch can't run work on this device's streams; set device='cpu'"),
        Check("kernels", _kernels, "the kernel forms disagree: report it; meanwhile use kernel_backend='loop'"),
        Check("model", _model, "run: runnerscope model"),
        Check("V1 == V2", _runners, "the runners disagree here: please report it with this output"),
    ]


def _python() -> str:
    return f"{platform.python_version()} on {platform.system()} {platform.machine()}"


def _packages() -> str:
    names = ("torch", "numpy", "safetensors", "transformers", "tokenizers", "huggingface_hub", "gguf", "jinja2")
    return " · ".join(f"{name} {_version(name)}" for name in names)


def _triton() -> str:
    import torch
    import triton

    use = "compiled for CUDA" if torch.cuda.is_available() else "interpreted on request (no CUDA device)"
    return f"{triton.__version__}, {use}"


def _workbench() -> str:
    return " · ".join(f"{name} {_version(name)}" for name in _LAB)


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        raise ModuleNotFoundError(f"{name} isn't installed") from None


def _device() -> str:
    from engine import EngineConfig
    from engine.bench.machine import device_name

    config = EngineConfig()
    return f"{config.torch_device.type}: {device_name(config.torch_device)}; weights in {config.torch_dtype}"


def _streams() -> str:
    """Work on one stream, awaited by the other, seen by the host only after the event behind it."""
    import torch

    from engine import EngineConfig
    from engine.device import Device
    from engine.hooks import Hooks

    device = Device(EngineConfig().torch_device, Hooks("doctor"))
    try:
        numbers = device.zeros(1000, dtype=torch.int64)
        total: list[torch.Tensor] = []
        device.compute.submit("add", numbers.add_, 1)
        device.copy.wait_event(device.compute.record_event(for_host=False))
        device.copy.submit("sum", lambda: total.append(numbers.sum()))
        device.copy.record_event().synchronize()
        if int(total[0]) != 1000:
            raise RuntimeError(f"work on the copy stream saw {int(total[0])} instead of 1000")
    finally:
        device.close()
    return "compute → copy in order" + ("" if device.is_cuda else " (worker threads: this CPU's streams)")


def _kernels() -> str:
    """The form that "auto" takes here against the loop, the oracle, on a few rows."""
    import torch

    from engine import EngineConfig
    from kernels import gumbel_sample, resolve_form

    device = EngineConfig().torch_device
    logits = torch.randn(4, 1000, generator=torch.Generator().manual_seed(0)).to(device)
    rows = torch.arange(4, dtype=torch.int32, device=device)
    temperature = torch.tensor([0.0, 0.7, 1.0, 1.3], device=device)
    seeds = torch.arange(4, dtype=torch.int64, device=device)
    form = resolve_form("auto", logits)
    picked, oracle = (
        gumbel_sample(logits, rows, temperature, seeds, seeds + 10, purpose=0, apply_temperature=True, form=f).tolist()
        for f in (form, "loop")
    )
    if picked != oracle:
        raise RuntimeError(f"form {form!r} chose tokens {picked}, the loop {oracle}")
    return f"form {form!r} == form 'loop'"


def _model() -> str:
    from engine.models import DEFAULT_MODEL, verify_cached

    return f"{DEFAULT_MODEL}: {verify_cached(DEFAULT_MODEL)}"


def _runners() -> str:
    """Four greedy tokens of a tiny model with random weights, on both runners."""
    from engine import LLM, SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    tokens = {}
    for runner, v2 in (("V1", False), ("V2", True)):
        llm = LLM("tiny-llama", load_format="dummy", skip_tokenizer_init=True, use_v2_model_runner=v2)
        outputs = llm.generate([{"prompt_token_ids": [1, 2, 3, 4, 5]}], params, use_tqdm=False)
        tokens[runner] = list(outputs[0].outputs[0].token_ids)
    if tokens["V1"] != tokens["V2"] or len(tokens["V1"]) != 4:
        raise RuntimeError(f"V1 made {tokens['V1']}, V2 {tokens['V2']}")
    return f"both made tokens {tokens['V1']} of a tiny random model"
