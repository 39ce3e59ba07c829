"""Training a draft for a target that stays as it is: steps, checkpoints, resuming.

A step is a pure function of (settings, data, weights, its number): what it trains on is drawn from a generator seeded
with its number. So a run that was interrupted and taken up again ends where an uninterrupted one does.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from huggingface_hub.utils import tqdm
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..models.decoder import CausalLM
from .checkpoint import Weights, init_weights, write_draft
from .config import DSparkConfig
from .contiguous import draft_hidden
from .data import Sequences
from .hidden_states import HiddenStates
from .loss import Blocks, LossSums, LossWeights, StepReport, block_labels, block_losses, sample_anchors, slot_weights

STATE_DIRECTORY = "training"
"""Of a draft's directory, for what only its training needs; the rest is the draft and can be handed on."""
_STATE, _ABOUT = "state.safetensors", "state.json"
_ROWS_AT_ONCE = {"cuda": 8192, "cpu": 1024}
"""Slots whose logits over the whole vocabulary are in memory together."""


class TrainingError(ValueError):
    """A training that cannot be run or taken up again; says why and what to do."""


@dataclass(frozen=True)
class TrainingSettings:
    """How to train. The rates and weights are the paper's."""

    steps: int = 2000
    batch_size: int = 32
    num_anchors: int = 32
    learning_rate: float = 6e-4
    warmup: float = 0.04
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    seed: int = 0
    loss: LossWeights = field(default_factory=LossWeights)

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "num_anchors"):
            if getattr(self, name) < 1:
                raise TrainingError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not self.learning_rate > 0 or not 0 <= self.warmup < 1:
            raise TrainingError(
                f"learning_rate must be positive and warmup a part of 1, got {self.learning_rate}, {self.warmup}"
            )

    def rate(self, step: int) -> float:
        """Learning rate of a step: a linear warm-up, then a cosine to zero."""
        warm = max(1, round(self.warmup * self.steps))
        if step < warm:
            return self.learning_rate * (step + 1) / warm
        return self.learning_rate * 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, self.steps - warm)))


