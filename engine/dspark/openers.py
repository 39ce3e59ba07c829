"""First words of a user's turn, for a target that makes up its prompts.

Left to itself a small model asks about few things. A draft must meet arithmetic, code and prose in the proportion in
which it will be used, so most made-up turns get their first words from here; the target writes the rest.
"""

from __future__ import annotations

FREE = ("",)
CHAT = (
    "Write a short story about", "Explain", "What are the benefits of", "Describe", "Draft an email to",
    "Give me tips", "How do I", "Imagine you are", "Compare and contrast", "Summarize the following text:", "Why",
    "Who was", "Can you", "Rewrite this sentence:", "What is the difference between", "Create a list of", "I want to",
    "Tell me about", "Plan a", "Write a poem about", "What happened", "Help me", "Suggest", "Is it true that",
    "Write an essay on", "As a teacher,", "Classify", "Translate", "Name three", "Analyze the",
)  # fmt: skip
MATH = (
    "If a train travels", "Find the value of", "A shop sells", "How many", "Solve for x:", "Calculate", "Tom has",
    "Maria buys", "A farmer has", "Let $f(x) =", "Simplify $", "Compute $", "The area of a", "John earns",
    "There are", "A car uses", "What is the probability", "Two numbers", "A rectangle has", "The price of a",
    "Evaluate the expression", "In a class of", "What is the remainder when", "A tank holds", "Each day,", "Anna is",
    "Sarah reads", "Half of the", "What is the smallest positive integer",
)  # fmt: skip
CODE = (
    "Write a Python function that", "Write a Python function to", "Write a function that takes",
    "Implement a function", "Complete the following function:\n```python\ndef", "Write code that",
    "Create a Python class", "Write a python program", "Here is a Python function:\n```python\ndef",
    "Write a function to find", "Write a function to check", "Given a list", "Write a SQL query",
    "Write a recursive function", "Write a function to sort", "Fix the bug in this code:\n```python",
)  # fmt: skip

CLOSERS = ("", "\nThink step by step.", "\nShow your work.", "\nExplain each step and give the final answer.", "")
"""Behind the sums: with such words the answer is a derivation."""

_TURNS = (FREE, MATH, CHAT, CODE, FREE, MATH, CHAT, MATH, CHAT, CODE)


def opener(index: int) -> str:
    """The first words of made-up turn ``index``: of ten turns two are free, three each are for sums and for prose, two
    for code; empty where they are the target's own."""
    kind, turn = _TURNS[index % len(_TURNS)], index // len(_TURNS)
    # Kinds that come more often a round must not walk through the same words in step.
    return kind[(turn * 7 + index) % len(kind)]


def closer(index: int) -> str:
    """The last words of made-up turn ``index``; empty for most."""
    return CLOSERS[index // len(_TURNS) % len(CLOSERS)] if _TURNS[index % len(_TURNS)] is MATH else ""
