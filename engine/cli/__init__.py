"""The engine's command line. Nothing here knows of the workbench; `runnerscope.py` adds the command that does."""

from .main import build_parser, run
from .terminal import UserError

__all__ = ["UserError", "build_parser", "run"]
