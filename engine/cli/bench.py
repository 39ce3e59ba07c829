"""`runnerscope bench`: against transformers, the standard workloads, samplers or speculation; tables or JSON."""

from __future__ import annotations

import argparse
import json
from typing import Any

from . import bench_sampling, bench_speculation, bench_suite
from .options import add_engine_options, engine_keywords, without_model
from .terminal import UserError, columns

_PEERS = ("transformers", "vllm")
_RUNNERS = {"both": ("v2", "v1"), "v2": ("v2",), "v1": ("v1",)}


def add_parser(commands: Any) -> None:
    """Adds the command to argparse's subparsers."""
    parser = commands.add_parser(
        "bench", usage="%(prog)s [options]", help="measure both runners, alone or against a peer in the same run"
    )
    parser.add_argument(
        "--peer", choices=_PEERS,
        help="transformers: real prompts on the same weights (the default on a CPU), in bfloat16 where the processor "
        "has instructions for it unless --dtype says otherwise; vllm: the standard workloads, where vllm is installed",
    )  # fmt: skip
    parser.add_argument("--runner", choices=tuple(_RUNNERS), default="both", help="default: %(default)s")
    parser.add_argument("--threads", type=int, default=2, help="torch threads of either side (default: 2)")
    parser.add_argument("--repeats", type=int, default=3, help="timed repeats of each side, at least 3 (default: 3)")
    parser.add_argument(
        "--sampling", action="store_true",
        help="time and memory of both runners' samplers alone, feature by feature, instead of whole runs",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    bench_speculation.add_options(parser)
    bench_suite.add_options(parser)
    add_engine_options(parser, without=("speculative_config",))
    parser.set_defaults(handler=run)


def run(arguments: argparse.Namespace) -> int:
    """Measures and prints. The standard workloads where they are asked for, or where there is a GPU for them."""
    import torch

    if arguments.repeats < 3:
        raise UserError(f"--repeats {arguments.repeats}: a median needs at least 3")
    if arguments.threads < 1:
        raise UserError(f"--threads {arguments.threads}: at least 1")
    before = torch.get_num_threads()
    torch.set_num_threads(arguments.threads)
    try:
        return _measure(arguments)
    finally:
        torch.set_num_threads(before)


def _measure(arguments: argparse.Namespace) -> int:
    from engine import EngineConfig

    asked = bench_suite.given(arguments)
    if not arguments.speculation:
        _only_without_speculation(arguments)
    keywords, runners = engine_keywords(arguments), _RUNNERS[arguments.runner]
    if arguments.peer == "transformers" and asked:
        raise UserError(f"{asked[0]} belongs to the standard workloads, and --peer transformers runs its own; drop one")
    on_gpu = EngineConfig(device=keywords.get("device", "auto")).torch_device.type == "cuda"
    if arguments.speculation:
        others = [name for name in asked if name not in bench_speculation.SHARED]
        others += [f"--{name}" for name in ("sampling", "peer") if getattr(arguments, name)]
        if others:
            raise UserError(f"{others[0]} does not go with --speculation; drop one")
        return bench_speculation.run(arguments, keywords, runners, on_gpu)
    if arguments.sampling:
        odd = [name for name in asked if name not in bench_sampling.OPTIONS] + (["--peer"] if arguments.peer else [])
        if odd:
            raise UserError(
                f"--sampling takes {', '.join(bench_sampling.OPTIONS)} beside the model, not {odd[0]}; drop it"
            )
        return bench_sampling.run(arguments, keywords, on_gpu)
    if arguments.peer == "vllm" or asked or (on_gpu and arguments.peer is None):
        return bench_suite.run(arguments, keywords, runners, on_gpu)
    return _against_transformers(arguments, keywords, runners)


def _only_without_speculation(arguments: argparse.Namespace) -> None:
    """Hands the one speculative_config on to the engine; UserError for what belongs to --speculation."""
    if odd := bench_speculation.given(arguments):
        raise UserError(f"{odd[0]} belongs to --speculation; add that, or drop it")
    configs = arguments.speculative_config or []
    if len(configs) > 1:
        raise UserError("several --speculative-config belong to --speculation; add that, or give one")
    if configs:
        setattr(arguments, "engine.speculative_config", configs[0])


def _against_transformers(arguments: argparse.Namespace, given: dict[str, Any], runners: tuple[str, ...]) -> int:
    """Prefix caching is off unless asked for: a repeat mustn't find its own prompt."""
    from engine import LLM
    from engine.bench.compare import compare
    from engine.bench.machine import multiplies_bfloat16

    keywords = {"enable_prefix_caching": False, "dtype": "bfloat16" if multiplies_bfloat16() else "float32"} | given
    first = LLM(use_v2_model_runner=runners[0] == "v2", **keywords)
    engines = {runners[0].upper(): first}
    for runner in runners[1:]:
        others = without_model(keywords) | {"use_v2_model_runner": runner == "v2"}
        engines[runner.upper()] = LLM(loaded=first.loaded, **others)
    report = compare(engines, peer="transformers", repeats=arguments.repeats)
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
