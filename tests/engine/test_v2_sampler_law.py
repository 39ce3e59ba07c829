"""The law of runner V2's sampler over 1e5 draws: temperature, top-k, top-p, min-p, and these behind other features."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from engine import SamplingParams
from kernels import noise
from tests.engine.sampler_bench import sampler_bench
from tests.engine.sampling_reference import processed
from tests.engine.test_sampling_law import chi_square_p, law

VOCAB, NUM_DRAWS = 11, 100_000
LOGITS = torch.tensor([1.5, -0.5, 2.0, 0.0, 0.25, -2.0, 1.0, 1.75, -1.0, 0.5, 0.75])

LAWS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.8},
    "high temperature": {"temperature": 3.0},
    "top_k": {"temperature": 1.5, "top_k": 4},
    "top_p": {"temperature": 1.2, "top_p": 0.7},
    "min_p": {"temperature": 1.2, "min_p": 0.3},
    "all filters": {"temperature": 2.0, "top_k": 6, "top_p": 0.85, "min_p": 0.2},
    "behind biases and penalties": {
        "temperature": 1.3,
        "top_k": 7,
        "logit_bias": {1: 2.5},
        "frequency_penalty": 1.0,
        "repetition_penalty": 1.4,
    },
}
PROMPT, OUTPUT = [0, 9], [2, 4, 2]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eleven tokens need no noise for 1,024 of them."""
    monkeypatch.setattr(noise, "LANES", 1)


def draws(params: list[SamplingParams], logits: torch.Tensor, num_draws: int) -> Counter[int]:
    """Tokens of these requests in turn, each at position after position: no key comes twice."""
    with sampler_bench(vocab=VOCAB, max_reqs=len(params)) as bench:
        rows = [bench.add(PROMPT, own, OUTPUT) for own in params]
        bench.apply_staged_writes()
        plan, step = bench.plan(rows), bench.rows(rows, [len(OUTPUT)] * len(rows))
        times = num_draws // len(rows)
        positions = torch.arange(times).repeat(len(rows), 1).T.reshape(-1) + len(PROMPT) + len(OUTPUT)
        local = torch.zeros(num_draws, dtype=torch.int32)
        tokens = bench.sample(
            plan, logits.expand(num_draws, -1), idx_mapping=step["idx_mapping"].repeat(times), positions=positions,
            drafts=step["drafts"]._replace(expanded_local_pos=local, token_ids=local),
        ).sampled  # fmt: skip
    return Counter(tokens[:, 0].tolist())


@pytest.mark.parametrize("seeds", ["one seed", "many seeds", "no seeds"])
@pytest.mark.parametrize("name", LAWS)
def test_the_law_is_the_specified_one(name: str, seeds: str) -> None:
    given = [None] * 100 if seeds == "no seeds" else [11] if seeds == "one seed" else list(range(100))
    params = [SamplingParams(seed=seed, **LAWS[name]) for seed in given]
    counts = draws(params, LOGITS, NUM_DRAWS)
    expected = law(processed(LOGITS.tolist(), params[0], PROMPT, OUTPUT).tolist(), params[0])
    assert sum(counts.values()) == NUM_DRAWS
    assert sum(p > 0.01 for p in expected) >= 3, "the law says too little"
    assert chi_square_p(counts, expected) > 1e-4, (counts, expected)


def test_the_test_can_tell() -> None:
    """A temperature that is two percent off, and a filter that lets one more token through, show."""
    counts = draws([SamplingParams(seed=1, temperature=0.8)], LOGITS, NUM_DRAWS)
    assert chi_square_p(counts, law(LOGITS.tolist(), SamplingParams(temperature=0.82))) < 1e-4
    counts = draws([SamplingParams(seed=1, temperature=1.5, top_k=4)], LOGITS, NUM_DRAWS)
    assert chi_square_p(counts, law(LOGITS.tolist(), SamplingParams(temperature=1.5, top_k=5))) < 1e-4
