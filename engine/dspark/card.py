"""The card of a trained head: what it is for, what it was made of and how, and how far it came."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from .loss import StepReport
from .objectives import DraftObjective, MtpObjective, Objective
from .training import Trainer, TrainingSettings

FILE_NAME = "README.md"
_RESULTS = "## Measured"


def write_card(
    directory: Path,
    objective: Objective,
    settings: TrainingSettings,
    data: Mapping[str, str],
    num_tokens: int,
    report: StepReport,
    trainer: Trainer,
    dtype: str,
    command: str,
) -> None:
    """Write it beside the head.

    Args:
        data: how the sequences were made, as stored with them; num_tokens: theirs, prompts counted.
        report: of the last steps.
        command: what made it.
    """
    size = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    is_draft = isinstance(objective, DraftObjective)
    shape = _draft_shape(objective) if isinstance(objective, DraftObjective) else _head_shape(objective)
    shape["stored as"] = f"{dtype}, {size / 2**20:.2f} MiB, without the target's embedding and output head"
    trained = {k: v for k, v in dataclasses.asdict(settings).items() if k != "loss" and v is not None}
    trained |= {"steps": trainer.step_number} | {f"loss: {k}": v for k, v in dataclasses.asdict(settings.loss).items()}
    reached = {
        "loss, CE, L1": f"{report.loss:.4f}, {report.ce:.4f}, {report.l1:.4f}",
        "chance of acceptance by slot (temperature 1, behind the target's own tokens)": ", ".join(
            f"{rate:.3f}" for rate in report.accept_rate
        ),
        "tokens of a round expected from it": f"{report.tau:.3f}",
        "confidence: mean error, mean bias": f"{report.confidence_error:.4f}, {report.confidence_bias:.4f}",
        "seconds, on": f"{trainer.seconds:.0f}, {device}, torch {torch.__version__}",
    }
    if not is_draft:
        del reached["confidence: mean error, mean bias"]
    method = "dspark" if is_draft else "mtp"
    kind = "DSpark draft" if is_draft else "MTP head"
    parts = [
        f"# {kind} for {data.get('model', 'a target')}",
        f'Use it with `speculative_config={{"method": "{method}", "model": "<this directory>"}}`. Made by',
        f"    {command}",
        _table(kind, shape),
        _table("Data: the target's own answers", {**data, "tokens": num_tokens}),
        _table("Training", trained),
        _table("Last steps", reached),
    ]
    (directory / FILE_NAME).write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def command_line() -> str:
    """What was called, without the directories of this machine."""
    arguments = [Path(text).name if Path(text).is_absolute() else text for text in sys.argv[1:]]
    return shlex.join(["runnerscope", *arguments])


def add_results(directory: Path, lines: Sequence[str], command: str) -> None:
    """Put a table of `runnerscope dspark eval` under the card, in place of an earlier one."""
    path = directory / FILE_NAME
    card = path.read_text(encoding="utf-8") if path.is_file() else "# A head for speculative decoding\n"
    kept = card.partition(f"\n{_RESULTS}\n")[0].rstrip("\n")
    table = "\n".join(f"    {line}" for line in lines)
    path.write_text(f"{kept}\n\n{_RESULTS}\n\n    {command}\n\n{table}\n", encoding="utf-8")


def _draft_shape(objective: DraftObjective) -> dict[str, Any]:
    config = objective.config
    return {
        "block": config.block_size,
        "layers": config.model.num_hidden_layers,
        "MLP width": config.model.intermediate_size,
        "layers of the target listened to": ", ".join(map(str, config.target_layer_ids)),
        "Markov head": f"{config.markov_head_type}, rank {config.markov_rank}",
        "filler token": config.mask_token_id,
    }


def _head_shape(objective: Objective) -> dict[str, Any]:
    assert isinstance(objective, MtpObjective)
    config = objective.config
    return {"layers": config.num_hidden_layers, "MLP width": config.intermediate_size}


def _table(title: str, rows: Mapping[str, Any]) -> str:
    lines = [f"| {key} | {str(value).replace('|', '/')} |" for key, value in rows.items()]
    return "\n".join([f"## {title}", "", "| | |", "|---|---|", *lines])
