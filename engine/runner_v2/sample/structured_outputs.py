"""What a grammar allows, from the host's bitmaps to the device: kernel 22."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from kernels import apply_grammar_bitmask

from ...device import Device


@dataclass(frozen=True)
class GrammarBitmask:
    """n rows of logits that a grammar constrains: `logits_rows` i32 [n], `bitmask` i32 [n, ceil(V / 32)]."""

    logits_rows: torch.Tensor
    bitmask: torch.Tensor

    @staticmethod
    def upload(device: Device, logits_rows: np.ndarray, bitmask: np.ndarray) -> GrammarBitmask | None:
        """Fresh copies of what the host has built, so that it may build the next step's at once; None for no rows."""
        if not len(logits_rows):
            return None
        return GrammarBitmask(
            device.to_device(logits_rows.astype(np.int32)), device.to_device(bitmask.astype(np.int32, copy=False))
        )

    def apply(self, logits: torch.Tensor, form: str) -> None:
        """Called on the stream; logits f32 [l, V] changed in place."""
        apply_grammar_bitmask(logits, self.logits_rows, self.bitmask, form=form)
