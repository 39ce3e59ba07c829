"""`runnerscope model`: fetches a model into the user's cache, if it isn't there, and says where it lies."""

from __future__ import annotations

import argparse
from typing import Any

from engine.config import EngineConfig


def add_parser(commands: Any) -> None:
    """Adds the command to argparse's subparsers."""
    parser = commands.add_parser("model", help="fetch a model into the cache (once) and print its path")
    parser.add_argument("name", nargs="?", default=EngineConfig.model, help="(default: %(default)s)")
    parser.set_defaults(handler=run)


def run(arguments: argparse.Namespace) -> int:
    """Prints the path on stdout; progress goes to stderr."""
    from engine.models import resolve_model

    print(resolve_model(arguments.name))
    return 0
