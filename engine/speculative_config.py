"""How drafts are made and judged: `speculative_config` of the engine, under vLLM's names."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .config_checks import ConfigError, check_choice, check_positive, closest
from .sample.rejection import conditional_rates, rates_of_mean_length

METHODS = ("ngram", "draft_model", "mtp", "dspark")
DRAFT_SAMPLE_METHODS = ("greedy", "probabilistic")
REJECTION_SAMPLE_METHODS = ("standard", "block", "synthetic")
VERIFICATION_SCHEDULES = ("fixed", "threshold", "early_stop", "budgeted")
DRAFTS = ("lookup",)
DEFAULT_PROMPT_LOOKUP = 5
LOOKUP_DRAFT = (1, 3)
"""Of what was tried on answers of a small model (bench/NOTES.md), the n-grams whose continuations are accepted most."""


@dataclass(frozen=True)
class SpeculativeConfig:
    """Drafts of a request and the rule that judges them. None means: what the method has by itself.

    | method | drafts come from | needs | also takes |
    |---|---|---|---|
    | ngram | the request's own tokens | num_speculative_tokens | prompt_lookup_min, prompt_lookup_max |
    | draft_model | a smaller model with the same vocabulary | num_speculative_tokens, model | draft_sample_method |
    | mtp | one more head on the target's hidden states | | model, draft_sample_method |
    | dspark | a head fused into runner V2's step | | model, num_speculative_tokens, draft_sample_method, and for \
    how many are verified verification_schedule, confidence_threshold |
    | dspark with `draft="lookup"` | the request's own tokens | num_speculative_tokens | the keys of ngram |

    mtp and dspark without a model take the head that comes with the package, where there is one for the target.

    Every method takes rejection_sample_method. "synthetic" accepts at the given rates whatever the target says, so its
    output is not the model's: it is for benchmarks alone, and a request with structured_outputs is refused.
    """

    method: str
    num_speculative_tokens: int | None = None
    model: str | None = None
    draft: str | None = None
    prompt_lookup_min: int | None = None
    prompt_lookup_max: int | None = None
    """None is the other one of the two; if that is None too, 5, or 1 to 3 for draft="lookup"."""
    draft_sample_method: str = "greedy"
    verification_schedule: str = "fixed"
    """How many of its drafts a request has verified: all; up to the first whose confidence is below
    confidence_threshold ("threshold"); while it pays, by the paper's Algorithm 1 ("early_stop"); as many in a step as
    its measured cost is worth ("budgeted", what vLLM calls adaptive verification). All of them leave the law of the
    output as it is: engine/dspark/schedule.py says why."""
    confidence_threshold: float | None = None
    rejection_sample_method: str = "standard"
    synthetic_acceptance_rates: tuple[float, ...] | None = None
    """How often draft 1, 2, ... is accepted, of all rounds: one for each of num_speculative_tokens, not increasing."""
    synthetic_acceptance_length: float | None = None
    """Instead of rates: tokens of a round on average, from 1 to num_speculative_tokens + 1."""

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> SpeculativeConfig:
        """Raises ConfigError for an unknown key, which it names with the closest known one."""
        known = [field.name for field in dataclasses.fields(cls)]
        for key in values:
            if key not in known:
                raise ConfigError(
                    f"unknown key {key!r} in speculative_config{closest(str(key), known)} Known: {', '.join(known)}"
                )
        if "method" not in values:
            raise ConfigError(f"speculative_config needs a 'method': possible are {', '.join(map(repr, METHODS))}")
        rates = values.get("synthetic_acceptance_rates")
        if isinstance(rates, list):
            values = {**values, "synthetic_acceptance_rates": tuple(rates)}
        return cls(**values)

    def __post_init__(self) -> None:
        check_choice("speculative method", self.method, METHODS)
        check_choice("draft_sample_method", self.draft_sample_method, DRAFT_SAMPLE_METHODS)
        check_choice("rejection_sample_method", self.rejection_sample_method, REJECTION_SAMPLE_METHODS)
        check_choice("verification_schedule", self.verification_schedule, VERIFICATION_SCHEDULES)
        self._check_source()
        self._check_count()
        self._check_prompt_lookup()
        self._check_schedule()
        self._check_synthetic()

    @property
    def looks_up(self) -> bool:
        """Drafts are found and not drawn."""
        return self.method == "ngram" or self.draft == "lookup"

    @property
    def prompt_lookup(self) -> tuple[int, int]:
        """(min, max) length of the n-grams that are looked up."""
        low, high = self.prompt_lookup_min, self.prompt_lookup_max
        if self.draft == "lookup" and low is None and high is None:
            return LOOKUP_DRAFT
        return (
            low or high or DEFAULT_PROMPT_LOOKUP,
            high or low or DEFAULT_PROMPT_LOOKUP,
        )

    @property
    def is_lossless(self) -> bool:
        """The output has the target's law."""
        return self.rejection_sample_method != "synthetic"

    def conditional_acceptance_rates(self, num_drafts: int) -> tuple[float, ...]:
        """For "synthetic": how often each of `num_drafts` drafts is accepted if those before it were; else nothing."""
        if self.is_lossless:
            return ()
        rates = self.synthetic_acceptance_rates
        if self.synthetic_acceptance_length is not None:
            rates = tuple(rates_of_mean_length(self.synthetic_acceptance_length, num_drafts))
        assert rates is not None
        return tuple(conditional_rates(rates))

    def _refuse(self, what: str) -> None:
        raise ConfigError(f"speculative method {self.method!r}: {what}")

    def _check_source(self) -> None:
        for name in ("model", "draft"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise ConfigError(f"{name}={value!r}: must be a string, the name or the path of a checkpoint")
        if self.method == "ngram" and self.model is not None:
            self._refuse(f"takes no model, got model={self.model!r}; leave it out, or use method 'draft_model'")
        if self.method == "draft_model" and self.model is None:
            self._refuse("needs model=, the name or the path of a smaller checkpoint with the target's vocabulary")
        if self.method != "dspark" and self.draft is not None:
            self._refuse(f"takes no draft, got draft={self.draft!r}; it belongs to method 'dspark'")
        if self.model is not None and self.draft is not None:
            self._refuse("takes either model=, the path of a draft checkpoint, or draft='lookup', which has no weights")
        if self.draft is not None:
            check_choice("draft", self.draft, DRAFTS)
        if self.looks_up and self.draft_sample_method == "probabilistic":
            self._refuse("its drafts are looked up and not drawn: draft_sample_method='greedy' is possible")

    def _check_count(self) -> None:
        count = self.num_speculative_tokens
        if count is not None:
            check_positive("num_speculative_tokens", count)
        if self.method == "mtp" and count not in (None, 1):
            self._refuse(f"has one head and drafts one token; got num_speculative_tokens={count}, leave it out")
        if count is None and (self.looks_up or self.method == "draft_model"):
            self._refuse("needs num_speculative_tokens, how many tokens are drafted for a request in a step")

    def _check_prompt_lookup(self) -> None:
        for name in ("prompt_lookup_min", "prompt_lookup_max"):
            value = getattr(self, name)
            if value is not None:
                check_positive(name, value)
                if not self.looks_up:
                    self._refuse(f"looks nothing up, so {name}={value} means nothing; leave it out")
        low, high = self.prompt_lookup
        if low > high:
            raise ConfigError(f"prompt_lookup_min={low} is more than prompt_lookup_max={high}; swap them")

    def _check_schedule(self) -> None:
        schedule, threshold = self.verification_schedule, self.confidence_threshold
        if schedule != "fixed" and (self.method != "dspark" or self.draft is not None):
            self._refuse(
                f"its drafts have no confidences, and verification_schedule={schedule!r} goes by them; 'fixed' is "
                "possible, or method 'dspark' with a model"
            )
        if (schedule == "threshold") != (threshold is not None):
            raise ConfigError(
                f"verification_schedule={schedule!r} with confidence_threshold={threshold!r}: the schedule 'threshold' "
                "needs one from 0 to 1, and no other takes it"
            )
        if threshold is not None and (not _is_number(threshold) or not 0 <= threshold <= 1):
            raise ConfigError(f"confidence_threshold={threshold!r}: possible are 0 (verify all) to 1")

    def _check_synthetic(self) -> None:
        rates, length = self.synthetic_acceptance_rates, self.synthetic_acceptance_length
        if self.is_lossless:
            for name, value in (("synthetic_acceptance_rates", rates), ("synthetic_acceptance_length", length)):
                if value is not None:
                    raise ConfigError(
                        f"{name}={value} needs rejection_sample_method='synthetic'; set it or leave it out"
                    )
            return
        if (rates is None) == (length is None):
            raise ConfigError(
                "rejection_sample_method='synthetic' needs either synthetic_acceptance_rates, one for each draft, or "
                "synthetic_acceptance_length, the tokens of a round on average"
            )
        count = 1 if self.method == "mtp" else self.num_speculative_tokens
        if length is not None:
            highest = float("inf") if count is None else count + 1
            if not _is_number(length) or not 1 <= length <= highest:
                raise ConfigError(f"synthetic_acceptance_length={length!r}: possible is 1 to {highest}")
        if rates is not None:
            self._check_rates(rates, count)

    def _check_rates(self, rates: Any, count: int | None) -> None:
        name = "synthetic_acceptance_rates"
        if not isinstance(rates, tuple) or not rates or not all(_is_number(rate) for rate in rates):
            raise ConfigError(f"{name}={rates!r}: must be a list of numbers, one for each draft")
        if count is not None and len(rates) != count:
            raise ConfigError(f"{name} has {len(rates)} rates for {count} drafts; give one for each")
        falls = all(a >= b for a, b in itertools.pairwise(rates))
        if not falls or not all(0 <= rate <= 1 for rate in rates):
            raise ConfigError(
                f"{name}={list(rates)}: must be from 0 to 1 and not increase, since a draft is accepted only if those "
                "before it are"
            )


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
