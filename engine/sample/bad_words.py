"""Which tokens would complete a bad word: on the host, from an output's tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def forbidden_next_tokens(bad_words_token_ids: Iterable[Sequence[int]], output_token_ids: Sequence[int]) -> list[int]:
    """The last token of each word whose other tokens are the last ones of the output. As in vLLM the prompt's tokens
    don't count."""
    forbidden = []
    for word in bad_words_token_ids:
        prefix = list(word[:-1])
        if len(prefix) <= len(output_token_ids) and prefix == list(
            output_token_ids[len(output_token_ids) - len(prefix) :]
        ):
            forbidden.append(word[-1])
    return forbidden
