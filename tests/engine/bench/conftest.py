"""A tiny random model, loaded once, and engines on it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from engine import LLM
from engine.bench.runs import EngineRuns
from engine.bench.startup import load
from engine.models import LoadedModel

MODEL = {"model": "tiny-qwen3", "load_format": "dummy", "dtype": "bfloat16", "device": "cpu"}


@pytest.fixture(scope="session")
def tiny_model() -> LoadedModel:
    return load(MODEL)[0]


@pytest.fixture(params=["v1", "v2"])
def engine(request: pytest.FixtureRequest, tiny_model: LoadedModel) -> Iterator[EngineRuns]:
    llm = LLM(
        loaded=tiny_model, skip_tokenizer_init=True, use_v2_model_runner=request.param == "v2", max_num_seqs=8,
        num_gpu_blocks_override=64,
    )  # fmt: skip
    yield EngineRuns(llm)
    llm.close()
