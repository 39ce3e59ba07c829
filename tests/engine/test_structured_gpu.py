"""Grammars with drafts on a CUDA device: the answers without drafts, and no wait but the grammars' own."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
import torch

from engine import LLM, SamplingParams
from engine.hooks import Event
from engine.models import LoadedModel, Tokenizer, load_model
from tests.engine.engine_helpers import EOS
from tests.engine.grammars import token_of
from tests.engine.test_engine_gpu import ENGINE, MODEL
from tests.engine.tiny_text import raw_bytes

pytest.importorskip("xgrammar")
pytestmark = pytest.mark.gpu
REGEX = "([a-d]{3}[0-9]){12}"
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3}


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    """A vocabulary of 151,936 ids, of which a byte each has the first ones."""
    model = load_model(
        MODEL, dtype=torch.float32, device=torch.device("cuda"), load_format="dummy", skip_tokenizer_init=True
    )
    return dataclasses.replace(model, tokenizer=Tokenizer(raw_bytes(), {}, None, [EOS]))


def requests(temperature: float) -> tuple[list[dict[str, list[int]]], list[SamplingParams]]:
    """Texts that repeat themselves; every other one is held to a grammar."""
    prompts = [{"prompt_token_ids": [token_of(char) for char in "abcd"[i % 3 :] * (3 + 9 * i)]} for i in range(8)]
    free = SamplingParams(temperature=temperature, seed=3, max_tokens=40, ignore_eos=True)
    held = SamplingParams(
        temperature=temperature, seed=3, max_tokens=60, structured_outputs={"regex": REGEX}, logprobs=1
    )
    return prompts, [held if i % 2 else free for i in range(8)]


@pytest.fixture(scope="module")
def without_drafts(loaded: LoadedModel) -> list[tuple[int, ...]]:
    llm = LLM(loaded=loaded, **keywords(True, True, None))
    outputs = llm.generate(*requests(0.0), use_tqdm=False)
    llm.close()
    return [output.outputs[0].token_ids for output in outputs]


def keywords(v2: bool, overlapped: bool, spec: dict[str, Any] | None) -> dict[str, Any]:
    own = {name: value for name, value in ENGINE.items() if name != "skip_tokenizer_init"}
    return own | {"use_v2_model_runner": v2, "async_scheduling": overlapped, "speculative_config": spec}


SIDES = pytest.mark.parametrize(("v2", "overlapped"), [(False, False), (True, False), (True, True)])


@SIDES
@pytest.mark.parametrize("method", ["standard", "block"])
def test_greedy_answers_are_those_without_drafts(
    loaded: LoadedModel, without_drafts: list[tuple[int, ...]], v2: bool, overlapped: bool, method: str
) -> None:
    llm = LLM(loaded=loaded, **keywords(v2, overlapped, NGRAM | {"rejection_sample_method": method}))
    outputs = llm.generate(*requests(0.0), use_tqdm=False)
    llm.core.check_integrity()
    llm.close()
    assert [output.outputs[0].token_ids for output in outputs] == without_drafts
    for output in outputs[1::2]:
        assert re.fullmatch(REGEX, output.outputs[0].text) and output.outputs[0].finish_reason == "stop"
    assert sum(output.metrics.num_accepted_tokens for output in outputs[1::2]) > 4


@pytest.mark.parametrize("overlapped", [False, True])
@pytest.mark.parametrize("observed", [False, True])
def test_v2_waits_for_the_drafts_of_grammars_alone(loaded: LoadedModel, overlapped: bool, observed: bool) -> None:
    """Torch raises where it would synchronise; the engine's own counter knows one reason."""
    llm = LLM(loaded=loaded, **keywords(True, overlapped, NGRAM))
    torch.cuda.set_sync_debug_mode("error")
    try:
        with llm.hooks.subscribe(Event, lambda event: None) if observed else llm.hooks.subscribe((), print):
            outputs = llm.generate(*requests(0.8), use_tqdm=False)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    waits = llm.core.device.waits
    assert set(waits.inside_step) == {"drafts"} and llm.hooks.errors == []
    assert waits.inside_step["drafts"] <= waits.outside_step["output"]
    llm.close()
    for output in outputs[1::2]:
        assert re.fullmatch(REGEX, output.outputs[0].text)
