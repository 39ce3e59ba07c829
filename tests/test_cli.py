"""The command line: what it prints, what it refuses and how, and that a model can't steer the terminal."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers

import runnerscope
from engine.bench.measure import Result, agreement, interleave
from engine.bench.workload import Ask, Workload, workloads
from engine.cli import terminal
from engine.cli.doctor import Check
from engine.config import EngineConfig

ROOT = Path(__file__).resolve().parents[1]
VOCAB = 512


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Options for a tiny random model whose tokenizer writes an escape sequence for every id above the bytes."""
    folder = tmp_path_factory.mktemp("tokenizer")
    vocab = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([f"\x1b[{i}m" for i in range(VOCAB - len(vocab))])
    tokenizer.save(str(folder / "tokenizer.json"))
    return ["--model", "tiny-llama", "--load-format", "dummy", "--tokenizer", str(folder)]


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    try:
        code = runnerscope.main(argv)
    except SystemExit as end:
        code = int(end.code or 0)
    out, err = capsys.readouterr()
    return code, out, err


# -- what a terminal is sent


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain, ünïcode, 漢字 😀", "plain, ünïcode, 漢字 😀"),
        ("\x1b[31mred", "\\e[31mred"),
        ("a\rb\x07\x7f\x9b2J", "a\\rb\\x07\\x7f\\x9b2J"),
        ("user\u202egnp.exe", "user\\u202egnp.exe"),
        ("zero\u200bwidth", "zero\\u200bwidth"),
        ("a\u2028b\ud800\U000e0041", "a\\u2028b\\ud800\\U000e0041"),
        ("👩\u200d🚀", "👩\u200d🚀"),
    ],
)
def test_printable_escapes_what_steers_a_terminal(text: str, shown: str) -> None:
    assert terminal.printable(text) == shown


def test_printable_keeps_only_what_is_asked_for() -> None:
    assert terminal.printable("a\n\tb\r", keep="\n\t") == "a\n\tb\\r"
    assert terminal.printable("a\nb") == "a\\nb"


def test_columns_align_by_width_and_not_by_length() -> None:
    lines = terminal.columns([["漢字", "1"], ["a", "22"]], right=frozenset({1}))
    assert lines == ["漢字   1", "a     22"]
    assert terminal.clip("漢字漢字", 5) == "漢字…"


# -- generate


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
    import io

    texts = []
    for seed in ("7", "7", "8"):
        monkeypatch.setattr(sys, "stdin", io.StringIO("from stdin"))
        texts.append(run(capsys, "generate", "-", "--temperature", "2", "--seed", seed, "--max-tokens", "20", *tiny)[1])
    assert texts[0] == texts[1] != texts[2]


# -- step


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


# -- errors

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
    import dataclasses

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


# -- doctor


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


# -- bench


def test_workloads_are_what_they_say() -> None:
    one, eight = workloads(lambda text: list(range(len(text.split()))))
    assert [len(ask.prompt_token_ids) for ask in one.asks] == [64] and one.wanted_tokens == 128
    assert len(eight.asks) == 8 and (min(a.max_tokens for a in eight.asks), eight.longest) == (32, 256)
    assert eight.wanted_tokens == 992
    assert len({ask.prompt_token_ids[0] for ask in eight.asks}) == 8


def test_sides_take_turns_and_the_warm_up_does_not_count() -> None:
    calls: list[str] = []

    def side(name: str):
        def run_once(workload: Workload) -> Result:
            calls.append(name)
            return Result(((1, 2, 3),), steps=3)

        return run_once

    workload = Workload("w", (Ask((1,), 3),))
    timings = interleave(workload, {"a": side("a"), "b": side("b")}, 3)
    assert calls == ["a", "b", *("a", "b") * 3]
    assert len(timings["a"].seconds) == 3
    low, high = timings["a"].spread
    assert low <= timings["a"].tokens_per_second <= high


def test_timing_arithmetic() -> None:
    from engine.bench.measure import Timing

    timing = Timing((2.0, 1.0, 4.0), 9.0, steps=100, wanted_tokens=200, token_ids=())
    assert timing.median == 2.0 and timing.tokens_per_second == 100.0 and timing.spread == (50.0, 200.0)
    assert timing.ms_per_step == 20.0 and timing.bandwidth(10**9) == 50.0


def test_agreement_counts_up_to_the_first_difference() -> None:
    assert agreement(((1, 2, 3), (4, 5)), ((1, 9, 3), (4, 5))) == (3, 5)
    assert agreement(((1, 2),), ((1, 2),)) == (2, 2)


@pytest.mark.slow
def test_bench_reports_every_side(
    capsys: pytest.CaptureFixture[str], smollm2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real thing, cut short: two small workloads instead of two long ones."""

    def short(encode):
        ids = tuple(encode("A river begins high in the hills, where rain and melting snow gather."))
        return Workload("one", (Ask(ids[:8], 6),)), Workload("two", (Ask(ids[:5], 3), Ask(ids[2:12], 8)))

    monkeypatch.setattr("engine.bench.compare.workloads", short)
    threads = torch.get_num_threads()
    code, out, err = run(capsys, "bench", "--json", "--dtype", "float32", "--threads", str(threads + 1))
    assert code == 0, err
    assert torch.get_num_threads() == threads
    report = json.loads(out)
    assert report["about"]["dtype"] == "float32"
    assert {"device", "commit", "torch", "transformers", "dtype"} <= set(report["about"])
    assert report["weight_bytes"] > 500e6
    for workload in report["workloads"]:
        assert [side["side"] for side in workload["sides"]] == ["V2", "V1", "transformers"]
        for side in workload["sides"]:
            assert (
                side["tokens_per_second"]["min"]
                <= side["tokens_per_second"]["median"]
                <= side["tokens_per_second"]["max"]
            )
            assert side["same_tokens"]["before_first_difference"] == side["same_tokens"]["all"] > 0
        assert workload["sides"][2]["ratio"] == 1.0
    monkeypatch.setattr("engine.bench.machine.multiplies_bfloat16", lambda: True)
    code, out, _ = run(capsys, "bench")
    assert code == 0 and out.count("transformers") >= 3 and "weights GB/s" in out and "bfloat16" in out
