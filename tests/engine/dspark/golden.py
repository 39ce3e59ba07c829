"""The reference implementation's values, and the models they were made with."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import load_file

from engine.dspark import DSparkConfig, Weights, read_draft
from engine.models import CausalLM, load_model

ROOT = Path(__file__).parents[2] / "golden" / "dspark"
HEADS = ("vanilla", "gated", "rnn")
NUM_ROUNDS = 8
TOLERANCE = {"rtol": 0.0, "atol": 1e-4}


@dataclass(frozen=True)
class Golden:
    target: CausalLM
    config: DSparkConfig
    weights: Weights
    values: dict[str, torch.Tensor]

    @property
    def sequence(self) -> list[int]:
        """Prompt and everything emitted."""
        return self.values["sequence"].tolist()

    def rounds(self) -> list[tuple[int, dict[str, torch.Tensor]]]:
        """Position of the anchor, and the values, of each round."""
        position, rounds = len(self.values["prompt"]), []
        for k in range(NUM_ROUNDS):
            prefix = f"round{k}."
            values = {name.removeprefix(prefix): v for name, v in self.values.items() if name.startswith(prefix)}
            rounds.append((position, values))
            position += len(values["emitted"])
        return rounds


@cache
def golden(head: str, device: str = "cpu") -> Golden:
    """Weights and values stay on the CPU; the target runs on ``device``."""
    root = ROOT / head
    target = load_model(
        root / "target", dtype=torch.float32, device=torch.device(device), skip_tokenizer_init=True
    ).model
    return Golden(target, *read_draft(root / "draft"), load_file(root / "golden.safetensors"))
