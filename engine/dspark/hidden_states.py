"""The target's hidden states of the training sequences: computed once, kept on disk as far as a bound allows.

A file of rows, one a token: the injected layers' outputs and, behind them, the last norm's. Sequences are laid out in
order; those past the bound are computed anew each time they are wanted.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from ..models.decoder import CausalLM
from .data import Sequences
from .target import prefill_with_hidden

_ROWS, _PRESENT, _ABOUT = "hidden.bin", "hidden.present", "hidden.json"


class HiddenStates:
    """Hidden states of some sequences, from disk where they are there.

    Args:
        directory: of the cache files; those of other sequences, layers or weights are overwritten.
        max_bytes: the most that the file of rows may take; 0 for no cache.
        model_name: goes into the check of whose states the files hold.
    """

    def __init__(
        self,
        model: CausalLM,
        layer_ids: Sequence[int],
        sequences: Sequences,
        directory: Path,
        max_bytes: int,
        model_name: str,
    ) -> None:
        self.model, self.layer_ids, self.sequences = model, tuple(layer_ids), sequences
        self.width = (len(layer_ids) + 1) * model.config.hidden_size
        self.num_computed = 0
        """Sequences that went through the target so far."""
        row_bytes = self.width * model.dtype.itemsize
        self._begins = sequences.begins
        ends = self._begins[1:] * row_bytes
        self._num_kept = int(np.searchsorted(ends, max_bytes, side="right"))
        self._rows: np.memmap | None = None
        self._unmarked: set[int] = set()
        if self._num_kept:
            directory.mkdir(parents=True, exist_ok=True)
            self._open(directory, row_bytes, model_name)

    def _open(self, directory: Path, row_bytes: int, model_name: str) -> None:
        about = {
            "model": model_name,
            "dtype": str(self.model.dtype),
            "layer_ids": list(self.layer_ids),
            "sequences": self.sequences.fingerprint,
            "kept": self._num_kept,
            "row_bytes": row_bytes,
        }
        path = directory / _ABOUT
        same = path.is_file() and path.read_text(encoding="utf-8") == json.dumps(about)
        same = same and all((directory / name).is_file() for name in (_ROWS, _PRESENT))
        mode: Literal["r+", "w+"] = "r+" if same else "w+"
        if not same:
            # First of all: files half made must not pass for those that the old description promises.
            path.unlink(missing_ok=True)
        shape = (int(self._begins[self._num_kept]), row_bytes)
        self._rows = np.memmap(directory / _ROWS, dtype=np.uint8, mode=mode, shape=shape)
        self._present = np.memmap(directory / _PRESENT, dtype=np.bool_, mode=mode, shape=(self._num_kept,))
        if not same:
            path.write_text(json.dumps(about), encoding="utf-8")

    def batch(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The injected layers' states [b, s, n * d] and the last [b, s, d], with zeros behind shorter sequences."""
        missing = [i for i in indices if not self._has(i)]
        fresh = dict(zip(missing, self._compute(missing), strict=True)) if missing else {}
        parts = [fresh[i] if i in fresh else self._read(i) for i in indices]
        padded = torch.nn.utils.rnn.pad_sequence(parts, batch_first=True)
        d = self.model.config.hidden_size
        return padded[..., :-d], padded[..., -d:]

    def sync(self) -> None:
        """Put on disk what was computed. A sequence counts as present only from then on, should the process die."""
        if self._rows is not None and self._unmarked:
            self._rows.flush()
            self._present[list(self._unmarked)] = True
            self._present.flush()
            self._unmarked.clear()

    def _has(self, index: int) -> bool:
        return index < self._num_kept and (bool(self._present[index]) or index in self._unmarked)

    def _compute(self, indices: Sequence[int]) -> list[Tensor]:
        last, chosen = prefill_with_hidden(self.model, [self.sequences[i] for i in indices], self.layer_ids)
        # Clones, outside of inference mode: training saves them for its backward pass.
        rows = [torch.cat(pair, -1).clone() for pair in zip(chosen, last, strict=True)]
        self.num_computed += len(rows)
        for index, row in zip(indices, rows, strict=True):
            if index < self._num_kept and self._rows is not None:
                begin, end = self._begins[index], self._begins[index + 1]
                self._rows[begin:end] = row.cpu().contiguous().view(torch.uint8).numpy()
                self._unmarked.add(index)
        if len(self._unmarked) > 512:
            self.sync()
        return rows

    def _read(self, index: int) -> Tensor:
        assert self._rows is not None
        raw = np.array(self._rows[self._begins[index] : self._begins[index + 1]])
        return torch.from_numpy(raw).view(self.model.dtype).to(self.model.device)
