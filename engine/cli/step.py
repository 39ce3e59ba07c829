"""`runnerscope step "text"`: some steps of one runner or both, as tables of what each step did."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from .options import add_engine_options, add_sampling_options, engine_keywords, sampling_params, without_model
from .prompts import as_prompt
from .terminal import UserError, clip, columns, printable

if TYPE_CHECKING:
    from engine import LLM

    from .trace import RequestLine, StepTrace

DEFAULT_PROMPT = "The capital of France is"
_SHORT_MS = 0.1
_HEAD = ["", "row", "scheduled", "computed", "blocks", "samples", "on the host in"]


def add_parser(commands: Any) -> None:
    """Adds the command to argparse's subparsers."""
    parser = commands.add_parser(
        "step", usage="%(prog)s [options] [text ...]", help="show what each step of a runner does, in the terminal"
    )
    parser.add_argument("texts", nargs="*", metavar="text", help=f"one prompt or several (default: {DEFAULT_PROMPT!r})")
    parser.add_argument("--runner", choices=("v1", "v2", "both"), default="both")
    parser.add_argument("--steps", type=int, default=3, help="how many steps to show (default: 3)")
    parser.add_argument("--chat", action="store_true", help="put each text into the model's chat template")
    add_sampling_options(parser, max_tokens=64, temperature=0.0)
    add_engine_options(parser)
    parser.set_defaults(handler=run)


def run(arguments: argparse.Namespace) -> int:
    """Runs the steps on each runner in turn, then prints them side by side."""
    from engine import LLM

    from .trace import record_steps

    if arguments.steps < 1:
        raise UserError(f"--steps {arguments.steps}: at least 1")
    params, keywords = sampling_params(arguments), engine_keywords(arguments)
    texts = arguments.texts or [DEFAULT_PROMPT]
    runners = ("v1", "v2") if arguments.runner == "both" else (arguments.runner,)
    traces: dict[str, list[StepTrace]] = {}
    llm: LLM | None = None
    for runner in runners:
        if llm is not None:
            keywords = without_model(keywords) | {"loaded": llm.loaded}
        llm = LLM(use_v2_model_runner=runner == "v2", **keywords)
        prompts = {_label(i): as_prompt(llm, text, chat=arguments.chat) for i, text in enumerate(texts)}
        for request_id, prompt in prompts.items():
            llm.add(prompt, params, request_id=request_id)
        traces[runner] = record_steps(llm.core, arguments.steps)
    assert llm is not None
    print("\n".join([*_heading(llm, texts), *_lines(llm, traces)]))
    return 0


def _label(index: int) -> str:
    """A, B, …, Z, A1, B1, …"""
    letter, lap = chr(ord("A") + index % 26), index // 26
    return f"{letter}{lap}" if lap else letter


def _heading(llm: LLM, texts: list[str]) -> list[str]:
    config = llm.config
    loop = "overlapped" if config.async_scheduling else "plain"
    blocks = f"{config.num_gpu_blocks_override} blocks of {config.block_size}"
    dtype = str(config.torch_dtype).removeprefix("torch.")
    about = (
        llm.loaded.name,
        f"{dtype} on {config.torch_device}",
        f"kernels {_form(llm)}",
        f"{loop} loop",
        blocks,
    )
    return [
        printable(" · ".join(about)),
        *(f"{_label(i)}  {clip(printable(text), 100)}" for i, text in enumerate(texts)),
    ]


def _form(llm: LLM) -> str:
    import torch

    from kernels import resolve_form

    return resolve_form(llm.config.kernel_backend, torch.empty(0, device=llm.config.torch_device))


def _lines(llm: LLM, traces: dict[str, list[StepTrace]]) -> list[str]:
    """Step by step, each runner's under the other's, columns aligned over all of them."""
    tables: list[tuple[list[str], list[list[str]]]] = []
    for step in range(max(len(steps) for steps in traces.values())):
        for runner, steps in traces.items():
            if step < len(steps):
                about = ["", _title(steps[step], runner), *_times(steps[step])]
                tables.append((about, [_request(llm, line) for line in steps[step].requests]))
    aligned = iter(columns([_HEAD, *(row for _, rows in tables for row in rows)], right=frozenset({1, 2}), indent="  "))
    head = next(aligned)
    lines = []
    for about, rows in tables:
        lines += [*about, *([head] if rows else ["  nothing left to schedule"]), *(next(aligned) for _ in rows)]
    return lines


def _title(trace: StepTrace, runner: str) -> str:
    return f"step {trace.step} · {runner.upper()} · {trace.milliseconds:.1f} ms on the host"


def _times(trace: StepTrace) -> list[str]:
    waits = [f"{'in the step' if inside else 'outside'}: {reason} {ms:.2f}" for reason, inside, ms in trace.waits]
    return [
        *(f"  {lane:<8} {_spans(trace.spans[lane])}" for lane in ("host", "compute", "copy")),
        f"  waits    {' · '.join(waits) or 'none'}",
    ]


def _spans(spans: dict[str, float]) -> str:
    """Each span with its ms; those that are too short to matter only as a sum."""
    long = [f"{name} {ms:.2f}" for name, ms in spans.items() if ms >= _SHORT_MS]
    short = [ms for ms in spans.values() if ms < _SHORT_MS]
    if short:
        long.append(f"{len(short)} shorter {sum(short):.2f}")
    return " · ".join(long) or "idle"


def _request(llm: LLM, line: RequestLine) -> list[str]:
    if line.sampled is None:
        sampled = "(prompt goes on)" if line.partial_prefill else "(in flight)"
    else:
        tokenizer = llm.loaded.tokenizer
        text = f" {clip(repr_text(tokenizer.token_text(line.sampled)), 24)}" if tokenizer is not None else ""
        sampled = f"{line.sampled}{text}"
    return [
        line.request_id,
        str(line.row),
        f"{line.num_tokens} {line.kind}",
        f"{line.num_computed_tokens} → {line.num_computed_tokens + line.num_tokens}",
        clip(" ".join(map(str, line.block_ids)), 28),
        sampled,
        f"step {line.arrived_in}" if line.arrived_in is not None else "",
    ]


def repr_text(text: str) -> str:
    """Token text in quotes, so that a leading space is seen."""
    return f'"{printable(text)}"'
