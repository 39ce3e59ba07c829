"""The `runnerscope` command: the one module that sees both the engine and the workbench.

`doctor`, `model`, `generate`, `step` and `bench` need the engine alone; `lab` needs the extra `lab`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from engine.cli import UserError, build_parser, numbers, run


def _lab(arguments: argparse.Namespace) -> int:
    try:
        from workbench import lab
    except ImportError as error:
        raise UserError(
            f"the workbench needs {error.name or error}, which isn't installed; run: pip install 'runnerscope[lab]' "
            "(in a clone: make lab)"
        ) from error
    return lab.serve(arguments.notebook, port=arguments.port, browser=arguments.browser)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code: 0 done, 1 a check failed, 2 asked for something that can't be."""
    parser, commands = build_parser()
    command = commands.add_parser("lab", help="serve JupyterLab on the tour, on this machine only")
    command.add_argument("notebook", nargs="?", help="a notebook or a folder (default: notebooks/00_tour.ipynb)")
    command.add_argument(
        "--port", type=numbers.port, default=8888, metavar="N", help="first port to try (default: 8888)"
    )
    command.add_argument(
        "--browser",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="open the page in a browser (default: where there is a display)",
    )
    command.set_defaults(handler=_lab)
    return run(parser, commands, argv)


if __name__ == "__main__":
    sys.exit(main())
