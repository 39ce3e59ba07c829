"""Training a head for a target that stays as it is: steps, checkpoints, resuming.

A step is a pure function of (settings, data, weights, its number): what it trains on is drawn from a generator seeded
with its number. So a run of a number of steps that was interrupted and taken up again ends where an uninterrupted one
does. A run of a number of minutes ends with a finished checkpoint as well, whatever the machine manages in them.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from huggingface_hub.utils import tqdm
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..interrupts import deferred_interrupt
from .data import Sequences
from .hidden_states import HiddenStates
from .loss import LossWeights, StepReport
from .objectives import Batch, Objective, Outcome, TrainingError

STATE_DIRECTORY = "training"
"""Of a draft's directory, for what only its training needs; the rest is the draft and can be handed on."""
_STATE, _ABOUT = "state.safetensors", "state.json"
_MAY_CHANGE = ("steps", "minutes")
"""Settings that a run which is taken up may have otherwise where it goes by the clock."""
_REPORT_SECONDS = 1.0
_REPORT_STEPS = 50


@dataclass(frozen=True)
class TrainingSettings:
    """How to train. The rates and weights are the paper's.

    ``minutes``, where given, takes the place of ``steps``: the learning rate then follows the time spent in training.
    """

    steps: int = 2000
    minutes: float | None = None
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
        if self.minutes is not None and not self.minutes > 0:
            raise TrainingError(f"minutes must be positive, got {self.minutes}")

    def rate(self, done: float) -> float:
        """Learning rate with the part ``done`` of the training done: a linear warm-up, then a cosine to zero."""
        if done < self.warmup:
            return self.learning_rate * done / self.warmup
        return self.learning_rate * 0.5 * (1 + math.cos(math.pi * (done - self.warmup) / (1 - self.warmup)))


