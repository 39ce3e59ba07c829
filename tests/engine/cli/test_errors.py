"""What the command line refuses and how: one line, exit code 2, no traceback; and that it has every option."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest

import runnerscope
from engine.config import EngineConfig
from tests.engine.cli.command import ROOT, run

_NO_COUNT = (
    ("train", "--out", "x", "--save-every", "0"),
    ("train", "--out", "x", "--num-sequences", "0"),
    ("train", "--out", "x", "--max-tokens", "many"),
    ("calibrate", "x", "--rounds", "0"),
    ("eval", "--k", "0"),
    ("eval", "--num-sequences", "-1"),
)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["generate", "x", "--block-size", "0"], "block_size=0"),
        (["generate", "x", "--temperature", "-1"], "temperature=-1.0"),
        (["generate", "x", "--temperature", "nan"], "temperature=nan"),
        (["generate", "x", "--dtype", "float33"], "did you mean 'float32'"),
        (["generate", "x", "--model", "no/such/file.gguf"], "no/such/file.gguf"),
        (["generate", "", "--no-chat"], "empty"),
        (["generate", "x", "--n", "2", "--temperature", "1", "--stream"], "--stream"),
        (["generate", "x", "--chat"], "chat template"),
        (["generate", "x", "--speculative-config", "{bad"], "not JSON"),
        (["generate", "x", "--structured-outputs", "yes"], "not JSON"),
        (["step", "x", "--steps", "0"], "--steps 0"),
        (["bench", "--repeats", "1"], "--repeats 1"),
        (["step", "x", "--runner", "v3"], "v3"),
        (["generate"], "text"),
        (["dance"], "dance"),
        (["generate", "x", "--blok-size", "4"], "did you mean '--block-size'"),
        (["step", "x", "--max-num", "4"], "unknown argument '--max-num'"),
        (["lab", "no-such-notebook.ipynb"], "no-such-notebook.ipynb"),
        (["lab", __file__], "is no notebook; give an .ipynb file, or a folder"),
        (["lab", "--port", "99999"], "'99999': must be a port"),
        (
            ["generate", "two", "words"],
            "unknown argument 'words': too many words; put a text of several words in quotes",
        ),
        (
            ["dspark", "train", "--out", "x", "--stepz", "3"],
            "train: unknown argument '--stepz', did you mean '--steps'",
        ),
        (["dspark", "train", "--out", "x", "--steps", "3", "--minutes", "1"], "--steps and --minutes"),
        (["dspark", "train", "--out", __file__], f"--out {__file__}: is a file"),
        *((["dspark", *argv], f"{argv[-1]!r}: must be a whole number of at least 1") for argv in _NO_COUNT),
        (["dspark", "train", "--out", "x", "--cache-gib", "nan"], "'nan': must be a number of at least 0"),
        (["bench", "--sampling", "--workload", "A"], "beside the model, not --workload; drop it"),
        (["generate", "x", "--model", ""], "model='': must be a string that is not empty"),
        (
            ["generate", "x", "--model", "tiny-llama", "--load-format", "dummy", "--tokenizer", "/no/such"],
            "tokenizer '/no/such': no such file",
        ),
        (["generate", "x", "--model", "tiny-llama"], "'tiny-llama': a built-in config, which has no weights"),
        (["generate", "x", "--model", "tiny-llama", "--load-format", "dummy"], "tiny-llama comes without one"),
        (["generate", "x", "--skip-tokenizer-init"], "leave --skip-tokenizer-init out"),
        (["generate", "x", "--num-gpu-blocks-override", "99999999999"], "GiB, which this machine hasn't"),
        (["generate", "x", "--num-gpu-blocks-override", "9" * 18], "GiB, which this machine hasn't"),
    ],
)
def test_a_users_error_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], tiny: list[str], argv: list[str], says: str
) -> None:
    engine = argv[0] in ("generate", "step", "bench") and "--model" not in argv
    code, out, err = run(capsys, *argv, *(tiny if engine and len(argv) > 1 else []))
    assert code == 2
    assert out == ""
    assert says in err
    assert len(err.splitlines()) == 1, err
    assert "Traceback" not in err


@pytest.mark.parametrize("argv", [["--traceback", "generate", "x"], ["generate", "x", "--traceback"]], ids=str)
def test_a_traceback_may_be_asked_for_before_and_behind_the_command(argv: list[str]) -> None:
    with pytest.raises(ValueError, match="block_size=0"):
        runnerscope.main([*argv, "--block-size", "0"])


def test_an_error_cannot_carry_escape_sequences(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "generate", "x", "--model", "a\x1b[2Jb")
    assert code == 2 and "\x1b" not in err and "[2Jb" in err


def test_a_model_that_cannot_be_fetched_is_a_users_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.models.resolve.find_on_hub", lambda name: None)
    code, out, err = run(capsys, "model", "somebody/something")
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert "'somebody/something'" in err and "can't be reached" in err


@pytest.mark.slow
def test_a_closed_pipe_is_no_traceback(tiny: list[str]) -> None:
    command = f"{sys.executable} -m runnerscope --help | true"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stderr == ""


def test_every_engine_keyword_has_an_option(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "generate", "--help")
    assert code == 0
    for field in dataclasses.fields(EngineConfig):
        if field.name == "use_v2_model_runner":
            assert "--runner" in out
        else:
            name = {"seed": "engine-seed"}.get(field.name, field.name.replace("_", "-"))
            assert f"--{name}" in out, name


@pytest.mark.slow
def test_without_the_extra_lab_says_how_to_get_it() -> None:
    code = (
        "import sys\n"
        "for name in ('anywidget', 'ipywidgets', 'plotly', 'jupyter_core', 'jupyterlab'): sys.modules[name] = None\n"
        "import runnerscope; sys.exit(runnerscope.main(['lab']))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "pip install 'runnerscope[lab]'" in done.stderr and len(done.stderr.splitlines()) == 1
