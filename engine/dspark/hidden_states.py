"""The target's hidden states of the training sequences, each computed once: in the device's memory where all of them
fit there, else on disk as far as a bound allows.

A row for each token: the injected layers' outputs and, behind them, the last norm's. On disk sequences are laid out in
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
_TOKENS_AT_ONCE = 32_768


class HiddenStates:
    """Hidden states of some sequences.

    Args:
        directory: of the cache files; those of other sequences, layers or weights are overwritten.
        max_bytes: the most that the file of rows may take; 0 for no cache on disk.
        model_name: goes into the check of whose states the files hold.
        memory_bytes: the most that rows may take in the device's memory. Where all fit, nothing goes to disk: to
            compute them again in a later call is quicker than to read them.
    """

    def __init__(
        self,
        model: CausalLM,
        layer_ids: Sequence[int],
        sequences: Sequences,
        directory: Path,
        max_bytes: int,
        model_name: str,
        memory_bytes: int = 0,
    ) -> None:
        self.model, self.layer_ids, self.sequences = model, tuple(layer_ids), sequences
        self.width = (len(layer_ids) + 1) * model.config.hidden_size
        self.num_computed = 0
        """Sequences that went through the target so far."""
        row_bytes = self.width * model.dtype.itemsize
        self._begins = sequences.begins
        total = int(self._begins[-1])
        self._store: Tensor | None = None
        self._rows: np.memmap | None = None
        self._unmarked: set[int] = set()
        self._num_kept = 0
        if (total + 1) * row_bytes <= memory_bytes:
            # Behind the last token's a row of zeros, for what lies behind a shorter sequence.
            self._store = torch.zeros(total + 1, self.width, dtype=model.dtype, device=model.device)
            self._present: np.ndarray = np.zeros(len(sequences), dtype=np.bool_)
            return
        self._num_kept = int(np.searchsorted(self._begins[1:] * row_bytes, max_bytes, side="right"))
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

    @property
    def place(self) -> str:
        """Where they are kept, for a person."""
        gib = int(self._begins[-1]) * self.width * self.model.dtype.itemsize / 2**30
        if self._store is not None:
            return f"{gib:.1f} GiB, in the device's memory"
        return f"{gib:.1f} GiB, of {self._num_kept} on disk, the others computed each time they are wanted"

    def batch(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The injected layers' states [b, s, n * d] and the last [b, s, d], with zeros behind shorter sequences."""
        missing = [i for i in indices if not self._has(i)]
        fresh = self._compute(missing)
        d = self.model.config.hidden_size
        if self._store is not None:
            rows = torch.from_numpy(self.sequences.rows(np.asarray(indices))).to(self.model.device)
            padded = self._store[rows]
        else:
            parts = [fresh[i] if i in fresh else self._read(i) for i in indices]
            padded = torch.nn.utils.rnn.pad_sequence(parts, batch_first=True)
        return padded[..., :-d], padded[..., -d:]

    def sync(self) -> None:
        """Put on disk what was computed. A sequence counts as present only from then on, should the process die."""
        if self._rows is not None and self._unmarked:
            self._rows.flush()
            self._present[list(self._unmarked)] = True
            assert isinstance(self._present, np.memmap)
            self._present.flush()
            self._unmarked.clear()

    def _has(self, index: int) -> bool:
        if self._store is not None:
            return bool(self._present[index])
        return index < self._num_kept and (bool(self._present[index]) or index in self._unmarked)

    def _compute(self, indices: Sequence[int]) -> dict[int, Tensor]:
        """Rows of each sequence, through the target in pieces; kept where there is room. With a store nothing is
        returned: they are in it."""
        fresh: dict[int, Tensor] = {}
        for piece in _pieces(indices, self.sequences.lengths):
            last, chosen = prefill_with_hidden(self.model, [self.sequences[i] for i in piece], self.layer_ids)
            self.num_computed += len(piece)
            for index, pair in zip(piece, zip(chosen, last, strict=True), strict=True):
                begin, end = self._begins[index], self._begins[index + 1]
                if self._store is not None:
                    torch.cat(pair, -1, out=self._store[begin:end])
                    self._present[index] = True
                    continue
                # Clones, outside of inference mode: training saves them for its backward pass.
                fresh[index] = row = torch.cat(pair, -1).clone()
                if index < self._num_kept and self._rows is not None:
                    self._rows[begin:end] = row.cpu().contiguous().view(torch.uint8).numpy()
                    self._unmarked.add(index)
        if len(self._unmarked) > 512:
            self.sync()
        return fresh

    def _read(self, index: int) -> Tensor:
        assert self._rows is not None
        raw = np.array(self._rows[self._begins[index] : self._begins[index + 1]])
        return torch.from_numpy(raw).view(self.model.dtype).to(self.model.device)


def stored_layers(directory: Path) -> tuple[int, ...]:
    """The layers whose states an earlier training left in ``directory``: who needs only the last norm's can share the
    files by asking for the same. Nothing where there are none."""
    path = directory / _ABOUT
    return tuple(json.loads(path.read_text(encoding="utf-8"))["layer_ids"]) if path.is_file() else ()


def _pieces(indices: Sequence[int], lengths: np.ndarray) -> list[list[int]]:
    """``indices``, cut so that no piece but one of a single sequence has more than `_TOKENS_AT_ONCE` tokens."""
    pieces: list[list[int]] = []
    size = 0
    for index in indices:
        length = int(lengths[index])
        if not pieces or size + length > _TOKENS_AT_ONCE:
            pieces.append([])
            size = 0
        pieces[-1].append(index)
        size += length
    return pieces
