"""`runnerscope bench --peer transformers`: the figures, in a table or as JSON."""

from __future__ import annotations

import argparse
import json
from typing import Any

from .options import add_engine_options, engine_keywords, without_model
from .terminal import UserError, columns

_PEERS = ("transformers",)


def add_parser(commands: Any) -> None:
    """Adds the command to argparse's subparsers."""
    parser = commands.add_parser(
        "bench", usage="%(prog)s [options]", help="measure both runners against a peer: same weights, same run"
    )
    parser.add_argument("--peer", choices=_PEERS, default=_PEERS[0])
    parser.add_argument("--threads", type=int, default=2, help="torch threads of either side (default: 2)")
    parser.add_argument("--repeats", type=int, default=3, help="timed repeats of each side, at least 3 (default: 3)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    add_engine_options(parser)
    parser.set_defaults(handler=run)


def run(arguments: argparse.Namespace) -> int:
    """Measures and prints. Prefix caching is off unless asked for: a repeat mustn't find its own prompt."""
    import torch

    from engine import LLM
    from engine.bench.compare import compare

    if arguments.repeats < 3:
        raise UserError(f"--repeats {arguments.repeats}: a median needs at least 3")
    if arguments.threads < 1:
        raise UserError(f"--threads {arguments.threads}: at least 1")
    torch.set_num_threads(arguments.threads)
    keywords = {"enable_prefix_caching": False} | engine_keywords(arguments)
    v2 = LLM(use_v2_model_runner=True, **keywords)
    v1 = LLM(loaded=v2.loaded, use_v2_model_runner=False, **without_model(keywords))
    report = compare({"V2": v2, "V1": v1}, peer=arguments.peer, repeats=arguments.repeats)
    if arguments.json:
        print(json.dumps(report.to_dict(), indent=2))
    else:
        print("\n".join(_lines(report)))
    return 0


def _lines(report: Any) -> list[str]:
    lines = columns([[key, value] for key, value in report.about.items()])
    megabytes = report.weight_bytes / 1e6
    lines.append(
        f"a step reads {megabytes:.0f} MB of weights; greedy; {report.repeats} repeats, the sides taking turns"
    )
    head = [
        "",
        "tokens/s",
        "[min–max]",
        "ms/step",
        "steps",
        "weights GB/s",
        f"× {report.peer}",
        "same tokens",
        "warm-up",
    ]
    for workload, rows in report.rows.items():
        table = [head]
        for row in rows:
            t, (low, high), (same, total) = row.timing, row.timing.spread, row.same_tokens
            table.append(
                [
                    row.side, f"{t.tokens_per_second:.1f}", f"[{low:.1f}–{high:.1f}]", f"{t.ms_per_step:.1f}",
                    str(t.steps), f"{t.bandwidth(report.weight_bytes):.1f}", f"{row.ratio:.2f}", f"{same}/{total}",
                    f"{t.warm_up:.1f} s",
                ]
            )  # fmt: skip
        lines += ["", str(workload), *columns(table, right=frozenset(range(1, len(head))), indent="  ")]
    return lines
