"""What a drafter is given by a runner and what it gives back. It stands above the runners: neither of them knows how
drafts are made, and a drafter knows nothing of rows that move or of who judges its drafts.

A step is: draft (here), verify (the target's forward over last token and drafts), accept (kernels 23 to 28). R rows of
the runner's state, r requests and t tokens in this step, N drafts, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from ..attention import AttentionMetadata

if TYPE_CHECKING:
    from ..dspark.calibration import Calibration

NO_DRAFT = -1
"""Stands for no draft, and for none behind it; never an input of the model."""


@dataclass(frozen=True)
class RowTables:
    """What the runner keeps by row. V1's rows are its batch's, so `idx_mapping` is 0 .. r - 1 there."""

    last_sampled_tokens: torch.Tensor
    """i64 [R, 1], this step's token already in it."""
    num_blocks: torch.Tensor
    """i32 [R], KV blocks that a request holds."""
    temperature: torch.Tensor
    """f32 [R]."""
    seeds: torch.Tensor
    """i64 [R]."""
    all_token_ids: torch.Tensor | None = None
    """i32 [R, L]; V1 has them on the host alone."""
    total_len: torch.Tensor | None = None
    """i32 [R], with this step's tokens."""
    next_prefill_tokens: torch.Tensor | None = None
    """i32 [R], the token behind the step's part of a prompt."""
    draft_tokens: torch.Tensor | None = None
    """i64 [R, N], where a decoder that `keeps_drafts` puts them; V1 keeps them elsewhere."""


@dataclass(frozen=True)
class FinishedStep:
    """What a step leaves on the device once its tokens are accepted and the runner's tables are up to date.

    `metadata` is the step's own. idx_mapping i32 [r]; input_ids i32 [>= t]; positions i64 [>= t]; num_sampled i32 [r],
    0 while a request is inside its prompt; num_rejected i32 [r]: a request's last inputs, which never were. The host
    knows neither of the two. hidden_states [>= t, n * d]: the outputs of the drafter's `target_layer_ids` side by side;
    without such [>= t, d], behind the last norm.
    """

    idx_mapping: torch.Tensor
    input_ids: torch.Tensor
    positions: torch.Tensor
    num_sampled: torch.Tensor
    num_rejected: torch.Tensor
    metadata: AttentionMetadata
    rows: RowTables
    hidden_states: torch.Tensor | None = None


class SpecDecoder(ABC):
    """A source of drafts."""

    target_layer_ids: Sequence[int] = ()
    """Layers of the target whose outputs it listens to; -1 is the embedding's."""
    confidences: torch.Tensor | None = None
    """f32 [R, N], by row: the chance that each of the last drafts is accepted, where the drafter says so."""
    calibration: Calibration | None = None
    """What the confidences have gone through; None: they are the head's own."""
    keeps_drafts = False
    """Its last launch puts them into `RowTables.draft_tokens`, if there is one; else the runner does."""
    on_host = False
    """It can work from tokens that the host knows: `propose_from_tokens`."""

    def __init__(self, num_drafts: int) -> None:
        self.num_drafts = num_drafts

    @property
    def draft_logits(self) -> torch.Tensor | None:
        """f32 [R, N, V], by row, what the last drafts were drawn from: for `rejection_sample`. None if none were."""
        return None

    @property
    def num_lookahead_tokens(self) -> int:
        """Tokens beyond a step's own for which the drafter wants KV slots. Where there are none it drafts less well."""
        return self.num_drafts

    def allocate_kv_cache(self, num_blocks: int, block_size: int) -> None:  # noqa: B027 - a drafter may have no cache
        """Called once, before the first step, with the target's numbers: a drafter's cache lies in the target's blocks,
        so that a hit in the prefix cache is one for both."""

    def kv_bytes_per_token(self) -> int:
        """What `allocate_kv_cache` will take, which the target's cache must leave."""
        return 0

    @abstractmethod
    def propose(self, step: FinishedStep) -> torch.Tensor:
        """Called on the stream behind every step, of prompts too; makes nobody wait.

        Returns:
            Drafts i64 [r, N], then NO_DRAFT; for requests inside their prompt nothing but that.
        """

    def propose_from_tokens(self, tokens: Sequence[np.ndarray]) -> list[list[int]]:
        """Drafts from each request's tokens, integers [n]: for a runner whose host knows them anyway."""
        raise NotImplementedError(f"{type(self).__name__} drafts on the device: call propose")
