"""Any subset of the sampling features, in any batch: both runners and both loops give the same greedy answers, logprobs
and prompt logprobs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import LLM, RequestOutput, SamplingParams
from engine.request import Logprob
from engine.sample.logits_processors import LogitsProcessor, LogitsRows
from tests.engine.engine_helpers import VOCAB, assert_empty, close, ids, make_llm
from tests.engine.tiny_text import raw_bytes, text_model

pytestmark = pytest.mark.slow


class Alternate(LogitsProcessor):
    """Even ids at even positions."""

    def apply(self, logits: torch.Tensor, rows: LogitsRows) -> torch.Tensor:
        even = torch.arange(logits.shape[1], device=logits.device) % 2 == 0
        return logits + 2.0 * (even == (rows.lens.unsqueeze(1) % 2 == 0))


class Shy(LogitsProcessor):
    """Not the first token of the prompt."""

    def apply(self, logits: torch.Tensor, rows: LogitsRows) -> torch.Tensor:
        return logits.scatter(1, rows.token_ids[:, :1], float("-inf"))


ALTERNATE, SHY = Alternate(), Shy()
token = st.integers(3, 258)
FEATURES: dict[str, st.SearchStrategy[Any]] = {
    "presence_penalty": st.sampled_from([-1.0, 0.5, 2.0]),
    "frequency_penalty": st.sampled_from([-0.5, 0.75, 1.5]),
    "repetition_penalty": st.sampled_from([0.5, 1.25, 2.0]),
    "logit_bias": st.dictionaries(token, st.sampled_from([-5.0, 1.5, 4.0]), min_size=1, max_size=5),
    "allowed_token_ids": st.lists(token, min_size=6, max_size=40, unique=True),
    "bad_words_token_ids": st.lists(st.lists(st.integers(3, 8), min_size=2, max_size=3), min_size=1, max_size=3),
    "bad_words": st.lists(st.sampled_from(["ab", "q", "x y"]), min_size=1, max_size=2),
    "logits_processors": st.lists(st.sampled_from([ALTERNATE, SHY]), min_size=1, max_size=2),
    "min_tokens": st.integers(1, 6),
    "stop_token_ids": st.lists(token, min_size=1, max_size=8),
    "logprobs": st.sampled_from([0, 1, 5, 40, -1]),
    "prompt_logprobs": st.sampled_from([0, 2, 40]),
    "structured_outputs": st.sampled_from(
        [
            {"regex": "[a-z]{2,5}[0-9]+"},
            {"choice": ["yes", "nope"]},
            {"json": {"type": "array", "items": {"enum": [1, 23]}}},
        ]
    ),
    "ignore_eos": st.just(True),
}
CONFLICTS = (("structured_outputs", "min_tokens"), ("structured_outputs", "allowed_token_ids"))


@st.composite
def request(draw: st.DrawFn) -> tuple[list[int], SamplingParams]:
    used = draw(st.sets(st.sampled_from(sorted(FEATURES)), max_size=6))
    for kept, dropped in CONFLICTS:
        if kept in used:
            used.discard(dropped)
    fields = {name: draw(FEATURES[name]) for name in sorted(used)}
    prompt = draw(st.lists(st.integers(3, VOCAB - 1), min_size=1, max_size=24))
    return prompt, SamplingParams(temperature=0, max_tokens=draw(st.integers(6, 14)), **fields)


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[LLM]]:
    loaded = text_model(tmp_path_factory.mktemp("bytes"), raw_bytes())
    engines = [
        make_llm("v1", "plain", loaded),
        make_llm("v1", "overlapped", loaded, max_num_batched_tokens=16),
        make_llm("v2", "plain", loaded, max_num_batched_tokens=11, num_gpu_blocks_override=15),
        make_llm("v2", "overlapped", loaded),
    ]
    yield engines
    for llm in engines:
        close(llm)


@settings(max_examples=40, deadline=None)
@given(st.lists(request(), min_size=1, max_size=5))
def test_the_runners_agree(engines: list[LLM], requests: list[tuple[list[int], SamplingParams]]) -> None:
    prompts, params = [ids(*prompt) for prompt, _ in requests], [one for _, one in requests]
    right, *others = (llm.generate(prompts, params, use_tqdm=False) for llm in engines)
    for outputs in others:
        for a, b in zip(right, outputs, strict=True):
            _assert_same(a, b)
    for llm in engines:
        assert_empty(llm)


def _assert_same(a: RequestOutput, b: RequestOutput) -> None:
    (x,), (y,) = a.outputs, b.outputs
    assert (x.token_ids, x.text) == (y.token_ids, y.text)
    assert (x.finish_reason, x.stop_reason) == (y.finish_reason, y.stop_reason)
    for one, other in ((x.logprobs, y.logprobs), (a.prompt_logprobs, b.prompt_logprobs)):
        assert (one is None) == (other is None)
        for entry, like in zip(one or (), other or (), strict=True):
            _assert_like(entry, like)


def _assert_like(a: dict[int, Logprob] | None, b: dict[int, Logprob] | None) -> None:
    """Of tokens that all but tie one may be among the best here and another one there."""
    assert (a is None) == (b is None)
    if a is None or b is None:
        return
    assert next(iter(a)) == next(iter(b))
    values, likes = (sorted(entry.logprob for entry in one.values()) for one in (a, b))
    assert values == pytest.approx(likes, abs=1e-3)
    for shared in a.keys() & b.keys():
        if a[shared].logprob > -100:
            assert a[shared].logprob == pytest.approx(b[shared].logprob, abs=1e-3)
