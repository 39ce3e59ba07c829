"""`runnerscope bench --speculation`: its options, and its tables."""

from __future__ import annotations

import argparse
import json
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .terminal import UserError, columns, printable

if TYPE_CHECKING:
    from engine.bench.speculation import ConcurrencyResult, SpeculationReport
    from engine.bench.speculation_plan import Method

_MODEL = ("model", "tokenizer", "load_format", "dtype", "device", "seed")
_OWN = ("--prompts", "--concurrency", "--max-tokens", "--temperature")
SHARED = ("--requests", "--commit")
_CONCURRENCY = (1, 8, 64, 256)
_MAX_TOKENS = 256
_LABELLED = re.compile(r"([\w.:+-]+)=(?=\s*\{)")


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options that only --speculation has."""
    group = parser.add_argument_group(
        "speculation",
        "each way of drafting against none, on real prompts at several concurrencies, with --requests at each",
    )
    group.add_argument(
        "--speculation", action="store_true", help="accepted length, TPOT and tokens/s with each speculative_config"
    )
    group.add_argument(
        "--speculative-config", action="append", metavar="JSON",
        help="with --speculation, as often as you like: a config, LABEL=config, or the name of a default, which are "
        "ngram, mtp, dspark (where this model has a head or draft) and lookup (dspark without weights); "
        "otherwise one, which the engine gets",
    )  # fmt: skip
    group.add_argument(
        "--prompts", type=Path, nargs="+", metavar="FILE", help='files of {"turns": [...]} lines; default: built in'
    )
    group.add_argument(
        "--concurrency", type=int, nargs="+", metavar="N", help=f"default: {' '.join(map(str, _CONCURRENCY))}"
    )
    group.add_argument("--max-tokens", type=int, metavar="N", help=f"of an answer (default: {_MAX_TOKENS})")
    group.add_argument("--temperature", type=float, metavar="X", help="default: 0")


def given(arguments: argparse.Namespace) -> list[str]:
    """Those of its own options that were given."""
    return [name for name in _OWN if getattr(arguments, name[2:].replace("-", "_")) is not None]


def run(arguments: argparse.Namespace, keywords: dict[str, Any], runners: tuple[str, ...], on_gpu: bool) -> int:
    """Measures, and prints each concurrency as soon as it is done."""
    from engine.bench.machine import multiplies_bfloat16
    from engine.bench.speculation import run_speculation
    from engine.bench.speculation_plan import SpeculationPlan
    from engine.bench.speculation_report import to_dict
    from engine.dspark.cli_data import check_prompt_files

    if not on_gpu and None in (arguments.concurrency, arguments.requests, arguments.max_tokens):
        raise UserError(
            "bench --speculation at full size needs a CUDA device, and none is used here; on a CPU give --concurrency, "
            "--requests and --max-tokens (say 1, 4 and 32)"
        )
    model = {k: v for k, v in keywords.items() if k in _MODEL}
    if not on_gpu:
        model = {"dtype": "bfloat16" if multiplies_bfloat16() else "float32"} | model
    temperature = arguments.temperature or 0.0
    if not 0.0 <= temperature < math.inf:
        raise UserError(f"--temperature {temperature}: a number from 0 on")
    check_prompt_files(arguments)
    plan = SpeculationPlan(
        model=model,
        engine={k: v for k, v in keywords.items() if k not in _MODEL},
        methods=_methods(arguments.speculative_config or ()),
        runners=runners,
        concurrency=_concurrency(arguments),
        requests=arguments.requests,
        max_tokens=_at_least_1("--max-tokens", _MAX_TOKENS if arguments.max_tokens is None else arguments.max_tokens),
        temperature=temperature,
        repeats=arguments.repeats,
        files=tuple(arguments.prompts or ()),
        commit=arguments.commit,
    )
    report = run_speculation(plan, None if arguments.json else _print_last)
    if arguments.json:
        print(json.dumps(to_dict(report), indent=2))
    else:
        print("\n".join(["", *_last_lines(report)]))
    return 0


def _at_least_1(name: str, value: int) -> int:
    if value < 1:
        raise UserError(f"{name} {value}: at least 1")
    return value


def _concurrency(arguments: argparse.Namespace) -> tuple[int, ...]:
    found = tuple(dict.fromkeys(_at_least_1("--concurrency", n) for n in arguments.concurrency or _CONCURRENCY))
    if arguments.requests is not None and arguments.requests < max(found):
        raise UserError(
            f"--requests {arguments.requests}: fewer than --concurrency {max(found)}; ask for several times as many"
        )
    return found


def _methods(texts: Any) -> tuple[Method, ...]:
    """What the command line names, or the defaults. UserError for what is neither JSON nor a default's name."""
    from dataclasses import replace

    from engine.bench.speculation_plan import DEFAULTS, NONE

    if not texts:
        return DEFAULTS
    defaults = {method.label: method for method in DEFAULTS}
    methods: list[Method] = []
    for text in texts:
        if text == NONE.label:
            continue  # always measured
        method = replace(defaults[text], given=True) if text in defaults else _parsed(text, list(defaults))
        taken = {NONE.label, *(other.label for other in methods)}
        label, number = method.label, 2
        while method.label in taken:
            if _LABELLED.match(text):
                raise UserError(f"--speculative-config: the label {label!r} is taken; give each its own")
            method, number = replace(method, label=f"{label}-{number}"), number + 1
        methods.append(method)
    return tuple(methods)


