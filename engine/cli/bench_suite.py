"""The standard workloads of `runnerscope bench`: their options, and their tables."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .terminal import UserError, columns, printable

if TYPE_CHECKING:
    from engine.bench.suite import SuiteReport, WorkloadResult

_MODEL = ("model", "load_format", "dtype", "device", "seed")
_OPTIONS = (
    "--workload", "--requests", "--input-len", "--output-len", "--observe", "--profile", "--warm-start", "--commit",
)  # fmt: skip


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options that only the standard workloads have."""
    group = parser.add_argument_group(
        "standard workloads", "A, AT, B1, B8, C: random token ids, exact lengths; what runs on a GPU by default"
    )
    group.add_argument("--workload", metavar="NAMES", help="one or several with commas between (default: all)")
    group.add_argument("--requests", type=int, metavar="N", help="instead of the workload's own number")
    group.add_argument("--input-len", type=int, metavar="N", help="the longest prompt, instead of the workload's own")
    group.add_argument("--output-len", type=int, metavar="N", help="the longest output, instead of the workload's own")
    group.add_argument("--observe", action="store_true", default=None, help="also time it observed, in pairs of runs")
    group.add_argument(
        "--profile", type=Path, metavar="PATH",
        help="write a Chrome trace of ten steps, the profiler's spans and the hooks' side by side",
    )  # fmt: skip
    group.add_argument(
        "--warm-start", action=argparse.BooleanOptionalAction, default=None,
        help="also time a start in a fresh process (default: on a GPU)",
    )  # fmt: skip
    group.add_argument("--commit", metavar="TEXT", help="the commit to print, where this is a copy without its .git")


def given(arguments: argparse.Namespace) -> list[str]:
    """Those of the options that were given."""
    return [name for name in _OPTIONS if getattr(arguments, name[2:].replace("-", "_")) is not None]


def model_keywords(keywords: dict[str, Any]) -> dict[str, Any]:
    """Which weights: those asked for, or random ones of Qwen3-0.6B."""
    from engine.models import BUILTIN_CONFIGS

    model = {"model": "qwen3-0.6b", "dtype": "bfloat16"} | {k: v for k, v in keywords.items() if k in _MODEL}
    model.setdefault("load_format", "dummy" if model["model"] in BUILTIN_CONFIGS else "auto")
    return model


def run(arguments: argparse.Namespace, keywords: dict[str, Any], runners: tuple[str, ...], on_gpu: bool) -> int:
    """Measures, and prints each workload as soon as it is done."""
    from engine.bench.peer_vllm import check_installed
    from engine.bench.suite import Plan, run_suite
    from engine.bench.suite_report import to_dict
    from engine.bench.workloads import STANDARD, choose

    sizes = arguments.requests, arguments.input_len, arguments.output_len
    if not on_gpu and None in sizes:
        raise UserError(
            "the standard workloads at full size need a CUDA device, and none is used here; on a CPU give --requests, "
            "--input-len and --output-len (say 4, 16 and 8) and a small --model (say tiny-qwen3)"
        )
    if "tokenizer" in keywords:
        raise UserError("--tokenizer: the standard workloads are token ids and need none; leave it out")
    if arguments.profile is not None and not arguments.profile.absolute().parent.is_dir():
        raise UserError(f"--profile {arguments.profile}: its folder does not exist; make it first")
    if arguments.peer == "vllm":
        check_installed()
    names = arguments.workload if arguments.workload is not None else ",".join(STANDARD)
    plan = Plan(
        specs=tuple(spec.resized(*sizes) for spec in choose(names)),
        runners=runners,
        repeats=arguments.repeats,
        model=model_keywords(keywords),
        engine={k: v for k, v in keywords.items() if k not in (*_MODEL, "skip_tokenizer_init")},
        peer=arguments.peer == "vllm",
        observe=bool(arguments.observe),
        warm_start=on_gpu if arguments.warm_start is None else arguments.warm_start,
        profile=arguments.profile,
        commit=arguments.commit,
    )
    report = run_suite(plan, None if arguments.json else _print_last)
    if arguments.json:
        print(json.dumps(to_dict(report), indent=2))
    else:
        print("\n".join(["", *_start_lines(report)]))
    return 0


def _print_last(report: SuiteReport) -> None:
    if len(report.workloads) == 1:
        print("\n".join(_head_lines(report)))
    print("\n".join(["", *_workload_lines(report.workloads[-1], report)]), flush=True)


def _head_lines(report: SuiteReport) -> list[str]:
    rows = [[key, printable(value)] for key, value in report.about.items()]
    c = report.ceilings
    rows.append(["memory", f"copy {c.copy / 1e9:,.1f} GB/s, read {c.read / 1e9:,.1f} GB/s; the limit is the faster"])
    rows.append(["repeats", f"{report.repeats} after one warm-up, the runners taking turns; other prompts in each run"])
    return columns(rows)


