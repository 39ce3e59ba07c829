"""`runnerscope doctor`: a line a check, and what to do about each that fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.cli.doctor import Check
from tests.engine.cli.command import run


@pytest.mark.slow
def test_doctor_finds_this_machine_ready(capsys: pytest.CaptureFixture[str], smollm2: Path) -> None:
    code, out, _ = run(capsys, "doctor")
    assert code == 0, out
    lines = out.splitlines()
    assert all(line.startswith("✓ ") for line in lines), out
    for name in ("python", "packages", "triton", "workbench", "device", "streams", "kernels", "model", "V1 == V2"):
        assert any(line[2:].startswith(name) for line in lines), name


def test_doctor_says_what_to_do_and_fails(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> str:
        raise RuntimeError("it is\nbroken \x1b[2J")

    found = [Check("good", lambda: "fine", ""), Check("part", broken, "add it", needed=False)]
    monkeypatch.setattr("engine.cli.doctor.checks", lambda: found)
    assert run(capsys, "doctor") == (0, "✓ good         fine\n– part         it is broken \\e[2J; add it\n", "")
    found.append(Check("core", broken, "mend it"))
    code, out, _ = run(capsys, "doctor")
    assert code == 1 and out.splitlines()[-1] == "✗ core         it is broken \\e[2J; mend it"
