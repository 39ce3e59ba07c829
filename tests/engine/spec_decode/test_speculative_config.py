"""`speculative_config`: what it takes, what it settles, and what an error says."""

from __future__ import annotations

from typing import Any

import pytest

from engine import ConfigError, SpeculativeConfig
from engine.config import EngineConfig

NGRAM = {"method": "ngram", "num_speculative_tokens": 3}
DRAFT_MODEL = {"method": "draft_model", "num_speculative_tokens": 3, "model": "small"}
LOOKUP = {"method": "dspark", "num_speculative_tokens": 3, "draft": "lookup"}
SYNTHETIC = {**NGRAM, "rejection_sample_method": "synthetic"}

GOOD: list[dict[str, Any]] = [
    NGRAM,
    {**NGRAM, "prompt_lookup_min": 1, "prompt_lookup_max": 4, "rejection_sample_method": "block"},
    DRAFT_MODEL,
    {**DRAFT_MODEL, "draft_sample_method": "probabilistic"},
    {"method": "mtp"},
    {"method": "mtp", "num_speculative_tokens": 1, "model": "head", "draft_sample_method": "probabilistic"},
    LOOKUP,
    {"method": "dspark", "model": "draft"},
    {"method": "dspark", "model": "draft", "num_speculative_tokens": 5, "draft_sample_method": "probabilistic"},
    {**SYNTHETIC, "synthetic_acceptance_rates": [0.9, 0.5, 0.5]},
    {**SYNTHETIC, "synthetic_acceptance_length": 4},
]


@pytest.mark.parametrize("values", GOOD, ids=lambda values: str(values)[:60])
def test_good(values: dict[str, Any]) -> None:
    config = SpeculativeConfig.from_mapping(values)
    assert hash(config) == hash(SpeculativeConfig.from_mapping(dict(values)))
    for name, value in values.items():
        assert getattr(config, name) == (tuple(value) if isinstance(value, list) else value)