class Trainer:
    """A head in training, and its optimizer.

    Args:
        hidden: of ``sequences``, with the layers of ``objective``.

    Raises:
        TrainingError: there is nothing to train on.
    """

    def __init__(
        self, objective: Objective, sequences: Sequences, hidden: HiddenStates, settings: TrainingSettings
    ) -> None:
        if not len(sequences) or int((sequences.lengths - sequences.starts).max()) < 2:
            raise TrainingError("no response is two tokens long: there is nothing to draw an anchor from")
        self.objective, self.sequences, self.hidden, self.settings = objective, sequences, hidden, settings
        self.device = objective.device
        self.weights = objective.weights
        # Behind the last token a zero, for what lies behind a shorter sequence.
        self._tokens = torch.from_numpy(np.append(sequences.tokens, 0).astype(np.int64)).to(self.device)
        self.optimizer = torch.optim.AdamW(
            list(self.weights.values()), lr=settings.learning_rate, weight_decay=settings.weight_decay,
            fused=self.device.type == "cuda",
        )  # fmt: skip
        self.step_number = 0
        self.seconds = 0.0
        """Spent in training, by all calls together; `train` counts them."""

    @property
    def done(self) -> float:
        """The part of the training that is done, 1 at its end."""
        if self.settings.minutes is not None:
            return min(1.0, self.seconds / (60 * self.settings.minutes))
        return min(1.0, self.step_number / self.settings.steps)

    def step(self) -> Outcome:
        """Train on one batch, without waiting for the device."""
        settings = self.settings
        done = self.done if settings.minutes is not None else (self.step_number + 0.5) / settings.steps
        for group in self.optimizer.param_groups:
            group["lr"] = settings.rate(done)
        self.optimizer.zero_grad(set_to_none=True)
        with _tf32(self.device):
            outcome = self.objective.backward(self._batch())
        torch.nn.utils.clip_grad_norm_(list(self.weights.values()), settings.max_grad_norm)
        self.optimizer.step()
        self.step_number += 1
        return outcome

    def _batch(self) -> Batch:
        rng = np.random.default_rng((self.settings.seed, self.step_number))
        size = min(self.settings.batch_size, len(self.sequences))
        chosen_rows = rng.choice(len(self.sequences), size=size, replace=False)
        chosen, last = self.hidden.batch(chosen_rows.tolist())
        if self.device.type == "cpu":
            chosen, last = chosen.float(), last.float()
        rows = torch.from_numpy(self.sequences.rows(chosen_rows)).to(self.device, non_blocking=True)
        lengths, starts = self.sequences.lengths[chosen_rows], self.sequences.starts[chosen_rows]
        return Batch(self._tokens[rows], chosen, last, lengths, starts, rng)

    # -- on disk

    def save(self, directory: Path, dtype: torch.dtype) -> None:
        """The head as a checkpoint that loads anywhere, and beside it what taking the training up again needs."""
        self.hidden.sync()
        self.objective.write(directory, dtype)
        state: dict[str, Tensor] = {}
        for name, weight in self.weights.items():
            state[f"weight.{name}"] = weight.detach()
            for key, value in self.optimizer.state.get(weight, {}).items():
                state[f"{key}.{name}"] = value
        directory = directory / STATE_DIRECTORY
        directory.mkdir(exist_ok=True)
        part = directory / f"{_STATE}.part"
        # The numbers lie in the file itself, so that they are of these weights whenever the process dies.
        numbers = {"step": str(self.step_number), "seconds": repr(self.seconds)}
        save_file({k: v.cpu().contiguous() for k, v in state.items()}, part, metadata=numbers)
        os.replace(part, directory / _STATE)
        (directory / _ABOUT).write_text(json.dumps(self._about() | numbers, indent=2) + "\n")

    def resume(self, directory: Path) -> bool:
        """Take up what `save` left; False if there is nothing.

        Raises:
            TrainingError: it was another training; says what differs.
        """
        directory = directory / STATE_DIRECTORY
        if not (directory / _STATE).is_file() or not (directory / _ABOUT).is_file():
            return False
        about = json.loads((directory / _ABOUT).read_text(encoding="utf-8"))
        own = json.loads(json.dumps(self._about()))
        if self.settings.minutes is not None and isinstance(about.get("settings"), dict):
            about["settings"] |= {name: own["settings"][name] for name in _MAY_CHANGE}
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
                    # A fused optimizer counts its steps on the device, the other on the host.
                    on_device = self.optimizer.param_groups[0]["fused"]
                    self.optimizer.state[weight] = {
                        key: value if key == "step" and not on_device else value.to(self.device)
                        for key, value in kept.items()
                    }
        with safe_open(directory / _STATE, framework="pt") as opened:
            numbers = opened.metadata()
        self.step_number, self.seconds = int(numbers["step"]), float(numbers["seconds"])
        return True

    def _about(self) -> dict[str, Any]:
        return {
            "settings": dataclasses.asdict(self.settings),
            **self.objective.about(),
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
    """Train to the end, saving now and then and when interrupted (a Ctrl-C ends it behind a whole step).

    Returns:
        The mean report of the last steps; None where none was left.
    """
    loss = trainer.settings.loss
    recent: deque[Outcome] = deque(maxlen=_REPORT_STEPS)
    shown = 0.0
    unit: dict[str, Any] = {"total": trainer.settings.steps, "initial": trainer.step_number}
    if trainer.settings.minutes is not None:
        unit = {
            "total": round(60 * trainer.settings.minutes),
            "initial": round(trainer.seconds),
            "unit": "s",
        }
    bar = tqdm(desc=f"Training {trainer.objective.title}", disable=not progress, **unit)
    begin, earlier = time.monotonic(), trainer.seconds
    try:
        while trainer.done < 1:
            with deferred_interrupt():
                trainer.seconds = earlier + time.monotonic() - begin
                recent.append(trainer.step())
                if on_step is not None:
                    on_step(trainer.step_number, recent[-1].report(loss))
                if time.monotonic() - shown > _REPORT_SECONDS and progress:
                    shown, report = time.monotonic(), recent[-1].report(loss)
                    told = {"step": trainer.step_number, "loss": f"{report.loss:.3f}", "tau": f"{report.tau:.2f}"}
                    bar.set_postfix(told, refresh=False)
                    bar.update((trainer.step_number if trainer.settings.minutes is None else trainer.seconds) - bar.n)
                if trainer.step_number % save_every == 0 and trainer.done < 1:
                    trainer.save(directory, dtype)
    except KeyboardInterrupt:
        with deferred_interrupt():
            trainer.save(directory, dtype)
        raise
    finally:
        bar.close()
    with deferred_interrupt():
        trainer.save(directory, dtype)
    return _mean(recent).report(loss) if recent else None


def _mean(outcomes: deque[Outcome]) -> Outcome:
    sums = outcomes[0].sums
    for outcome in list(outcomes)[1:]:
        sums = sums + outcome.sums
    return Outcome(sums, sum(outcome.weight for outcome in outcomes))


@contextmanager
def _tf32(device: torch.device) -> Iterator[None]:
    """f32 products in TF32 on a GPU: logits over the whole vocabulary are most of a step, and bfloat16 is too coarse
    for them."""
    before = torch.get_float32_matmul_precision()
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
