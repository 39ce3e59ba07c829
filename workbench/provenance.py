"""What made a recording: the model, the device, the code and the configuration."""

from __future__ import annotations

import dataclasses
import datetime
from pathlib import Path
from typing import Any

import torch

from engine import LLM
from engine.bench.machine import commit, device_name
from engine.snapshot import speculation_view
from kernels import resolve_form

from .codec import encode


def describe(llm: LLM) -> dict[str, Any]:
    """The `meta` of a recording of this engine, in JSON values."""
    device = llm.config.torch_device
    return {
        "model": Path(llm.loaded.name).name,
        "device": device_name(device) if device.type == "cuda" else str(device),
        "kernel_backend": resolve_form(llm.config.kernel_backend, torch.empty(0, device=device)),
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "config": dataclasses.asdict(llm.config),
        "speculation": encode(speculation_view(llm.core)),
    }