class Trainer:
    """A draft in training, and its optimizer.

    Args:
        target: the model that the draft is for; its weights are only read.
        hidden: of ``sequences``, on the target's device.

    Raises:
        DraftConfigError: the draft is not one for the target.
        TrainingError: there is nothing to train on.
    """

    def __init__(
        self,
        target: CausalLM,
        config: DSparkConfig,
        sequences: Sequences,
        hidden: HiddenStates,
        settings: TrainingSettings,
    ) -> None:
        config.check_target(target.config)
        if not len(sequences) or int((sequences.lengths - sequences.starts).max()) < 2:
            raise TrainingError("no response is two tokens long: there is nothing to draw an anchor from")
        self.config, self.sequences, self.hidden, self.settings = config, sequences, hidden, settings
        self.device = target.device
        self.embedding, self.head = shared_weights(target)
        start = init_weights(config, settings.seed)
        self.weights: Weights = {name: w.to(self.device).requires_grad_() for name, w in start.items()}
        self.optimizer = torch.optim.AdamW(
            list(self.weights.values()), lr=settings.learning_rate, weight_decay=settings.weight_decay
        )
        self.step_number = 0

    def step(self) -> StepReport:
        """Train on one batch."""
        settings = self.settings
        rng = np.random.default_rng((settings.seed, self.step_number))
        size = min(settings.batch_size, len(self.sequences))
        batch = rng.choice(len(self.sequences), size=size, replace=False)
        for group in self.optimizer.param_groups:
            group["lr"] = settings.rate(self.step_number)
        self.optimizer.zero_grad(set_to_none=True)
        sums, weight = self._backward(batch, rng)
        torch.nn.utils.clip_grad_norm_(list(self.weights.values()), settings.max_grad_norm)
        self.optimizer.step()
        self.step_number += 1
        return StepReport.of(sums, weight, settings.loss)

    def _backward(self, batch: np.ndarray, rng: np.random.Generator) -> tuple[LossSums, float]:
        """Gradients of the batch's mean loss; its sums, and the weight of all its slots."""
        lengths, starts = self.sequences.lengths[batch], self.sequences.starts[batch]
        anchors_np, real_np = sample_anchors(lengths, starts, self.settings.num_anchors, rng)
        context, last = self.hidden.batch(batch.tolist())
        rows = [torch.tensor(self.sequences[i]) for i in batch.tolist()]
        tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(self.device)
        anchors, real = torch.from_numpy(anchors_np).to(self.device), torch.from_numpy(real_np).to(self.device)
        block, d = self.config.block_size, last.shape[-1]
        before, labels, valid = block_labels(tokens, torch.from_numpy(lengths).to(self.device), anchors, real, block)
        # The target's state at the token before a slot is what its own prediction of the slot comes from.
        place = (anchors.unsqueeze(-1) + torch.arange(block, device=self.device)).clamp(max=last.shape[1] - 1)
        target_hidden = last.gather(1, place.flatten(1).unsqueeze(-1).expand(-1, -1, d)).view(*place.shape, d)
        with self._autocast():
            ids = tokens.gather(1, anchors)
            hidden = draft_hidden(self.config, self.weights, self.embedding, context, ids, anchors)
        keep = real.flatten().nonzero().squeeze(1)
        parts = [x.flatten(0, 1)[keep] for x in (target_hidden, before, labels, valid)]
        leaf = hidden.flatten(0, 1)[keep].detach().requires_grad_()
        weight = slot_weights(parts[3], self.settings.loss.decay).sum()
        sums: LossSums | None = None
        chunk = max(1, _ROWS_AT_ONCE[self.device.type] // block)
        for begin in range(0, len(leaf), chunk):
            piece = Blocks(*(x[begin : begin + chunk] for x in (leaf, *parts)))
            terms = block_losses(self.config, self.weights, self.head, piece, self.settings.loss.decay)
            (terms.total(self.settings.loss) / weight).backward()
            sums = terms.detached() if sums is None else sums + terms.detached()
        assert sums is not None and leaf.grad is not None
        hidden.flatten(0, 1)[keep].backward(leaf.grad)
        return sums, float(weight)

    def _autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast("cuda", torch.bfloat16) if self.device.type == "cuda" else nullcontext()

    # -- on disk

    def save(self, directory: Path, dtype: torch.dtype) -> None:
        """The draft as a checkpoint that loads anywhere, and beside it what taking the training up again needs."""
        self.hidden.sync()
        write_draft(directory, self.config, self.weights, dtype)
        state: dict[str, Tensor] = {}
        for name, weight in self.weights.items():
            state[f"weight.{name}"] = weight.detach()
            for key, value in self.optimizer.state.get(weight, {}).items():
                state[f"{key}.{name}"] = value
        directory = directory / STATE_DIRECTORY
        directory.mkdir(exist_ok=True)
        part = directory / f"{_STATE}.part"
        save_file({k: v.cpu().contiguous() for k, v in state.items()}, part, metadata={"step": str(self.step_number)})
        os.replace(part, directory / _STATE)
        (directory / _ABOUT).write_text(json.dumps(self._about() | {"step": self.step_number}, indent=2) + "\n")

    def resume(self, directory: Path) -> bool:
        """Take up what `save` left; False if there is nothing.

        Raises:
            TrainingError: it was another training; says what differs.
        """
        directory = directory / STATE_DIRECTORY
        if not (directory / _STATE).is_file():
            return False
        about = json.loads((directory / _ABOUT).read_text(encoding="utf-8"))
        own = json.loads(json.dumps(self._about()))
        different = [name for name in own if about.get(name) != own[name]]
        if different:
            said = "; ".join(f"{name} was {about.get(name)}, is {own[name]}" for name in different)
            raise TrainingError(
                f"{directory}: holds another training: {said}. Give another --out, or the same settings"
            )
        state = load_file(directory / _STATE)
        with torch.no_grad():
            for name, weight in self.weights.items():
                weight.copy_(state[f"weight.{name}"])
                kept = {
                    key: state[f"{key}.{name}"] for key in ("step", "exp_avg", "exp_avg_sq") if f"{key}.{name}" in state
                }
                if kept:
                    moved = {key: value if key == "step" else value.to(self.device) for key, value in kept.items()}
                    self.optimizer.state[weight] = moved
        self.step_number = int(about["step"])
        return True

    def _about(self) -> dict[str, Any]:
        return {
            "settings": dataclasses.asdict(self.settings),
            "config": self.config.to_hf(),
            "sequences": self.sequences.fingerprint,
        }


def train(
    trainer: Trainer,
    directory: Path,
    *,
    dtype: torch.dtype,
    save_every: int = 500,
    progress: bool = True,
    on_step: Callable[[int, StepReport], None] | None = None,
) -> StepReport | None:
    """Run the steps that are left, saving now and then and when interrupted; the last step's report."""
    report, total = None, trainer.settings.steps
    bar = tqdm(total=total, initial=trainer.step_number, desc="Training the draft", disable=not progress)
    try:
        while trainer.step_number < total:
            report = trainer.step()
            bar.update()
            bar.set_postfix(loss=f"{report.loss:.3f}", tau=f"{report.tau:.2f}", refresh=False)
            if on_step is not None:
                on_step(trainer.step_number, report)
            if trainer.step_number % save_every == 0 and trainer.step_number < total:
                trainer.save(directory, dtype)
    finally:
        bar.close()
        trainer.save(directory, dtype)
    return report


def shared_weights(target: CausalLM) -> tuple[Tensor, Tensor]:
    """The target's embedding [V, d] and output head [V, d], f32 and free of inference mode.

    Raises:
        TrainingError: the head is held in a form that can't be read back.
    """
    embedding, head = target.embed_tokens.weight, target.lm_head.weight
    if head is None:
        if not target.config.tie_word_embeddings:
            raise TrainingError(
                "the target's output head is packed for this CPU: load it with dtype float32 to train on it"
            )
        head = embedding
    plain = embedding.detach().float().clone()
    return plain, plain if head is embedding else head.detach().float().clone()
