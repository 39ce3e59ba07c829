"""What is asked of both sides: real prompts, fixed lengths, greedy, no early end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

_TEXT = (
    "A river begins high in the hills, where rain and melting snow gather in small hollows and run together. At "
    "first it is quick and narrow and cuts its way straight down; further on the land is flatter, the water slows, "
    "and the river starts to wander in wide bends, dropping sand on the inside of each bend and eating the bank on "
    "the outside. Towns grew where it could be crossed. Boats carried grain, timber and stone, and mills stood "
    "wherever the water fell far enough to turn a wheel. Later came dams, which hold the spring flood back for the "
    "dry months and make electricity from its fall. At the end the river meets the sea, and what it has carried "
    "settles there, layer on layer, as new land. "
)


@dataclass(frozen=True)
class Ask:
    """One request: its prompt's token ids, and how many tokens are wanted of it."""

    prompt_token_ids: tuple[int, ...]
    max_tokens: int


@dataclass(frozen=True)
class Workload:
    name: str
    asks: tuple[Ask, ...]

    @property
    def wanted_tokens(self) -> int:
        return sum(ask.max_tokens for ask in self.asks)

    @property
    def longest(self) -> int:
        return max(ask.max_tokens for ask in self.asks)

    def __str__(self) -> str:
        lengths_in = sorted(len(ask.prompt_token_ids) for ask in self.asks)
        lengths_out = sorted(ask.max_tokens for ask in self.asks)
        return f"{self.name}: {len(self.asks)} request(s), {_span(lengths_in)} in, {_span(lengths_out)} out"


def _span(lengths: list[int]) -> str:
    return str(lengths[0]) if lengths[0] == lengths[-1] else f"{lengths[0]}–{lengths[-1]}"


_MIXED_OUT = (32, 48, 64, 96, 128, 160, 208, 256)
_MIXED_IN = (24, 96, 40, 64, 16, 80, 48, 32)


def workloads(encode: Callable[[str], list[int]]) -> tuple[Workload, ...]:
    """Batch 1 (64 in, 128 out) and batch 8 (16 to 96 in, 32 to 256 out), each prompt from another place of one text."""
    ids = encode(_TEXT)

    def prompt(start: int, length: int) -> tuple[int, ...]:
        return tuple((ids + ids)[start : start + length])

    one = Workload("batch 1", (Ask(prompt(0, 64), 128),))
    lengths = enumerate(zip(_MIXED_IN, _MIXED_OUT, strict=True))
    mixed = tuple(Ask(prompt(11 * i, n_in), n_out) for i, (n_in, n_out) in lengths)
    return one, Workload("batch 8", mixed)
