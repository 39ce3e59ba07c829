"""`runnerscope dspark train | calibrate | eval`: a draft for any target, from nothing to measured."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ..cli.numbers import count
from ..cli.options import add_engine_options
from ..cli.terminal import UserError, columns
from .cli_data import add_prompt_options, answers
from .cli_eval import add_eval_parser, draft_model, engine
from .cli_train import add_train_parser


def add_parser(commands: Any) -> None:
    """Adds the command to argparse's subparsers."""
    parser = commands.add_parser("dspark", help="train, calibrate or measure a DSpark draft or an MTP head")
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    add_train_parser(actions)

    calibrate = actions.add_parser(
        "calibrate",
        usage="%(prog)s [options] draft",
        help="fit the confidences' temperatures and store them beside the draft",
        description="Lets the target answer prompts, drafts behind every token, and fits one temperature a position.",
    )
    calibrate.add_argument("draft", type=Path, help="directory of the DSpark draft")
    calibrate.add_argument(
        "--temperature", type=float, choices=(0.0, 1.0), default=0.0, help="of the use to calibrate for (default: 0)"
    )
    calibrate.add_argument(
        "--rounds", type=count, metavar="N", default=8, help="anchors a sequence at temperature 1 (default: 8)"
    )
    calibrate.set_defaults(handler=run_calibrate)

    add_prompt_options(calibrate)
    add_engine_options(calibrate)
    add_eval_parser(actions)


def run_calibrate(arguments: argparse.Namespace) -> int:
    """Fits, stores, prints the measures of each position before and after."""
    from .calibration import fit
    from .data import Sequences
    from .evaluate import greedy_outcomes, sampled_outcomes

    llm = engine(arguments)
    model = draft_model(llm.loaded, arguments.draft)
    if not model.config.enable_confidence_head:
        raise UserError(f"{arguments.draft} has no confidence head: there is nothing to calibrate")
    sequences = Sequences.joined(list(answers(llm, arguments, arguments.temperature).values()))
    llm.close()
    if arguments.temperature == 0:
        logits, accepted = greedy_outcomes(model, sequences)
    else:
        logits, accepted = sampled_outcomes(model, sequences, arguments.rounds, seed=0)
    found = fit(logits, accepted)
    found.save(arguments.draft)
    header = [
        "position",
        "temperature",
        "accepted",
        "ECE before",
        "after",
        "AUROC before",
        "after",
        "Brier before",
        "after",
    ]
    rows = [header]
    for k, (before, after) in enumerate(zip(found.before, found.after, strict=True)):
        measures = [before.ece, after.ece, before.auroc, after.auroc, before.brier, after.brier]
        shown = ["-" if m is None else f"{m:.4f}" for m in measures]
        rows.append([str(k + 1), f"{found.temperatures[k]:.3f}", f"{after.acceptance:.3f}", *shown])
    print("\n".join(columns(rows, right=frozenset(range(len(header))))))
    print(f"{found.num_blocks} blocks; stored in {arguments.draft}")
    return 0
