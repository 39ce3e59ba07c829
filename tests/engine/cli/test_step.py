"""`runnerscope step`: both runners' steps as tables, and where they end."""

from __future__ import annotations

import re

import pytest

from tests.engine.cli.command import run


def test_step_shows_both_runners_with_the_same_tokens(capsys: pytest.CaptureFixture[str], tiny: list[str]) -> None:
    code, out, err = run(
        capsys, "step", "hello", "other", "--runner", "both", "--steps", "4", "--block-size", "4", *tiny
    )
    assert code == 0, err
    sections = re.split(r"\n\n(?=step )", out)[1:]
    assert [section.split(" · ")[:2] for section in sections] == [
        [f"step {step}", runner] for step in range(1, 5) for runner in ("V1", "V2")
    ]
    rows: dict[str, list[list[str]]] = {"V1": [], "V2": []}
    for section in sections:
        runner = section.split(" · ")[1]
        for line in section.splitlines():
            if re.match(r"  [AB] ", line):
                rows[runner].append(re.split(r"\s{2,}", line.strip()))
        # The phases below a share of the step are summed up as "n shorter".
        assert re.search(r"^  host .*(prepare inputs|output|schedule) \d", section, re.MULTILINE)
        assert re.search(r"^  compute .*forward \d", section, re.MULTILINE)
    assert len(rows["V1"]) == len(rows["V2"]) == 8
    assert [row[:5] for row in rows["V1"]] == [row[:5] for row in rows["V2"]]
    assert [row[5] for row in rows["V1"]] == [row[5] for row in rows["V2"]]
    assert rows["V2"][0][:4] == ["A", "0", "5 new", "0 → 5"]
    assert rows["V2"][2][:4] == ["A", "0", "1 running", "5 → 6"]


def test_step_marks_a_prompt_that_goes_on(capsys: pytest.CaptureFixture[str], tiny: list[str]) -> None:
    code, out, err = run(
        capsys,
        "step",
        "a prompt of many bytes",
        "--runner",
        "v2",
        "--max-num-batched-tokens",
        "8",
        "--max-num-seqs",
        "4",
        *tiny,
    )
    assert code == 0, err
    assert out.count("(prompt goes on)") == 2
    assert "V1" not in out


@pytest.mark.parametrize(("loop", "steps"), [("--no-async-scheduling", 2), ("--async-scheduling", 3)])
def test_step_stops_when_nothing_is_left(
    capsys: pytest.CaptureFixture[str], tiny: list[str], loop: str, steps: int
) -> None:
    """Two tokens are two steps; the overlapped loop needs a third that only fetches."""
    ask = ["step", "x", "--runner", "v2", "--steps", "9", "--max-tokens", "2", "--ignore-eos", loop, *tiny]
    code, out, _ = run(capsys, *ask)
    assert code == 0
    assert re.findall(r"^step (\d)", out, re.MULTILINE) == [str(n + 1) for n in range(steps)]
    assert out.count("nothing left to schedule") == steps - 2
    assert "in flight" not in out
