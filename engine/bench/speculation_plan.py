"""What `runnerscope bench --speculation` compares: the ways of drafting, the load, and how often."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Method:
    """A way of drafting. `config`: speculative_config, None for no speculation. One that was `given` has to work; a
    default that this model has no draft for is left out."""

    label: str
    config: Mapping[str, Any] | None = field(hash=False)
    given: bool = False


NONE = Method("none", None)
_LOOKUP = {"num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
"""Of what was tried on SmolLM2's answers, matches from one token on are accepted most; see NOTES.md."""
DEFAULTS = (
    Method("ngram", {"method": "ngram", **_LOOKUP}),
    Method("mtp", {"method": "mtp"}),
    Method("dspark", {"method": "dspark"}),
    Method("lookup", {"method": "dspark", "draft": "lookup", **_LOOKUP}),
)


@dataclass(frozen=True)
class SpeculationPlan:
    """What to measure. `model`, `engine`: keywords of LLM, those of `startup.load` and the rest; `files`: of prompts;
    `requests`: of each concurrency, None for `default_requests`."""

    model: Mapping[str, Any]
    engine: Mapping[str, Any]
    methods: tuple[Method, ...]
    runners: tuple[str, ...]
    concurrency: tuple[int, ...]
    requests: int | None
    max_tokens: int
    temperature: float
    repeats: int
    files: tuple[Path, ...] = ()
    commit: str | None = None

    def num_requests(self, concurrency: int) -> int:
        return self.requests or default_requests(concurrency)


def default_requests(concurrency: int) -> int:
    """At least three waves, and about forty requests: what is accepted of ten is the luck of ten prompts."""
    return concurrency * max(3, 40 // concurrency)