def _workload_lines(result: WorkloadResult, report: SuiteReport) -> list[str]:
    from engine.bench.suite_report import figures

    limit = report.ceilings.limit
    sides = [figures(side, result, limit) for side in result.sides]
    own = [side for side in sides if "host_us_per_step" in side]
    # What the others are measured by: our second runner, and the peer's first.
    bases = own[1:] + sides[len(own) : len(own) + 1]
    unit = "ms/token" if result.spec.requests == 1 else "ms/step"
    head = ["", "tokens/s", "[min–max]", unit, "[min–max]", "GB/s", "of limit"]
    table = [[*head, *(f"× {base['side']}" for base in bases), "warm-up"]]
    for side in sides:
        rate, ms = side["tokens_per_second"], side["ms_per_step"]
        table.append(
            [
                side["side"], f"{rate['median']:,.0f}", f"[{rate['min']:,.0f}–{rate['max']:,.0f}]",
                f"{ms['median']:.3f}", f"[{ms['min']:.3f}–{ms['max']:.3f}]", f"{side['bandwidth'] / 1e9:,.1f}",
                f"{side['share_of_limit']:.1%}",
                *(f"{rate['median'] / base['tokens_per_second']['median']:.2f}" for base in bases),
                f"{side['warm_up']:.2f} s",
            ]
        )  # fmt: skip
    return [
        str(result.spec),
        f"  a step must read {_bytes(result.weight_bytes)} of weights and {_bytes(result.kv_bytes)} of KV at the mean "
        f"context: {result.bytes_per_step / limit * 1e3:.3f} ms at the limit",
        *columns(table, right=frozenset(range(1, len(table[0]))), indent="  "),
        *_cost_lines(own),
    ]


def _cost_lines(sides: list[dict[str, Any]]) -> list[str]:
    """What a steady step costs. Of unobserved runs: the host's time without its waits, and the main thread's processor
    time over all steps."""
    head = ["µs a step", "host", "main thread", "device spans", "busy"]
    table = [[*head, "launches: hooks", "profiler", "kernels", "waits: inside", "outside"]]
    notes = []
    for side in sides:
        profiled, waits = side.get("profiled"), side["waits_per_step"]
        busy, calls, kernels = ("–",) * 3
        if profiled and profiled["kernels_per_step"]:
            busy = f"{profiled['busy_us_per_step']:,.0f}"
            calls, kernels = f"{profiled['launches_per_step']:.1f}", f"{profiled['kernels_per_step']:.1f}"
        table.append(
            [
                side["side"], f"{side['host_us_per_step']:,.0f}", f"{side['main_thread_cpu_us_per_step']:,.0f}",
                f"{side['device_span_us_per_step']:,.0f}", busy, f"{side['hooks_launches_per_step']:.1f}", calls,
                kernels, _counts(waits["inside"]), _counts(waits["outside"]),
            ]
        )  # fmt: skip
        notes += _notes(side)
    return columns(table, right=frozenset(range(1, len(table[0]))), indent="  ") + _host_lines(sides) + notes


def _notes(side: dict[str, Any]) -> list[str]:
    notes, observed, profiled = [], side.get("observed"), side.get("profiled")
    if observed:
        notes.append(
            f"  {side['side']} observed: " + "; ".join(_loss(level, found) for level, found in observed.items())
        )
    if profiled and profiled["trace"]:
        notes.append(f"  {side['side']} trace of {profiled['steps']} steps: {printable(profiled['trace'])}")
    if side["cached_tokens"] or side["preemptions"]:
        notes.append(
            f"  {side['side']} is not a clean figure: {side['cached_tokens']} prompt tokens came from the prefix "
            f"cache, {side['preemptions']} requests were preempted"
        )
    return notes


def _loss(level: str, found: dict[str, Any]) -> str:
    best, worst = -found["loss_min"], -found["loss_max"]
    spread = f" [{worst:+.1%} to {best:+.1%} in {found['pairs']} pairs]" if found["pairs"] > 1 else ""
    read = f", {found['read_us_per_step']:.1f} µs a step to read its log afterwards" if found["events_read"] else ""
    return f"{level} {-found['loss']:+.1%} tokens/s{spread}{read}"


def _host_lines(sides: list[dict[str, Any]]) -> list[str]:
    """The host's steady step by phase, in the middle half of the steps, and the mean of all; below it the same phases
    on the processor's clock, waits in it where they keep the processor."""
    phases = list(dict.fromkeys(phase for side in sides for phase in side["host_parts_us_per_step"]))
    table = [["host, µs a step", *phases, "= host", "waits", "mean host"]]
    for side in sides:
        wall, processor = side["host_parts_us_per_step"], side["host_processor_us_per_step"]
        waits, mean = side["host_waits_us_per_step"], side["host_mean_us_per_step"]
        for name, parts, others in (
            (side["side"], wall, (f"{waits:,.0f}", f"{mean:,.0f}")),
            (f"{side['side']}, processor", processor, ("in it", "")),
        ):
            if parts:
                cells = [f"{parts[phase]:,.0f}" if phase in parts else "–" for phase in phases]
                table.append([name, *cells, f"{sum(parts.values()):,.0f}", *others])
    return columns(table, right=frozenset(range(1, len(table[0]))), indent="  ")


def _counts(waits: dict[str, float]) -> str:
    return ", ".join(f"{count:.2f} {reason}" for reason, count in waits.items()) or "0"


def _bytes(size: float) -> str:
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3f} GB"


def _start_lines(report: SuiteReport) -> list[str]:
    table = [["start, s", "to first token", "process", "weights", "engine", "of it capture", "first token"]]
    for name, s in report.starts.items():
        process = "–" if s.process is None else f"{s.process:.2f}"
        parts = [f"{seconds:.2f}" for seconds in (s.weights, s.engine, s.capture, s.first_token)]
        table.append([name, f"{s.total:.2f}", process, *parts])
    for name, seconds in report.peer_starts.items():
        table.append([f"{name}, fresh process", f"{seconds:.2f}", *["–"] * 5])
    return columns(table, right=frozenset(range(1, 7)))
