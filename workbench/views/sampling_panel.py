"""A panel of the sampling view: the stages of one draw as columns, the tokens it is about as lines, and the race."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from engine.sample.order import ORDER
from engine.sample.trace import TOP, SamplingTrace

from .pieces import piece
from .sampling_columns import Column, alike, columns_of, merged

ROWS = 12
"""So many tokens are drawn of those that the traces follow."""
HELP = {
    "model": "the logits as the model gave them",
    "structured_outputs": "forbids what the grammar cannot go on with",
    "allowed_token_ids": "forbids all but these tokens",
    "logit_bias": "adds the caller's bias to a token's logit",
    "min_tokens": "forbids the stop tokens while the output is too short",
    "penalties": "changes the logits of tokens that the text already has",
    "bad_words": "forbids a token that would complete a bad word",
    "logits_processors": "the caller's own change",
    "temperature": "divides the logits: below 1 the best gain, above 1 the others do",
    "min_p": "drops tokens less probable than min_p times the best one",
    "top_k": "keeps the k best",
    "top_p": "keeps the smallest set whose probability is top_p",
}
"""What each processor does, by its name in `engine.sample.order.ORDER`."""
_SCALES = {"temperature"}
"""Changes every logit, so a token's own difference says nothing."""


def panels(runners: Mapping[str, SamplingTrace], position: int, text: Mapping[int, str]) -> list[dict[str, Any]]:
    """One panel where the runners drew from the same distribution, else one each."""
    columns = {name: columns_of(trace) for name, trace in runners.items()}
    first, *others = columns.values()
    if all(alike(first, other) for other in others):
        return [_panel(runners, [merged(same) for same in zip(*columns.values(), strict=True)], position, text)]
    return [_panel({name: trace}, columns[name], position, text) for name, trace in runners.items()]


def _panel(
    runners: Mapping[str, SamplingTrace], columns: Sequence[Column], position: int, text: Mapping[int, str]
) -> dict[str, Any]:
    traces = {name.upper(): trace for name, trace in runners.items()}
    scores = {name: _scores(trace, columns[-1]) for name, trace in traces.items()}
    ids = _lines(traces.values(), scores.values(), columns)
    taken = max(i for i, column in enumerate(columns) if column.names[0] in ("model", "structured_outputs"))
    allowed = [token for token, logit in columns[taken].logits.items() if logit > -math.inf]
    best = sorted(allowed, key=lambda token: -columns[taken].logits[token])
    races = [_race(trace, scores[name], columns[-1], ids) for name, trace in traces.items()]
    lines = [
        {
            "p": _name(token, text),
            "t": f"token {token}",
            "win": [name for name, trace in traces.items() if trace.sampled == token],
            "cells": [_cell(columns, i, token) for i in range(len(columns))],
            # A trace follows the best so far only, so a rank beyond them isn't known.
            "logprob": [_number(columns[taken].logits[token] - columns[taken].log_normaliser), _rank(best, token)],
            "races": [race[i] for race in races],
        }
        for i, token in enumerate(ids)
    ]
    return {
        "title": " and ".join(traces),
        "stages": [_head(columns, i) for i in range(len(columns))],
        "taken": taken,
        "races": [[name, "● logit" if trace.greedy else "○ logit  ● with noise"] for name, trace in traces.items()],
        "lines": lines,
        "more": _more(traces.values(), columns, ids),
        "say": [_sentence(name, trace, columns[-1], position, text) for name, trace in traces.items()],
    }


def _more(traces: Iterable[SamplingTrace], columns: Sequence[Column], ids: Sequence[int]) -> str:
    """How many tokens run that are not drawn, and what the row went through without a change. Of the stages that one
    kernel does, none is known to be idle."""
    rest = columns[-1].num_left - sum(columns[-1].logits[token] > -math.inf for token in ids)
    acted = {name for column in columns for name in column.names}
    passed = {stage.stage[0] for trace in traces for stage in trace.stages if len(stage.stage) == 1}
    idle = ", ".join(sorted(passed - acted, key=ORDER.index))
    words = [f"{rest:,} more tokens run behind these"] if rest > 0 else []
    return " · ".join(words + ([f"without effect on this row: {idle}"] if idle else []))


def _name(token: int, text: Mapping[int, str]) -> tuple[str, ...]:
    """The token's pieces; standing alone, a space at its beginning needs a sign."""
    first, *others = piece(token, text)
    return ("", "␣", first[1:], *others) if first.startswith(" ") else (first, *others)


def _scores(trace: SamplingTrace, last: Column) -> dict[int, float]:
    return {token: last.logits[token] + noise for token, noise in zip(trace.token_ids, trace.noise, strict=True)}


