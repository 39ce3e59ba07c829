"""The order in which both runners treat a row of logits. Written down here only; samplers and views follow it."""

from __future__ import annotations

ORDER = (
    "structured_outputs",
    "logprobs",
    "allowed_token_ids",
    "logit_bias",
    "min_tokens",
    "penalties",
    "bad_words",
    "logits_processors",
    "temperature",
    "min_p",
    "top_k",
    "top_p",
    "draw",
)
"""vLLM's, with the caller's own processors behind its own. Each is left out of a batch in which no request uses it.

"logprobs" is where logprobs are taken: the model's own distribution, which only a grammar has narrowed. The draw is
the argmax for a greedy request, for which temperature and filters mean nothing.
"""
