"""Checks that notebooks print."""

from __future__ import annotations

import contextlib
from importlib.metadata import version

from engine.cli.doctor import checks
from engine.models import DEFAULT_MODEL, resolve_model


def self_check() -> None:
    """Prints one line if all that is needed is here, else a line for each part that fails and what to do about it.

    Fetches the default model if this machine has it not yet. Raises RuntimeError if something needed is missing, so
    that "run all" stops at the first cell.
    """
    failed = []
    with contextlib.suppress(Exception):  # the model's check will say what is wrong
        resolve_model(DEFAULT_MODEL, progress=False)
    for check in checks():
        try:
            check.find()
        except Exception as error:  # noqa: BLE001 - whatever is broken is reported, and the next part is looked at
            if check.needed:
                failed.append(check.name)
            print(f"{'✗' if check.needed else '–'} {check.name}: {error}; {check.remedy}")
    if failed:
        raise RuntimeError(f"not ready: {', '.join(failed)}")
    names = " · ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "jupyterlab"))
    print(f"✓ ready: {names} · device, streams, kernels and model in order · V1 == V2")
