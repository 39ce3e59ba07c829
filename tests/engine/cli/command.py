"""The command, run in this process."""

from __future__ import annotations

from pathlib import Path

import pytest

import runnerscope

ROOT = Path(__file__).resolve().parents[3]


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr."""
    try:
        code = runnerscope.main(argv)
    except SystemExit as end:
        code = int(end.code or 0)
    out, err = capsys.readouterr()
    return code, out, err
