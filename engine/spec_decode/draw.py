"""How a model's drafts are taken from its logits: the most likely token, or one that is drawn."""

from __future__ import annotations

import torch

from kernels import Purpose, apply_temperature, draft_noise_positions, gumbel_sample
from kernels.markov_logits import KeptLogits

from .interface import FinishedStep


class DraftSampler:
    """`num_rows` R, `num_drafts` N. "greedy" takes the argmax; "probabilistic" draws from softmax(logits / T), and
    keeps the logits of every draft for the verification: f32 [R, N, V]."""

    def __init__(
        self, method: str, num_rows: int, num_drafts: int, vocab_size: int, device: torch.device, form: str
    ) -> None:
        self._form = form
        self._counters = torch.zeros(num_rows, dtype=torch.int32, device=device)
        self.logits: torch.Tensor | None = None
        if method == "probabilistic":
            self.logits = torch.zeros(num_rows, num_drafts, vocab_size, dtype=torch.float32, device=device)

    def draw(self, step: FinishedStep, index: int, logits: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Draft number `index` of each request, i64 [r], which will stand at `positions` i64 [r]; logits f32 [r, V],
        changed in place."""
        rows = step.rows
        if self.logits is None:
            return gumbel_sample(
                logits, step.idx_mapping, rows.temperature, rows.seeds, positions, purpose=Purpose.DRAFT,
                all_greedy=True, counters=self._counters, form=self._form,
            )  # fmt: skip
        apply_temperature(logits, step.idx_mapping, rows.temperature, form=self._form)
        self.logits[:, index].index_copy_(0, step.idx_mapping.clamp(min=0).long(), logits)
        return self.choose(step, logits, draft_noise_positions(positions, index))

    def choose(self, step: FinishedStep, logits: torch.Tensor, noise_positions: torch.Tensor) -> torch.Tensor:
        """One draft of each request, i64 [r], by softmax(logits f32 [r, V]), which have their temperature; the noise is
        that of i64 [r] (see `draft_noise_positions`)."""
        rows = step.rows
        return gumbel_sample(
            logits, step.idx_mapping, rows.temperature, rows.seeds, noise_positions, purpose=Purpose.DRAFT,
            counters=self._counters, form=self._form,
        )  # fmt: skip

    def kept(self, step: FinishedStep) -> KeptLogits:
        """Where what this step's drafts are drawn from is kept. "probabilistic" alone."""
        assert self.logits is not None, "greedy drafts keep no logits"
        return KeptLogits(step.idx_mapping, step.rows.temperature, self.logits)