def _parsed(text: str, defaults: list[str]) -> Method:
    from engine.bench.speculation_plan import Method

    labelled = _LABELLED.match(text)
    source = text[labelled.end() :] if labelled else text
    try:
        config = json.loads(source)
    except json.JSONDecodeError as error:
        raise UserError(
            f"--speculative-config {text!r} is not JSON ({error}) nor one of {', '.join(defaults)}; write it like "
            '\'{"method": "ngram", "num_speculative_tokens": 4}\', with a label before it if you like: k4={...}'
        ) from None
    if not isinstance(config, dict) or not isinstance(config.get("method"), str):
        raise UserError(f'--speculative-config {text!r}: must be a JSON object with a "method"')
    own = "lookup" if config.get("draft") == "lookup" else config["method"]
    return Method(labelled[1] if labelled else own, config, given=True)


def _print_last(report: SpeculationReport) -> None:
    lines = ["", *_lines(report.results[-1])] if report.results else _head_lines(report)
    print("\n".join(lines), flush=True)


def _head_lines(report: SpeculationReport) -> list[str]:
    rows = [[key, printable(value)] for key, value in report.about.items()]
    rows.append(["repeats", f"{report.repeats} after one wave to warm up, all sides taking turns; medians, [min–max]"])
    rows += [
        [printable(m.label), printable(json.dumps(m.config)) + _mark(m)] for m in report.methods if m.config is not None
    ]
    starts = (
        f"{runner.upper()} {printable(label)} {seconds:.1f} s" + (f" (capture {capture:.1f} s)" if capture else "")
        for (runner, label), (seconds, capture) in report.starts.items()
    )
    rows.append(["engines made in", ", ".join(starts)])
    return [*columns(rows), *map(printable, report.left_out)]


def _mark(method: Method) -> str:
    synthetic = (method.config or {}).get("rejection_sample_method") == "synthetic"
    return " (accepted at given rates: its answers are not the model's)" if synthetic else ""


def _lines(result: ConcurrencyResult) -> list[str]:
    from engine.bench.speculation_report import figures, tpot_of_v2_over_v1

    sides = [figures(side, result) for side in result.sides]
    head = [
        "", "accepted length", "TPOT ms: mean", "median", "tokens/s", "[min–max]", "× none", "waits in a step",
        "same tokens", "warm-up",
    ]  # fmt: skip
    table, notes = [head], []
    for side in sides:
        times, rate, same = side["tpot_ms"], side["tokens_per_second"], side["same_tokens"]
        waits = ", ".join(f"{n / side['steps']:.2f} {why}" for why, n in side["waits_inside_steps"].items())
        name = f"{side['runner'].upper()} {printable(side['method'])}"
        table.append(
            [
                name, _number(side["accepted_length"], 2),
                *(_number(times and times[key], 3) for key in ("mean", "median")),
                f"{rate['median']:,.1f}", f"[{rate['min']:,.1f}–{rate['max']:,.1f}]", f"{side['ratio']:.2f}",
                waits or "0", "–" if same is None else f"{same['before_first_difference']}/{same['all']}",
                f"{side['warm_up']:.1f} s",
            ]
        )  # fmt: skip
        if side["preemptions"]:
            notes.append(f"  {name} is not a clean figure: {side['preemptions']} requests were preempted")
    ratios = tpot_of_v2_over_v1(result)
    if ratios:
        shown = ", ".join(f"{printable(label)} {ratio:.3f} ({ratio - 1:+.1%})" for label, ratio in ratios.items())
        notes.append(f"  mean TPOT of V2 over V1: {shown}")
    return [
        f"concurrency {result.concurrency}: {result.requests} requests",
        *columns(table, right=frozenset(range(1, len(head))), indent="  "),
        *notes,
    ]


def _last_lines(report: SpeculationReport) -> list[str]:
    from engine.bench.speculation_report import accepted_by_set, waits_inside_v2

    rows = [row for row in accepted_by_set(report) if row["method"] != "none"]
    lines = []
    if rows:
        names = list(rows[0]["sets"])
        table = [["accepted length, tokens a pass", *map(printable, names)]]
        for row in rows:
            cells = [_number(row["sets"].get(name), 2) for name in names]
            table.append([f"{row['runner'].upper()} {printable(row['method'])}", *cells])
        lines = columns(table, right=frozenset(range(1, len(table[0]))))
    waits, steps = waits_inside_v2(report)
    return [*lines, f"host waits inside V2's steps: {waits} in {steps:,} steps"] if steps else lines


def _number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"
