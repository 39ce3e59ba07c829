"""What sampling parameters mean for one row of logits: plain float64, one token after the other."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from engine import SamplingParams


def processed(
    logits: Sequence[float],
    params: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    stop_ids: Iterable[int] = (),
    allowed_by_grammar: Iterable[int] | None = None,
) -> np.ndarray:
    """f64 [V]: everything that comes before the temperature. `params` as the front door leaves them."""
    result = [float(value) for value in logits]
    for token in range(len(result)):
        forbidden = allowed_by_grammar is not None and token not in allowed_by_grammar
        forbidden |= params.allowed_token_ids is not None and token not in params.allowed_token_ids
        result[token] += (params.logit_bias or {}).get(token, 0.0)
        forbidden |= token in stop_ids and len(output) < params.min_tokens
        if token in prompt or token in output:
            if result[token] > 0:
                result[token] /= params.repetition_penalty
            else:
                result[token] *= params.repetition_penalty
        result[token] -= params.frequency_penalty * list(output).count(token)
        result[token] -= params.presence_penalty * (token in output)
        for word in params.bad_words_token_ids:
            *prefix, last = word
            forbidden |= token == last and list(output)[len(output) - len(prefix) :] == prefix
        if forbidden:
            result[token] = -math.inf
    return np.array(result)
