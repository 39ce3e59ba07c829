"""`runnerscope dspark train | calibrate | eval`: a draft for any target, from nothing to measured."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..cli.options import add_engine_options, engine_keywords
from ..cli.terminal import UserError, columns, printable
from .cli_data import answers
from .cli_train import add_train_parser

if TYPE_CHECKING:
    from ..llm import LLM
    from .evaluate import Acceptance, DraftModel


def add_parser(commands: Any) -> None:
    """Adds the command to argparse's subparsers."""
    parser = commands.add_parser("dspark", help="train, calibrate or measure a DSpark draft")
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    add_train_parser(actions)

    calibrate = actions.add_parser(
        "calibrate", help="fit the confidences' temperatures and store them beside the draft"
    )
    calibrate.add_argument("draft", type=Path)
    calibrate.add_argument(
        "--temperature", type=float, choices=(0.0, 1.0), default=0.0, help="of the use to calibrate for (default: 0)"
    )
    calibrate.add_argument("--rounds", type=int, default=8, help="anchors a sequence at temperature 1 (default: 8)")
    calibrate.set_defaults(handler=run_calibrate)

    evaluate = actions.add_parser("eval", help="accepted length and acceptance per position, beside the lookup draft")
    evaluate.add_argument("draft", type=Path, nargs="?", help="left out: the lookup draft alone")
    evaluate.add_argument("--k", type=int, help="drafts a round (default: the draft's block, or 7)")
    evaluate.add_argument("--json", action="store_true", help="print JSON instead of tables")
    evaluate.set_defaults(handler=run_eval)
    for each in (calibrate, evaluate):
        each.add_argument("--prompts", type=Path, nargs="+", help='files of {"turns": [...]} lines; default: self-made')
        each.add_argument("--num-sequences", type=int, default=100, help="of each file (default: %(default)s)")
        each.add_argument("--max-tokens", type=int, default=256, help="of an answer (default: %(default)s)")
        add_engine_options(each)


def run_calibrate(arguments: argparse.Namespace) -> int:
    """Fits, stores, prints the measures of each position before and after."""
    from .calibration import fit
    from .data import Sequences
    from .evaluate import greedy_outcomes, sampled_outcomes

    llm = _llm(arguments)
    model = _draft_model(llm, arguments.draft)
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


def run_eval(arguments: argparse.Namespace) -> int:
    """Replays rounds along greedy answers, for each file of prompts."""
    from .evaluate import evaluate_draft, evaluate_lookup

    llm = _llm(arguments)
    model = _draft_model(llm, arguments.draft) if arguments.draft is not None else None
    k = arguments.k or (model.config.block_size if model else 7)
    if model is not None:
        model.config.check_num_speculative_tokens(k)
    results: dict[str, dict[str, Acceptance]] = {}
    sets = answers(llm, arguments, 0.0)
    llm.close()
    for name, sequences in sets.items():
        found = {"dspark": evaluate_draft(model, sequences, k)} if model is not None else {}
        results[name] = found | {"lookup": evaluate_lookup(sequences, k)}
    if arguments.json:
        shown = {
            name: {
                method: {
                    "rounds": len(a.accepted),
                    "accepted_length": a.accepted_length,
                    "conditional": a.conditional_rates,
                }
                for method, a in methods.items()
            }
            for name, methods in results.items()
        }
        print(json.dumps({"num_speculative_tokens": k, "temperature": 0.0, "prompts": shown}, indent=2))
        return 0
    rows = [["prompts", "draft", "rounds", "tokens a round", *(f"accept {j + 1}" for j in range(k))]]
    for name, methods in results.items():
        for method, a in methods.items():
            rates = ["-" if rate is None else f"{rate:.3f}" for rate in a.conditional_rates]
            rows.append([printable(name), method, str(len(a.accepted)), f"{a.accepted_length:.3f}", *rates])
    print("\n".join(columns(rows, right=frozenset(range(2, len(rows[0]))))))
    print("greedy; without speculation a round is 1 token. accept j: of the rounds that came to draft j")
    return 0


def _llm(arguments: argparse.Namespace) -> LLM:
    from engine import LLM

    for path in arguments.prompts or ():
        if not path.is_file():
            raise UserError(f"--prompts {path}: no such file")
    return LLM(**engine_keywords(arguments))


def _draft_model(llm: LLM, path: Path) -> DraftModel:
    from .checkpoint import read_draft
    from .evaluate import DraftModel

    return DraftModel(llm.loaded.model, *read_draft(path))
