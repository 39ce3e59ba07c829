"""The law of sampled tokens at the engine's output, on both runners, counted over a small vocabulary."""

from __future__ import annotations

import json
import math
from collections import Counter

import pytest
import torch

from engine import SamplingParams
from engine.models import LoadedModel, load_model
from tests.engine.engine_helpers import (
    both_runners,
    greedy,
    ids,
    tiny_llm,
    tiny_model,
    tokens_of,
)
from tests.engine.hf_reference import hf_logits, hf_model

pytestmark = pytest.mark.slow

PROMPT = [3, 7, 5, 4, 8]
NUM_DRAWS = 2000


@pytest.fixture(scope="module")
def small_vocabulary(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """A model over eleven tokens, so that a law can be counted."""
    path = tmp_path_factory.mktemp("small")
    config = tiny_model().config.to_hf() | {"vocab_size": 11, "eos_token_id": None, "bos_token_id": None}
    (path / "config.json").write_text(json.dumps(config))
    return load_model(path, dtype=torch.float32, device=torch.device("cpu"), load_format="dummy", seed=4)


def law(logits: list[float], params: SamplingParams) -> list[float]:
    """The specification: temperature, then min_p, then top_k, then top_p of what is left."""
    scaled = [x / params.temperature for x in logits]
    best = max(scaled)
    weights = [math.exp(x - best) for x in scaled]
    kept = {i for i, w in enumerate(weights) if w >= params.min_p}
    if params.top_k > 0:
        kth = sorted((weights[i] for i in kept), reverse=True)[: params.top_k][-1]
        kept = {i for i in kept if weights[i] >= kth}
    total, mass, nucleus = sum(weights[i] for i in kept), 0.0, set()
    for i in sorted(kept, key=lambda i: -weights[i]):
        nucleus.add(i)
        mass += weights[i] / total
        if mass >= params.top_p:
            break
    total = sum(weights[i] for i in nucleus)
    return [weights[i] / total if i in nucleus else 0.0 for i in range(len(weights))]


def chi_square_p(counts: Counter[int], probabilities: list[float]) -> float:
    """The probability of a deviation at least as large; tokens that hardly occur are counted as one."""
    n = sum(counts.values())
    assert all(p > 0 for token, p in enumerate(probabilities) if counts[token]), f"impossible tokens: {counts}"
    cells = [(counts[token], n * p) for token, p in enumerate(probabilities) if n * p >= 5]
    rest = sum(n * p for p in probabilities if 0 < n * p < 5)
    if rest >= 1:
        cells.append((n - sum(o for o, _ in cells), rest))
    if len(cells) == 1:
        return 1.0
    statistic = sum((o - e) ** 2 / e for o, e in cells)
    return torch.special.gammaincc(torch.tensor((len(cells) - 1) / 2), torch.tensor(statistic / 2)).item()


LAWS = {
    "temperature": {"temperature": 5.0},
    "top_k": {"temperature": 6.0, "top_k": 4},
    "top_p": {"temperature": 5.0, "top_p": 0.7},
    "min_p": {"temperature": 5.0, "min_p": 0.3},
    "all": {"temperature": 8.0, "top_k": 6, "top_p": 0.85, "min_p": 0.2},
    "nothing left but the best": {"temperature": 5.0, "top_k": 1},
}


@both_runners
@pytest.mark.parametrize("name", LAWS)
def test_the_law_is_the_specified_one(runner: str, name: str, small_vocabulary: LoadedModel) -> None:
    params = SamplingParams(max_tokens=1, detokenize=False, **LAWS[name])
    with tiny_llm(runner, loaded=small_vocabulary, max_num_seqs=256, max_num_batched_tokens=2048) as llm:
        outputs = llm.generate([ids(*PROMPT)] * NUM_DRAWS, params, use_tqdm=False)
    counts = Counter(tokens[0] for tokens in tokens_of(outputs))
    logits = hf_logits(hf_model(small_vocabulary), PROMPT)[-1].tolist()
    probabilities = law(logits, params)
    assert sum(p * NUM_DRAWS >= 5 for p in probabilities) >= (1 if "best" in name else 2), "the law says too little"
    assert sum(counts.values()) == NUM_DRAWS
    assert chi_square_p(counts, probabilities) > 1e-3, (counts, probabilities)


def test_the_chi_square_test_can_fail() -> None:
    probabilities = [0.5, 0.3, 0.2]
    assert chi_square_p(Counter({0: 1000, 1: 600, 2: 400}), probabilities) > 0.9
    assert chi_square_p(Counter({0: 1085, 1: 555, 2: 360}), probabilities) < 1e-3


@both_runners
@pytest.mark.parametrize("temperature", [1e-300, 1e-38, 1e-6, 1.1e-5, 1e-3])
def test_a_temperature_near_zero_is_greedy(runner: str, temperature: float) -> None:
    with tiny_llm(runner) as llm:
        expected = llm.generate(ids(*PROMPT), greedy(6), use_tqdm=False)
        params = SamplingParams(temperature=temperature, max_tokens=6, ignore_eos=True)
        assert tokens_of(llm.generate(ids(*PROMPT), params, use_tqdm=False)) == tokens_of(expected)
