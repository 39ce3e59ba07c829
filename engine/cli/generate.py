"""`runnerscope generate "text"`: one prompt, its answer."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from .options import add_engine_options, add_sampling_options, engine_keywords, sampling_params
from .prompts import as_prompt
from .terminal import UserError, printable


def add_parser(commands: Any) -> None:
    """Adds the command to argparse's subparsers."""
    parser = commands.add_parser("generate", usage="%(prog)s [options] text", help="answer one prompt")
    parser.add_argument("text", help="the prompt; - reads it from stdin")
    parser.add_argument("--runner", choices=("v1", "v2"), default="v2")
    parser.add_argument(
        "--chat",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="put the text into the model's chat template (default: where the model has one)",
    )
    parser.add_argument("--stream", action="store_true", help="print the text as it comes")
    add_sampling_options(parser, max_tokens=128, temperature=0.0)
    add_engine_options(parser)
    parser.set_defaults(handler=run)


def run(arguments: argparse.Namespace) -> int:
    """Prints the completion(s) on stdout, control characters escaped."""
    from engine import LLM

    params = sampling_params(arguments)
    if arguments.stream and params.n > 1:
        raise UserError(f"--stream shows one completion, not n={params.n}; leave one of the two out")
    text = sys.stdin.read() if arguments.text == "-" else arguments.text
    llm = LLM(use_v2_model_runner=arguments.runner == "v2", **engine_keywords(arguments))
    prompt = as_prompt(llm, text, chat=arguments.chat)
    if arguments.stream:
        shown = 0
        for output in llm.stream(prompt, params):
            whole = output.outputs[0].text
            print(printable(whole[shown:], keep="\n\t"), end="", flush=True)
            shown = len(whole)
        print()
    else:
        for completion in llm.generate(prompt, params, use_tqdm=False)[0].outputs:
            print(printable(completion.text, keep="\n\t"))
    return 0
