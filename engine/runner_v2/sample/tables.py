"""What the sampler's features share: tables written only where a value is new, and the requests' tokens."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from ..buffers import UvaBackedTensor


class TokenTable(NamedTuple):
    """The device's state of the requests' tokens, a row a request, at addresses that never change."""

    all_token_ids: torch.Tensor
    """i32 [R, L]: prompt, then output."""
    prompt_len: torch.Tensor
    """i32 [R]."""
    prefill_len: torch.Tensor
    """i32 [R]: prompt, and what was generated before a preemption."""


class DraftRows(NamedTuple):
    """What a step with drafts knows of its l rows of logits; without drafts every row is a request's only one."""

    expanded_local_pos: torch.Tensor
    """i32 [l]: 0 .. k within each request."""
    token_ids: torch.Tensor
    """i32 [l]: the input token of each row, at local position j >= 1 draft j."""
    max_drafts: int
    """The most that a request of the batch has."""


def set_if_new(table: UvaBackedTensor, row: int, value: float) -> None:
    """Sets a value of a table that is published as a whole, so that a request like the last one uploads nothing."""
    if table.np[row] != np.asarray(value, dtype=table.np.dtype):
        table.set(row, value)
