"""`runnerscope generate`: the same on both runners, and a model can't steer the terminal."""

from __future__ import annotations

import io
import re
import sys

import pytest

from tests.engine.cli.command import run


def test_generate_is_the_same_on_both_runners_and_streamed(capsys: pytest.CaptureFixture[str], tiny: list[str]) -> None:
    ask = ["generate", "hello", "--max-tokens", "24", "--ignore-eos", *tiny]
    outs = [run(capsys, *ask, *more) for more in (["--runner", "v1"], ["--runner", "v2"], ["--stream"])]
    assert [code for code, _, _ in outs] == [0, 0, 0], outs
    assert outs[0][1].strip()
    assert outs[0][1] == outs[1][1] == outs[2][1]


def test_generate_sends_no_escape_sequence_to_the_terminal(capsys: pytest.CaptureFixture[str], tiny: list[str]) -> None:
    for extra in ([], ["--stream"]):
        code, out, _ = run(
            capsys,
            "generate",
            "hi",
            "--max-tokens",
            "200",
            "--temperature",
            "1.5",
            "--seed",
            "1",
            "--ignore-eos",
            *tiny,
            *extra,
        )
        assert code == 0
        assert "\\e[" in out, "the model was meant to write escape sequences"
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", out)


def test_generate_reads_stdin_and_honours_the_seed(
    capsys: pytest.CaptureFixture[str], tiny: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = []
    for seed in ("7", "7", "8"):
        monkeypatch.setattr(sys, "stdin", io.StringIO("from stdin"))
        texts.append(run(capsys, "generate", "-", "--temperature", "2", "--seed", seed, "--max-tokens", "20", *tiny)[1])
    assert texts[0] == texts[1] != texts[2]
