"""The draft without weights: what followed the last time a request's latest tokens stood in it.

Works with every model. Its drafts are a pure function of the request's own tokens, so they were not drawn (their law
has one token) and any schedule over them is lossless.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.dispatch import check_tensors

from ..spec_decode.interface import NO_DRAFT


def check_lookup(k: int, min_ngram: int, max_ngram: int, window: int) -> None:
    """Raise ValueError unless 1 <= min_ngram <= max_ngram, 1 <= k and the window can hold a match."""
    if k < 1:
        raise ValueError(f"lookup draft: num_speculative_tokens must be at least 1, got {k}")
    if not 1 <= min_ngram <= max_ngram:
        raise ValueError(
            f"lookup draft: prompt_lookup_min {min_ngram} and prompt_lookup_max {max_ngram} must be 1 <= min <= max"
        )
    if window <= max_ngram:
        raise ValueError(f"lookup draft: a window of {window} tokens can't hold a match of {max_ngram} and its suffix")


def lookup_drafts(
    all_token_ids: Tensor,
    idx_mapping: Tensor,
    total_len: Tensor,
    k: int,
    *,
    min_ngram: int = 2,
    max_ngram: int = 4,
    window: int = 1024,
) -> Tensor:
    """Drafts of r requests, without a host wait, in shapes that depend on no length.

    Of the last ``window`` tokens of a request, the earlier place is taken whose preceding tokens agree with the
    request's last ones for longest, up to ``max_ngram``; the latest place on a tie, since repetition is local. The
    drafts are what follows there. Where that runs into the request's end it goes round: a place p tokens back means a
    text of period p.

    Args:
        all_token_ids: i32 [R, L].
        idx_mapping: i32 [r], rows; -1 for padding.
        total_len: i32 [R], tokens of each row, the sampled one counted.
        k: drafts.
        min_ngram: shorter agreements propose nothing.

    Returns:
        i64 [r, k], NO_DRAFT in rows without a match.

    Raises:
        ValueError: a wrong dtype or rank; numbers that make no sense.
    """
    check_lookup(k, min_ngram, max_ngram, window)
    check_tensors(torch.int32, 2, all_token_ids=all_token_ids)
    check_tensors(torch.int32, 1, idx_mapping=idx_mapping, total_len=total_len)
    device, last_column = all_token_ids.device, all_token_ids.shape[1] - 1
    window = min(window, last_column + 1)
    rows = idx_mapping.clamp(min=0).long().unsqueeze(1)
    length = total_len[rows] * (idx_mapping >= 0).unsqueeze(1)
    # Column c of `recent` is the token at length - window + c; what lies before the request's start is -1.
    back = torch.arange(window, device=device) - window
    place = length + back
    recent = all_token_ids[rows, place.clamp(0, last_column).long()].masked_fill_(place < 0, -1)
    # agreement[:, c]: how many tokens that end before column c + 1 agree with the last ones.
    agreement = torch.zeros(recent.shape, dtype=torch.int32, device=device)
    running = torch.ones(recent.shape, dtype=torch.bool, device=device)
    for i in range(min(max_ngram, window - 1)):
        same = torch.zeros_like(running)
        same[:, i:] = (recent == recent[:, window - 1 - i].unsqueeze(1))[:, : window - i]
        same[:, i:] &= recent[:, : window - i] >= 0
        running &= same
        agreement += running
    # The last column agrees with itself; it is no earlier place.
    agreement[:, -1] = 0
    column = torch.arange(window, dtype=torch.int32, device=device)
    best = (agreement * window + column).amax(1, keepdim=True)
    length_of_match, end = best // window, best % window
    period = window - 1 - end
    step = torch.arange(k, device=device)
    source = (end + 1 + step % period.clamp(min=1)).clamp(max=window - 1)
    drafts = recent.gather(1, source.long()).long()
    return drafts.masked_fill_(length_of_match < min_ngram, NO_DRAFT)


def lookup_loop(
    tokens: Sequence[int], k: int, *, min_ngram: int = 2, max_ngram: int = 4, window: int = 1024
) -> list[int]:
    """The drafts of one request, as `lookup_drafts`: the specification."""
    check_lookup(k, min_ngram, max_ngram, window)
    recent = list(tokens[-window:])
    best, place = 0, 0
    for end in range(1, len(recent)):
        agreement = 0
        while agreement < min(max_ngram, end) and recent[end - 1 - agreement] == recent[-1 - agreement]:
            agreement += 1
        if agreement >= best:
            best, place = agreement, end
    if best < min_ngram:
        return [NO_DRAFT] * k
    period = len(recent) - place
    return [recent[place + i % period] for i in range(k)]
