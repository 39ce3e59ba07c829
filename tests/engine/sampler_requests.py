"""Requests with any feature of sampling, for runner V2's sampler on its own."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from engine import SamplingParams
from engine.runner_v2.sample.structured_outputs import GrammarBitmask
from engine.sample.logits_processors import LogitsProcessor, LogitsRows
from tests.engine.sampler_bench import SamplerBench

VOCAB = 40
FORMS = ("torch", "interpret", "loop")
NEG_INF = float("-inf")


class NotTwice(LogitsProcessor):
    """Forbids the last token, and the prompt's first."""

    def apply(self, logits: torch.Tensor, rows: LogitsRows) -> torch.Tensor:
        last = rows.token_ids.gather(1, rows.lens.unsqueeze(1) - 1)
        return logits.scatter_(1, last, NEG_INF).scatter_(1, rows.token_ids[:, :1], NEG_INF)


EVERYTHING: dict[str, Any] = {
    "presence_penalty": 0.7,
    "frequency_penalty": -0.4,
    "repetition_penalty": 1.3,
    "logit_bias": {2: 3.5, 5: -1.25},
    "allowed_token_ids": tuple(range(1, 30)),
    "bad_words_token_ids": ((4,), (6, 7), (1, 2, 3)),
    "min_tokens": 5,
    "temperature": 0,
    "max_tokens": 20,
}


def token_lists(least: int, most: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, 9), min_size=least, max_size=most)


def some_params() -> st.SearchStrategy[SamplingParams]:
    """Any subset of the features."""
    return st.sets(st.sampled_from(sorted(EVERYTHING.keys() - {"temperature", "max_tokens"}))).map(
        lambda names: SamplingParams(temperature=0, max_tokens=20, **{name: EVERYTHING[name] for name in names})
    )


def fill(bench: SamplerBench) -> list[int]:
    return [bench.add([1, 2, 3], SamplingParams(**EVERYTHING), [6, 1], (8, 9)) for _ in range(2)]


def allow_only(bench: SamplerBench, logits_rows: list[int], tokens: list[int]) -> GrammarBitmask:
    words = np.zeros(-(-VOCAB // 32), dtype=np.uint32)
    for token in tokens:
        words[token // 32] |= np.uint32(1 << token % 32)
    bitmask = np.tile(words.view(np.int32), (len(logits_rows), 1))
    grammar = GrammarBitmask.upload(bench.device, np.array(logits_rows), bitmask)
    assert grammar is not None
    return grammar
