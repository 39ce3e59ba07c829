"""Circumstances in which tests of drafts run, for those that ask for them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kernels import paged_attention


@pytest.fixture
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def few_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 32 interpreted programs a context, nearly all would find nothing to read in contexts this short."""
    monkeypatch.setattr(paged_attention, "_MAX_SPLITS", 4)
