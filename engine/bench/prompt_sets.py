"""Prompts by their kind, since how many drafts are accepted depends on the text: files of turns, or short own ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine import LLM
from engine.dspark.data import first_turn, read_prompts

_OWN = {
    "math": (
        "A baker sells 12 loaves in the morning and twice as many in the afternoon. How many loaves is that in all?",
        "What is 15% of 240? Show each step.",
        "A train covers 180 km in 2 hours and 30 minutes. What is its mean speed in km/h?",
        "Solve 3x + 7 = 31 for x and check the result.",
        "Tom has 48 marbles. He gives a third to Ann and a quarter of the rest to Ben. How many does he keep?",
        "The sides of a rectangle are 9 cm and 14 cm. Compute its area, its perimeter and its diagonal.",
        "How many ways are there to choose 3 of 8 books?",
        "A shirt costs $40 after a discount of 20%. What did it cost before?",
    ),
    "code": (
        "Write a Python function that returns the n-th Fibonacci number without recursion.",
        "Write a Python function that says whether a text is a palindrome; ignore case and spaces.",
        "Write a function in Python that merges two sorted lists into one sorted list.",
        "Write a SQL query that returns the three customers with the highest total of orders.",
        "Write a Python class for a stack with push, pop and peek, and show how it is used.",
        "Explain what this does: [x * x for x in range(10) if x % 2 == 0]",
        "Write a Python function that counts how often each word occurs in a text.",
        "Write a shell command that lists the ten largest files below a folder.",
    ),
    "chat": (
        "Explain in a few sentences why the sky is blue.",
        "Write a short letter that thanks a neighbour for watering the plants.",
        "Plan a weekend in Lisbon for two people who like museums and walking.",
        "What should I look for when I buy a used bicycle?",
        "Summarize the water cycle for a ten-year-old.",
        "Give me five tips for falling asleep earlier.",
        "Compare tea and coffee: taste, caffeine and habits around them.",
        "Tell a short story about a lighthouse keeper who finds a letter.",
    ),
}


@dataclass(frozen=True)
class PromptSet:
    """Prompts as `LLM.add` takes them. `left_out`: how many were too long."""

    name: str
    prompts: tuple[dict[str, Any], ...]
    left_out: int = 0


def read_sets(llm: LLM, files: Sequence[Path], max_tokens: int) -> list[PromptSet]:
    """The first turn of each line of each file, in the chat template where there is one; without files our own.

    A prompt is left out if it and `max_tokens` don't fit in max_model_len. Raises DataError for a file that can't be
    read, ValueError if nothing of one fits.
    """
    named = {_unused(path.stem, files, path): [turns[0] for turns in read_prompts(path)] for path in files}
    sets = []
    for name, texts in (named or _OWN).items():
        prompts = [first_turn(llm, text) for text in texts]
        room = (llm.config.max_model_len or 0) - max_tokens
        kept = tuple(prompt for prompt in prompts if len(prompt["prompt_token_ids"]) <= room)
        if not kept:
            raise ValueError(
                f"prompts {name}: none of {len(prompts)} leaves room for {max_tokens} tokens of an answer in "
                f"max_model_len={llm.config.max_model_len}; lower --max-tokens or raise --max-model-len"
            )
        sets.append(PromptSet(name, kept, len(prompts) - len(kept)))
    return sets


def _unused(stem: str, files: Sequence[Path], path: Path) -> str:
    """Two files of one name are told apart by their folders."""
    return stem if [other.stem for other in files].count(stem) == 1 else str(path)


def in_turn(sets: Sequence[PromptSet], count: int) -> list[tuple[str, dict[str, Any]]]:
    """`count` prompts with the names of their sets: one of each set in turn; a set that ends begins again."""
    asks = []
    for i in range(count):
        chosen = sets[i % len(sets)]
        asks.append((chosen.name, chosen.prompts[i // len(sets) % len(chosen.prompts)]))
    return asks