BAD: list[tuple[dict[str, Any], str]] = [
    ({}, "speculative_config needs a 'method': possible are 'ngram', 'draft_model', 'mtp', 'dspark'"),
    ({"method": "n-gram"}, "speculative method='n-gram': possible are 'ngram',.*did you mean 'ngram'"),
    ({"method": None}, "speculative method=None: possible are 'ngram'"),
    ({**NGRAM, "num_speculative_token": 3}, "unknown key 'num_speculative_token'.*did you mean 'num_speculative_to"),
    ({"method": "ngram"}, "'ngram': needs num_speculative_tokens, how many tokens are drafted"),
    *[
        ({**NGRAM, "num_speculative_tokens": n}, f"num_speculative_tokens={n}: must be a who")
        for n in (0, -1, 1.5, True)
    ],
    ({**NGRAM, "model": "small"}, "'ngram': takes no model, got model='small'; leave it out, or use method 'draft_m"),
    ({**NGRAM, "draft": "lookup"}, "'ngram': takes no draft, got draft='lookup'; it belongs to method 'dspark'"),
    ({**NGRAM, "prompt_lookup_min": 4, "prompt_lookup_max": 2}, "prompt_lookup_min=4 is more than prompt_lookup_max=2"),
    ({**NGRAM, "prompt_lookup_min": 0}, "prompt_lookup_min=0: must be a whole number of at least 1"),
    ({**NGRAM, "prompt_lookup_max": "5"}, "prompt_lookup_max='5': must be a whole number"),
    ({**NGRAM, "draft_sample_method": "probabilistic"}, "'ngram': its drafts are looked up and not drawn"),
    ({**LOOKUP, "draft_sample_method": "probabilistic"}, "'dspark': its drafts are looked up and not drawn"),
    ({**NGRAM, "draft_sample_method": "sampled"}, "draft_sample_method='sampled': possible are 'greedy', 'probabili"),
    ({**NGRAM, "rejection_sample_method": "strict"}, "rejection_sample_method='strict': possible are 'standard', 'bl"),
    ({"method": "draft_model", "num_speculative_tokens": 2}, "'draft_model': needs model=, the name or the path of a"),
    ({"method": "draft_model", "model": "small"}, "'draft_model': needs num_speculative_tokens"),
    ({**DRAFT_MODEL, "model": 5}, "model=5: must be a string"),
    ({**DRAFT_MODEL, "prompt_lookup_max": 5}, "'draft_model': looks nothing up, so prompt_lookup_max=5 means nothing"),
    ({"method": "mtp", "num_speculative_tokens": 2}, "'mtp': has one head and drafts one token; got num_specul"),
    ({**LOOKUP, "model": "draft"}, "'dspark': takes either model=.* or draft='lookup'"),
    ({**LOOKUP, "draft": "look"}, "draft='look': possible are 'lookup', did you mean 'lookup'"),
    ({"method": "dspark", "draft": "lookup"}, "'dspark': needs num_speculative_tokens"),
    (SYNTHETIC, "'synthetic' needs either synthetic_acceptance_rates, one for each draft, or synthetic_acceptance_le"),
    (
        {**SYNTHETIC, "synthetic_acceptance_length": 2, "synthetic_acceptance_rates": [0.5] * 3},
        "needs either synthetic",
    ),
    ({**NGRAM, "synthetic_acceptance_length": 2}, "synthetic_acceptance_length=2 needs rejection_sample_method='syn"),
    (
        {**NGRAM, "synthetic_acceptance_rates": [1, 1, 1]},
        "synthetic_acceptance_rates=.* needs rejection_sample_method=",
    ),
    *[
        ({**SYNTHETIC, "synthetic_acceptance_length": n}, f"synthetic_acceptance_length={n!r}: possible is 1 to 4")
        for n in (0.9, 4.1, float("nan"), "2", True)
    ],
    ({**SYNTHETIC, "synthetic_acceptance_rates": [0.5]}, "has 1 rates for 3 drafts; give one for each"),
    (
        {**SYNTHETIC, "synthetic_acceptance_rates": [0.5, 0.6, 0.1]},
        r"=\[0.5, 0.6, 0.1\]: must be from 0 to 1 and not in",
    ),
    ({**SYNTHETIC, "synthetic_acceptance_rates": [1.5, 0.6, 0.1]}, "must be from 0 to 1 and not increase"),
    ({**SYNTHETIC, "synthetic_acceptance_rates": [float("nan")] * 3}, "must be from 0 to 1 and not increase"),
    ({**SYNTHETIC, "synthetic_acceptance_rates": 0.5}, "synthetic_acceptance_rates=0.5: must be a list of numbers"),
    ({**SYNTHETIC, "synthetic_acceptance_rates": ["a"] * 3}, "must be a list of numbers, one for each draft"),
]


@pytest.mark.parametrize(("values", "message"), BAD, ids=lambda value: str(value)[:60])
def test_bad(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SpeculativeConfig.from_mapping(values)


@pytest.mark.parametrize(
    ("low", "high", "settled"), [(None, None, (5, 5)), (2, None, (2, 2)), (None, 3, (3, 3)), (1, 4, (1, 4))]
)
def test_the_lengths_of_the_ngrams(low: int | None, high: int | None, settled: tuple[int, int]) -> None:
    config = SpeculativeConfig(**NGRAM, prompt_lookup_min=low, prompt_lookup_max=high)
    assert config.prompt_lookup == settled and config.looks_up


def test_rates_become_conditional() -> None:
    config = SpeculativeConfig(**SYNTHETIC, synthetic_acceptance_rates=(0.8, 0.4, 0.0))
    assert config.conditional_acceptance_rates(3) == pytest.approx((0.8, 0.5, 0.0)) and not config.is_lossless
    config = SpeculativeConfig(**SYNTHETIC, synthetic_acceptance_length=2.5)
    rates = config.conditional_acceptance_rates(3)
    assert len(rates) == 3 and len({round(rate, 9) for rate in rates}) == 1
    rate = rates[0]
    assert 1 + rate + rate**2 + rate**3 == pytest.approx(2.5)
    assert SpeculativeConfig(**NGRAM).conditional_acceptance_rates(3) == ()


def test_an_engine_takes_no_other_kind_of_value() -> None:
    with pytest.raises(ConfigError, match="speculative_config='ngram': must be a dict or a SpeculativeConfig"):
        EngineConfig.from_kwargs(speculative_config="ngram")
