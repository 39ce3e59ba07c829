"""The model that most tests of text and grammars are run with."""

from __future__ import annotations

import pytest

from engine.models import LoadedModel
from tests.engine.tiny_text import raw_bytes, text_model


@pytest.fixture(scope="session")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """A tiny model whose tokens are the bytes; files that need another have a fixture of the same name."""
    return text_model(tmp_path_factory.mktemp("bytes"), raw_bytes())
