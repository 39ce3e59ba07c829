"""The standard workloads: fixed lengths, seeded token ids, and no prompt that any other run has seen."""

from __future__ import annotations

import random
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from .workload import Ask, Workload

Span = tuple[int, int]
"""Lowest and highest length, in tokens; both are possible."""

_LENGTH_SEED = 0
"""Lengths are the same in every run and on every engine; with this seed C is 144,831 tokens in and 144,160 out."""
_NO_RUN = 2**20


@dataclass(frozen=True)
class WorkloadSpec:
    """What is asked of an engine: `requests` at once, lengths uniform in their spans, one way of sampling.

    `sampling` holds the keywords of SamplingParams that choose tokens, under the names that vLLM's has too.
    """

    name: str
    requests: int
    input_len: Span
    output_len: Span
    sampling: Mapping[str, Any] = field(default_factory=lambda: {"temperature": 0.0}, hash=False)
    latency: bool = False
    """Judged by ms for each step rather than by tokens/s."""

    def resized(self, requests: int | None, input_len: int | None, output_len: int | None) -> WorkloadSpec:
        """The same with other sizes; a span of lengths keeps its shape below its new highest. ValueError if below 1."""
        sizes = {"requests": requests, "input_len": input_len, "output_len": output_len}
        for name, size in sizes.items():
            if size is not None and size < 1:
                raise ValueError(f"{name}={size}: at least 1")
        return replace(
            self,
            requests=requests or self.requests,
            input_len=_scaled(self.input_len, input_len),
            output_len=_scaled(self.output_len, output_len),
        )

    @cached_property
    def lengths(self) -> tuple[tuple[int, int], ...]:
        """Tokens in and out of each request."""
        rng = random.Random(_LENGTH_SEED)
        ins = [rng.randint(*self.input_len) for _ in range(self.requests)]
        return tuple(zip(ins, [rng.randint(*self.output_len) for _ in range(self.requests)], strict=True))

    @property
    def output_tokens(self) -> int:
        return sum(n_out for _, n_out in self.lengths)

    @property
    def steps(self) -> int:
        """Decode steps that it takes at the least: all requests run at once, and the longest makes a token a step."""
        return max(n_out for _, n_out in self.lengths)

    @property
    def longest(self) -> int:
        """Tokens of its longest request, in and out."""
        return max(n_in + n_out for n_in, n_out in self.lengths)

    def blocks(self, block_size: int) -> int:
        """Blocks of KV cache that all its requests hold at their ends."""
        return sum(-(-(n_in + n_out) // block_size) for n_in, n_out in self.lengths)

    @property
    def context_tokens(self) -> int:
        """Tokens whose KV its decode steps read, in all: each output token reads all that stands before it."""
        return sum(n_out * n_in + n_out * (n_out - 1) // 2 for n_in, n_out in self.lengths)

    def first_ask(self, vocab_size: int) -> Ask:
        """One token on a prompt of this workload's first length that no run has: what a start is timed on."""
        return replace(self.draw(_NO_RUN, vocab_size).asks[0], max_tokens=1)

    def draw(self, run: int, vocab_size: int) -> Workload:
        """The prompts of run number `run`: random ids, others in each run and each workload, so no cache can hit."""
        rng = np.random.default_rng([zlib.crc32(self.name.encode()), run])
        asks = (Ask(tuple(rng.integers(0, vocab_size, n_in).tolist()), n_out) for n_in, n_out in self.lengths)
        return Workload(self.name, tuple(asks))

    def __str__(self) -> str:
        how = ", ".join(f"{key} {value}" for key, value in self.sampling.items() if value) or "greedy"
        lengths = f"{_words(self.input_len)} in, {_words(self.output_len)} out"
        return f"{self.name}: {self.requests} request{'s' if self.requests > 1 else ''}, {lengths}, {how}"


STANDARD = {
    spec.name: spec
    for spec in (
        WorkloadSpec("A", 256, (128, 128), (256, 256)),
        WorkloadSpec("AT", 256, (128, 128), (256, 256), {"temperature": 1.0, "top_p": 0.95, "top_k": 50}),
        WorkloadSpec("B1", 1, (128, 128), (512, 512), latency=True),
        WorkloadSpec("B8", 8, (128, 128), (512, 512), latency=True),
        WorkloadSpec("C", 256, (100, 1024), (100, 1024)),
    )
}


def choose(names: str) -> list[WorkloadSpec]:
    """The standard workloads that a comma-separated list names, in its order. ValueError for an unknown one."""
    wanted = [name.strip().upper() for name in names.split(",") if name.strip()]
    for name in wanted:
        if name not in STANDARD:
            raise ValueError(f"workload {name!r}: possible are {', '.join(STANDARD)}, or several with commas between")
    if not wanted:
        raise ValueError(f"no workload named; possible are {', '.join(STANDARD)}")
    return [STANDARD[name] for name in dict.fromkeys(wanted)]


def _scaled(span: Span, highest: int | None) -> Span:
    return span if highest is None else (max(1, span[0] * highest // span[1]), highest)


def _words(span: Span) -> str:
    return str(span[0]) if span[0] == span[1] else f"{span[0]}–{span[1]}"