def _lines(
    traces: Iterable[SamplingTrace], scores: Iterable[Mapping[int, float]], columns: Sequence[Column]
) -> list[int]:
    """The winners, then the best of each race and each stage in turn; in the order of the model's own logits."""
    orders = [*scores, *(column.logits for column in columns)]
    ranked = [
        sorted((token for token in order if order[token] > -math.inf), key=lambda token, o=order: -o[token])  # type: ignore[misc]
        for order in orders
    ]
    ids = dict.fromkeys(trace.sampled for trace in traces)
    for turn in zip_longest(*ranked):
        for token in turn:
            if token is not None and len(ids) < ROWS:
                ids[token] = None
    return sorted(ids, key=lambda token: -columns[0].logits[token])


def _rank(best: Sequence[int], token: int) -> str:
    if token not in best:
        return "–"
    rank = best.index(token) + 1
    return str(rank) if rank <= TOP else f"> {TOP}"


def _head(columns: Sequence[Column], i: int) -> dict[str, Any]:
    column = columns[i]
    cut = 0.0 if i == 0 else max(0.0, 1 - column.mass_left)
    lost = columns[i - 1].num_left - column.num_left if i else 0
    words = f"cuts {_percent(cut)}" if lost > 0 else ""
    tip = "; ".join(f"{name}: {HELP.get(name, name)}" for name in column.names)
    if lost > 0:
        tip += f". Of the probability before it, {_percent(cut)} went, with {lost:,} tokens."
    return {
        "names": list(column.names),
        "left": f"{column.num_left:,} left",
        "cut": round(cut, 4),
        "say": words,
        "t": tip,
    }


def _cell(columns: Sequence[Column], i: int, token: int) -> dict[str, Any]:
    """k: "" or, of a forbidden token, "cut" where it happened and "gone" behind that; w: the bar's width of 1; x: the
    logit; d: its change."""
    column, logit = columns[i], columns[i].logits[token]
    if logit == -math.inf:
        gone = i > 0 and columns[i - 1].logits[token] == -math.inf
        return {"k": "gone" if gone else "cut", "w": 0, "p": "", "x": "", "d": "", "t": "forbidden (-inf)"}
    probability = column.probability(token)
    change = logit - columns[i - 1].logits[token] if i and not _SCALES & set(column.names) else 0.0
    return {
        "k": "",
        "w": round(probability, 4),
        "p": _percent(probability),
        "x": _number(logit),
        "d": _signed(change) if abs(change) >= 0.005 else "",
        "t": f"logit {logit:.4f}, probability {probability:.5f}",
    }


def _race(
    trace: SamplingTrace, scores: Mapping[int, float], last: Column, ids: Sequence[int]
) -> list[dict[str, Any] | None]:
    """For each line where its logit and its score stand between the lowest and the highest of them (0 to 1)."""
    running = {token: scores[token] for token in ids if scores.get(token, -math.inf) > -math.inf}
    ends = [x for token, score in running.items() for x in (last.logits[token], score)]
    low, high = min(ends, default=0.0), max(ends, default=0.0)
    span = (high - low) or 1.0
    noise = dict(zip(trace.token_ids, trace.noise, strict=True))
    return [
        {
            "a": round((last.logits[token] - low) / span, 4),
            "b": round((running[token] - low) / span, 4),
            "n": "" if trace.greedy else _signed(noise[token]),
            "s": _number(running[token]),
            "win": token == trace.sampled,
            "t": f"{last.logits[token]:.3f} {_signed(noise[token], 3)} = {running[token]:.3f}",
        }
        if token in running
        else None
        for token in ids
    ]


def _sentence(name: str, trace: SamplingTrace, last: Column, position: int, text: Mapping[int, str]) -> str:
    won = "".join(_name(trace.sampled, text))
    if trace.greedy:
        return (
            f"{name} is greedy: no noise, the largest logit wins, “{won}”. Temperature and filters mean nothing here."
        )
    how = {
        "V1": "divides every probability by an exponential number e of its generator and takes the largest: "
        "in logarithms, the logit with the noise −log e",
        "V2": f"adds Gumbel noise, which the request's seed and the position {position} alone decide, and takes the "
        "largest sum",
    }[name]
    best = max(last.logits, key=lambda token: last.logits[token])
    chance = _percent(last.probability(trace.sampled))
    other = (
        ""
        if best == trace.sampled
        else f", though “{''.join(piece(best, text))}” had {_percent(last.probability(best))}"
    )
    return f"{name} {how}: “{won}” wins with a chance of {chance}{other}."


def _percent(share: float) -> str:
    if 0 < share < 0.0005:
        return "<0.1 %"
    return f"{100 * share:.1f} %"


def _number(value: float) -> str:
    return "−∞" if value == -math.inf else f"{value:.2f}".replace("-", "−")


def _signed(value: float, digits: int = 2) -> str:
    return f"{value:+.{digits}f}".replace("-", "−")
