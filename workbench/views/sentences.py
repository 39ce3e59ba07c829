"""Sentences about a step, put together from parts [text, request id]; the id is "" where the text speaks of no
request."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from ..recording import RunnerStep

Part = list[str]
Sentence = list[Part]
NAMED = 4
"""More requests than this are counted, not named."""


def once(steps: Sequence[RunnerStep], say: Callable[[RunnerStep], list[Sentence]]) -> list[Sentence]:
    """What `say` says of each runner's step; once, if that is the same of all, and else under the runner's name."""
    said = [(step.runner.upper(), say(step)) for step in steps]
    if all(what == said[0][1] for _, what in said):
        return said[0][1] if said else []
    return [[words(f"{name}: "), *line(what)] for name, what in said if what]


def of(request_id: str) -> Part:
    """The part that stands for a request."""
    return [request_id, request_id]


def words(text: str) -> Part:
    """A part that speaks of no request."""
    return [text, ""]


def line(sentences: Sequence[Sentence], between: str = " ") -> Sentence:
    """The sentences as one."""
    out: Sentence = []
    for sentence in sentences:
        out += [words(between), *sentence] if out else sentence
    return out


def names(ids: Iterable[str]) -> Sentence:
    """The requests one by one, or how many there are."""
    ids = list(ids)
    if len(ids) > NAMED:
        return [words(f"{len(ids)} requests")]
    last = [words(" and "), of(ids[-1])] if len(ids) > 1 else []
    return [*line([[of(request_id)] for request_id in (ids[:-1] if last else ids)], ", "), *last]


def count(n: int, noun: str) -> str:
    """ "1 token", "2 tokens"."""
    return f"{n} {noun}{'' if n == 1 else 's'}"
