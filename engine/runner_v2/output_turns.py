"""Where a captured step leaves its output."""

from __future__ import annotations

import torch

from kernels import OutputPlaces

from .async_output import CONFIDENCES, parts_of_tokens, words_of_tokens


class OutputTurns:
    """Two places for the output of a captured step, in turns, so that a replay need not wait until the output of the
    one before has been copied: the wait would hold the device up in every step.

    Which of the two is next the device knows for itself; the host counts along.

    Args:
        num_rows, width: r and w, see `empty_tokens`.
        confidences: f32 [R, N], by state row, which are part of the output; None: they are not.
    """

    def __init__(
        self, num_rows: int, width: int, device: torch.device, confidences: torch.Tensor | None = None
    ) -> None:
        tokens = torch.zeros(2, words_of_tokens(num_rows, width), dtype=torch.int64, device=device)
        sampled, num_sampled = parts_of_tokens(tokens, num_rows, width)
        turn = torch.zeros(2, dtype=torch.int32, device=device)
        kept = None if confidences is None else confidences.new_zeros(2, num_rows, confidences.shape[1])
        self.places = OutputPlaces(turn, sampled, num_sampled, kept, confidences)
        self._outputs = [{"tokens": own} for own in tokens]
        if kept is not None:
            self._outputs = [own | {CONFIDENCES: kept[turn]} for turn, own in enumerate(self._outputs)]
        self._host_turn = 0

    def start(self) -> None:
        """Called once the step is captured: what ran until then doesn't count."""
        self.places.turn.zero_()
        self._host_turn = 0

    def last(self) -> dict[str, torch.Tensor]:
        """What the replay that was just queued leaves, until the one after the next. Called once for each."""
        turn, self._host_turn = self._host_turn, self._host_turn ^ 1
        return self._outputs[turn]
