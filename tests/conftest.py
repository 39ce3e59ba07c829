"""What every test shares: threads, hypothesis' profiles, the real model, and who may run where."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

# Two cores are what the project promises to be quick on; more would only hide a slow test.
NUM_THREADS = int(os.environ.get("OMP_NUM_THREADS") or min(2, os.cpu_count() or 1))
torch.set_num_threads(NUM_THREADS)

_COMMON = {"deadline": None, "print_blob": True, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("local", **_COMMON)
# A red run must be red again when somebody looks at it.
settings.register_profile("ci", derandomize=True, **_COMMON)
settings.load_profile("ci" if os.environ.get("CI") else "local")


def pytest_collection_finish(session: pytest.Session) -> None:
    """What is imported stays: a collection, of which closing an engine makes one, need not look at it again."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """A test has the threads that are meant for it, and one that is marked `gpu` needs a CUDA device.

    `runnerscope bench` sets the process's threads. Left at two in each of two workers on two cores, they wait for each
    other: what came behind such a test in its worker took up to sixty times as long.
    """
    torch.set_num_threads(NUM_THREADS)
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device; this torch sees none")


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The default model's checkpoint, fetched into the user's cache if need be. No model is a failure, not a skip."""
    from engine.models import DEFAULT_MODEL, resolve_model

    return resolve_model(DEFAULT_MODEL)
