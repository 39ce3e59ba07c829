"""`runnerscope dspark eval`: every way of drafting, along the same greedy answers, in one table."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..cli.numbers import count
from ..cli.options import add_engine_options, engine_keywords
from ..cli.terminal import UserError, columns, printable
from ..speculative_config import SpeculativeConfig
from .cli_data import add_prompt_options, answers, check_prompt_files

if TYPE_CHECKING:
    from ..llm import LLM
    from ..models import LoadedModel
    from .evaluate import Acceptance, DraftModel

Results = dict[str, dict[str, "Acceptance"]]
"""File of prompts, method."""


def add_eval_parser(actions: Any) -> None:
    """Adds the action to the subparsers of `runnerscope dspark`."""
    evaluate = actions.add_parser(
        "eval",
        usage="%(prog)s [options] [draft]",
        help="accepted length and acceptance per position: none, ngram, lookup, and the heads that there are",
        description="Replays the rounds of each way of drafting along the target's greedy answers, which no draft "
        "can change.",
    )
    evaluate.add_argument("draft", type=Path, nargs="?", help="a DSpark draft (default: the package's, if it has one)")
    evaluate.add_argument("--mtp", type=Path, metavar="DIR", help="an MTP head (default: the package's, if it has one)")
    evaluate.add_argument("--k", type=count, metavar="N", help="drafts a round (default: the draft's block, or 7)")
    evaluate.add_argument("--json", action="store_true", help="print JSON instead of tables")
    evaluate.add_argument("--to-card", action="store_true", help="put the table into the cards of DRAFT and --mtp too")
    evaluate.set_defaults(handler=run_eval)
    add_prompt_options(evaluate)
    add_engine_options(evaluate)


def run_eval(arguments: argparse.Namespace) -> int:
    """Answers each file of prompts, then replays."""
    from .card import add_results, command_line
    from .evaluate import evaluate_draft, evaluate_lookup
    from .evaluate_others import evaluate_mtp, evaluate_ngram, evaluate_none

    if arguments.to_card and arguments.draft is None and arguments.mtp is None:
        raise UserError("--to-card: give DRAFT or --mtp, whose card is meant")
    llm = engine(arguments)
    model, head = _draft(llm.loaded, arguments.draft), _head(llm.loaded, arguments.mtp)
    k = arguments.k or (model.config.block_size if model else 7)
    if model is not None:
        model.config.check_num_speculative_tokens(k)
    sets = answers(llm, arguments, 0.0)
    llm.close()
    # As the engine has them where nothing else is asked for.
    ngram = SpeculativeConfig(method="ngram", num_speculative_tokens=k)
    lookup = SpeculativeConfig(method="dspark", draft="lookup", num_speculative_tokens=k)
    results: Results = {}
    for name, sequences in sets.items():
        results[name] = {
            "none": evaluate_none(sequences),
            "ngram": evaluate_ngram(sequences, k, *ngram.prompt_lookup),
            "lookup": evaluate_lookup(sequences, k, *lookup.prompt_lookup),
        }
        if head is not None:
            results[name]["mtp"] = evaluate_mtp(llm.loaded.model, head[0], head[1], sequences)
        if model is not None:
            results[name]["dspark"] = evaluate_draft(model, sequences, k)
    lines = _table(results, k)
    if arguments.to_card:
        for directory in filter(None, (arguments.draft, arguments.mtp)):
            add_results(directory, lines, command_line())
    print(_json(results, k) if arguments.json else "\n".join(lines))
    return 0


def _table(results: Results, k: int) -> list[str]:
    rows = [["prompts", "draft", "rounds", "tokens a round", *(f"accept {j + 1}" for j in range(k))]]
    for name, methods in results.items():
        for method, a in methods.items():
            rates = ["-" if rate is None else f"{rate:.3f}" for rate in a.conditional_rates]
            rates += ["-"] * (k - len(rates))
            rows.append([printable(name), method, str(len(a.accepted)), f"{a.accepted_length:.3f}", *rates])
    foot = "greedy; a round is one pass of the target. accept j: of the rounds that came to draft j"
    return [*columns(rows, right=frozenset(range(2, len(rows[0])))), foot]


def _json(results: Results, k: int) -> str:
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
    return json.dumps({"num_speculative_tokens": k, "temperature": 0.0, "prompts": shown}, indent=2)


def engine(arguments: argparse.Namespace) -> LLM:
    """The target's engine, once the files of prompts are known to be good."""
    from engine import LLM

    check_prompt_files(arguments)
    return LLM(**engine_keywords(arguments))


def draft_model(loaded: LoadedModel, path: Path) -> DraftModel:
    """A draft beside its target, for measuring."""
    from .checkpoint import read_draft
    from .evaluate import DraftModel

    return DraftModel(loaded.model, *read_draft(path))


def _draft(loaded: LoadedModel, path: Path | None) -> DraftModel | None:
    path = path or _shipped("dspark", loaded)
    return None if path is None else draft_model(loaded, path)


def _head(loaded: LoadedModel, path: Path | None) -> Any:
    from ..spec_decode.mtp_checkpoint import check_target, read_mtp

    path = path or _shipped("mtp", loaded)
    if path is None:
        return None
    config, weights = read_mtp(path)
    check_target(config, loaded.config)
    return config, weights


def _shipped(method: str, loaded: LoadedModel) -> Path | None:
    from ..config_checks import ConfigError
    from ..spec_decode.shipped import shipped_head

    try:
        return shipped_head(method, loaded)
    except ConfigError:
        return None
