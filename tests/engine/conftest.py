"""The model that most tests of text and grammars are run with, what makes interpreted attention bearable, and a
Ctrl-C that is Python's."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from engine.models import LoadedModel
from kernels import paged_attention
from tests.engine.tiny_text import raw_bytes, text_model


@pytest.fixture(scope="session")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """A tiny model whose tokens are the bytes; files that need another have a fixture of the same name."""
    return text_model(tmp_path_factory.mktemp("bytes"), raw_bytes())


@pytest.fixture
def few_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 32 interpreted programs a context, nearly all would find nothing to read in contexts this short."""
    monkeypatch.setattr(paged_attention, "_MAX_SPLITS", 4)


@pytest.fixture
def python_sigint() -> Iterator[None]:
    """A SIGINT raises KeyboardInterrupt, whatever started these tests."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, previous)
