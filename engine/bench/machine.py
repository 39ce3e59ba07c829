"""What a number was measured on."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch


def cpu_name() -> str:
    """The processor's name as its maker writes it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass  # not Linux
    return platform.processor() or platform.machine()


def multiplies_bfloat16() -> bool:
    """Whether the processor has instructions for products of bfloat16: nobody would serve in float32 on it."""
    try:
        flags = Path("/proc/cpuinfo").read_text()
        return " amx_bf16 " in flags or " avx512_bf16 " in flags
    except OSError:
        return False  # not Linux


def cpu_count() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def device_name(device: torch.device) -> str:
    """The device's own name, and for a CPU how many threads torch uses."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{cpu_name()}, {cpu_count()} processors, {torch.get_num_threads()} torch threads"


def driver_version() -> str:
    """The NVIDIA driver's version, as nvidia-smi tells it; "unknown" where it doesn't."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return said[0] if said else "unknown"


def commit() -> str:
    """The commit of the working tree that this package lies in, `+` if it was changed; "unknown" outside a clone."""
    here = Path(__file__).resolve().parent

    def git(*args: str) -> str:
        return subprocess.run(["git", *args], cwd=here, capture_output=True, text=True, check=True).stdout.strip()

    try:
        head = git("rev-parse", "--short=12", "HEAD")
        return head + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def versions(*distributions: str) -> dict[str, str]:
    """Python's version and those of `distributions`; one that isn't installed is "missing"."""
    found = {"python": platform.python_version()}
    for name in distributions:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "missing"
    return found
