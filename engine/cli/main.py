"""Parsing, dispatch and the exit code. A command is a module with `add_parser(commands)` and a handler."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from engine.config import closest
from engine.dspark import cli as dspark
from engine.models import DownloadError

from . import bench, doctor, generate, model, step
from .terminal import UserError, printable

_THE_USERS = (UserError, ValueError, OSError, ImportError, DownloadError)
"""What bad input, a missing file, library or network raises. Anything else is our fault and shows its traceback."""


class _Parser(argparse.ArgumentParser):
    """argparse prints a usage block before the error; here the one line that matters stands alone."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, **kwargs)
        # On every parser, so that it may stand before the command or behind it.
        self.add_argument(
            "--traceback", action="store_true", default=argparse.SUPPRESS, help="show where an error came from"
        )

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {printable(message)} (see {self.prog} --help)\n")


def build_parser() -> tuple[argparse.ArgumentParser, Any]:
    """The parser with the engine's commands, and argparse's subparsers object for adding more."""
    parser = _Parser(prog="runnerscope", description="A small LLM engine with vLLM's two model runners, opened up.")
    parser.set_defaults(traceback=False)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=_Parser)
    for module in (doctor, model, generate, step, bench, dspark):
        module.add_parser(commands)
    return parser, commands


def run(parser: argparse.ArgumentParser, commands: Any, argv: Sequence[str] | None = None) -> int:
    """Runs the command that `argv` names. An error of the user's is one line on stderr and exit code 2."""
    arguments, unknown = parser.parse_known_args(argv)
    if unknown:
        _refuse(unknown[0], _innermost(commands.choices[arguments.command], arguments))
    try:
        code: int = arguments.handler(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader (say `head`) has gone. Python would complain once more when it flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    except _THE_USERS as error:
        if arguments.traceback:
            raise
        print(f"{parser.prog} {arguments.command}: {_one_line(error)}", file=sys.stderr)
        return 2
    return code


def _innermost(command: argparse.ArgumentParser, arguments: argparse.Namespace) -> argparse.ArgumentParser:
    """The parser that read the arguments: the action's, where the command has actions."""
    for action in command._actions:
        if isinstance(action, argparse._SubParsersAction):
            return _innermost(action.choices[getattr(arguments, action.dest)], arguments)
    return command


def _refuse(unknown: str, command: argparse.ArgumentParser) -> NoReturn:
    if not unknown.startswith("-"):
        command.error(f"unknown argument {unknown!r}: too many words; put a text of several words in quotes")
    known = re.findall(r"--[a-z][\w-]*", command.format_help())
    command.error(f"unknown argument {unknown!r}{closest(unknown, known)}")


def _one_line(error: BaseException) -> str:
    text = str(error) or type(error).__name__
    return printable(" ".join(text.split()))
