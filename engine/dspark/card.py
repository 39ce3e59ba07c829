"""The card of a trained draft: what it is for, what it was made of and how, and how far it came."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from .config import DSparkConfig
from .loss import StepReport
from .training import TrainingSettings

FILE_NAME = "README.md"


def write_card(
    directory: Path,
    config: DSparkConfig,
    settings: TrainingSettings,
    data: Mapping[str, str],
    num_tokens: int,
    report: StepReport,
    seconds: float,
    dtype: str,
) -> None:
    """Write it beside the draft.

    Args:
        data: how the sequences were made, as stored with them; num_tokens: theirs, prompts counted.
        report: of the last step; seconds: of this call's steps.
    """
    size = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    rates = ", ".join(f"{rate:.3f}" for rate in report.accept_rate)
    shape = {
        "block": config.block_size,
        "layers": config.model.num_hidden_layers,
        "MLP width": config.model.intermediate_size,
        "layers of the target listened to": ", ".join(map(str, config.target_layer_ids)),
        "Markov head": f"{config.markov_head_type}, rank {config.markov_rank}",
        "filler token": config.mask_token_id,
        "stored as": f"{dtype}, {size / 2**20:.2f} MiB, without the target's embedding and output head",
    }
    trained = {k: v for k, v in dataclasses.asdict(settings).items() if k != "loss"} | dataclasses.asdict(settings.loss)
    reached = {
        "loss, CE, L1": f"{report.loss:.4f}, {report.ce:.4f}, {report.l1:.4f}",
        "chance of acceptance by slot (temperature 1, behind the target's own tokens)": rates,
        "tokens of a round expected from it": f"{report.tau:.3f}",
        "confidence: mean error, mean bias": f"{report.confidence_error:.4f}, {report.confidence_bias:.4f}",
        "seconds, on": f"{seconds:.0f}, {device}, torch {torch.__version__}",
    }
    parts = [
        f"# DSpark draft for {data.get('model', 'a target')}",
        "Made by `runnerscope dspark train`; use it with "
        '`speculative_config={"method": "dspark", "model": "<this directory>"}`. What it accepts on other prompts: '
        "`runnerscope dspark eval <this directory> --prompts <file>`.",
        _table("Draft", shape),
        _table("Data: the target's own answers", {**data, "tokens": num_tokens}),
        _table("Training", trained),
        _table("Last step", reached),
    ]
    (directory / FILE_NAME).write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def _table(title: str, rows: Mapping[str, Any]) -> str:
    lines = [f"| {key} | {str(value).replace('|', '/')} |" for key, value in rows.items()]
    return "\n".join([f"## {title}", "", "| | |", "|---|---|", *lines])
