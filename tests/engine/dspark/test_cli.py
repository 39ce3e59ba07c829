"""`runnerscope dspark`: a draft from nothing to measured, on a tiny model; and what it refuses."""

import json
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from engine import LLM
from engine.cli.main import build_parser, run
from engine.dspark import cli, read_draft
from engine.dspark.calibration import Calibration
from engine.dspark.card import command_line
from engine.dspark.training import Trainer
from engine.spec_decode.mtp_checkpoint import read_mtp
from tests.engine.dspark.golden import ROOT
from tests.engine.engine_helpers import greedy
from tests.engine.tiny_text import letters, text_model

pytestmark = pytest.mark.slow

TRAIN = ["--num-sequences", "8", "--max-tokens", "12", "--steps", "4", "--batch-size", "4", "--num-anchors", "4"]
SHAPE = ["--draft-block", "3", "--markov-rank", "8", "--intermediate-size", "32", "--target-layer-ids", "-1", "0"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Options of a tiny target with a tokenizer and a chat template."""
    folder = tmp_path_factory.mktemp("model")
    text_model(folder, letters())
    sizes = ["--max-model-len", "500", "--max-num-seqs", "8", "--num-gpu-blocks-override", "300"]
    return ["--model", str(folder), "--load-format", "dummy", "--tokenizer", str(folder), "--device", "cpu", *sizes]


def call(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    parser, commands = build_parser()
    if "dspark" not in commands.choices:
        cli.add_parser(commands)
    try:
        code = run(parser, commands, ["dspark", *argv])
    except SystemExit as end:
        code = int(end.code or 0)
    return code, *capsys.readouterr()


@contextmanager
def LLMs(model: list[str], spec: dict[str, Any]) -> Iterator[list[LLM]]:
    """Engines on the tiny target without drafts and with them."""
    folder = model[1]
    sizes: dict[str, Any] = {"max_model_len": 128, "max_num_seqs": 2, "num_gpu_blocks_override": 65}
    llms = [
        LLM(model=folder, load_format="dummy", device="cpu", speculative_config=each, **sizes) for each in (None, spec)
    ]
    try:
        yield llms
    finally:
        for llm in llms:
            llm.close()


def test_from_nothing_to_measured(tmp_path: Path, model: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "draft"
    code, text, error = call(capsys, "train", "--out", str(out), *TRAIN, *SHAPE, *model)
    assert code == 0, error
    assert "4 steps" in text and "chance of acceptance by slot" in text
    config, weights = read_draft(out)
    assert (config.block_size, config.target_layer_ids, config.markov_rank) == (3, (-1, 0), 8)
    assert "embed_tokens.weight" not in weights and str(weights["fc.weight"].dtype) == "torch.bfloat16"
    assert sorted(p.name for p in out.iterdir()) == ["README.md", "config.json", "model.safetensors", "training"]
    card = (out / "README.md").read_text()
    for line in ("| block | 3 |", "| Markov head | vanilla, rank 8 |", "| prompts | self-generated |", "| steps | 4 |"):
        assert line in card

    code, text, error = call(capsys, "train", "--out", str(out), *TRAIN, *SHAPE, *model)
    assert code == 0 and "taking up" in text and "behind step 4" in text, error

    code, text, error = call(capsys, "train", "--out", str(out), *TRAIN, *SHAPE, *model, "--max-tokens", "9")
    assert code == 2 and "max_tokens was 12, is 9" in error and "Give another --out" in error

    prompts = tmp_path / "mine.jsonl"
    prompts.write_text('{"turns": ["ab", "cd"]}\n{"turns": ["ef"]}\n')
    options = ["--prompts", str(prompts), "--max-tokens", "20", *model]
    code, text, error = call(capsys, "eval", str(out), *options)
    assert code == 0, error
    header, *methods, _ = text.splitlines()
    assert header.split()[:3] == ["prompts", "draft", "rounds"] and header.count("accept") == 3
    assert [line.split()[:2] for line in methods] == [["mine", m] for m in ("none", "ngram", "lookup", "dspark")]
    assert float(methods[0].split()[3]) == 1.0 and all(float(line.split()[3]) >= 1.0 for line in methods)

    code, text, error = call(capsys, "eval", str(out), "--json", "--k", "2", *options)
    assert code == 0, error
    shown = json.loads(text)
    assert shown["num_speculative_tokens"] == 2 and len(shown["prompts"]["mine"]["dspark"]["conditional"]) == 2

    for temperature in ("0", "1"):
        code, text, error = call(capsys, "calibrate", str(out), "--temperature", temperature, "--rounds", "2", *options)
        assert code == 0, error
        assert "ECE before" in text and f"stored in {out}" in text
        found = Calibration.load(out)
        assert found is not None and len(found.temperatures) == 3


class Interrupter:
    """A Ctrl-C as it comes: a signal in the middle of call number ``at`` of a class's steps; 0 only counts them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: type, at: int = 0) -> None:
        self.calls = 0
        real = owner.step  # type: ignore[attr-defined]

        def step(own: Any) -> Any:
            self.calls += 1
            if self.calls == at:
                signal.raise_signal(signal.SIGINT)
            return real(own)

        monkeypatch.setattr(owner, "step", step)


@pytest.mark.parametrize("head", ["dspark", "mtp"])
def test_a_call_that_is_interrupted_anywhere_is_taken_up(
    head: str, tmp_path: Path, model: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While prompts are made up, while they are answered, in a step of the training: the end is the same."""
    options = ["--head", head, *TRAIN, *(SHAPE if head == "dspark" else []), "--save-dtype", "float32", *model]
    # Three at a time, so that answers come in waves.
    options += ["--temperatures", "0", "1", "--max-num-seqs", "3"]
    out, state, kept = tmp_path / "cut", tmp_path / "cut" / "training", []

    def steps_left(copy: str) -> int:
        """How many of the engine's steps a call would take from here to its end."""
        if out.exists():
            shutil.copytree(out, tmp_path / copy)
        with monkeypatch.context() as patch:
            counted = Interrupter(patch, LLM)
            code, _, error = call(capsys, "train", "--out", str(tmp_path / copy), *options)
        assert code == 0, error
        return counted.calls

    assert steps_left("whole") > 40
    # Prompts have up to 96 tokens and answers 12, so answers are among the last steps.
    for owner, at_step in (
        (LLM, lambda: 5),
        (LLM, lambda: steps_left("a") * 6 // 10),
        (LLM, lambda: steps_left("b") - 15),
        (LLM, lambda: 3),
        (Trainer, lambda: 2),
        (Trainer, lambda: 1),
    ):
        at = at_step()
        with monkeypatch.context() as patch:
            interrupter = Interrupter(patch, owner, at)
            code, _, error = call(capsys, "train", "--out", str(out), *options)
            assert code == 130 and interrupter.calls == at, error
        kept.append({p.name: len(p.read_text().splitlines()) - 1 for p in state.glob("*.jsonl")})
    assert kept[0] == {"prompts.jsonl": 0} and 1 <= kept[1]["prompts.jsonl"] < 8
    assert kept[2]["prompts.jsonl"] == 8 and 1 <= kept[2]["answers.jsonl"] < 8
    assert kept[-1] == {"prompts.jsonl": 8}
    code, text, error = call(capsys, "train", "--out", str(out), *options)
    assert code == 0 and f"taking up {out} behind step 3" in text, error
    for name in ("model.safetensors", "training/sequences.safetensors"):
        one, other = (load_file(tmp_path / folder / name) for folder in ("whole", "cut"))
        assert one.keys() == other.keys()
        for key, tensor in one.items():
            torch.testing.assert_close(other[key], tensor, rtol=1e-5, atol=1e-6)


def test_a_draft_and_a_head_on_the_same_answers(
    tmp_path: Path, model: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = ["--data", str(tmp_path / "data"), *TRAIN, *model]
    code, _, error = call(capsys, "train", "--out", str(tmp_path / "draft"), *SHAPE, *data)
    assert code == 0, error
    with monkeypatch.context() as patch:
        patch.setattr(LLM, "__init__", None)  # no engine is needed any more
        code, text, error = call(
            capsys, "train", "--head", "mtp", "--out", str(tmp_path / "head"), "--save-dtype", "int8", *data
        )
    assert code == 0 and "--mtp" in text, error
    assert sorted(p.name for p in (tmp_path / "data").iterdir()) == ["hidden", "prompts.jsonl", "sequences.safetensors"]
    assert "# MTP head for" in (tmp_path / "head" / "README.md").read_text()
    config, weights = read_mtp(tmp_path / "head")
    assert config.num_hidden_layers == 1 and weights["eh_proj.weight"].dtype == torch.float32
    spec = {"method": "mtp", "model": str(tmp_path / "head")}
    with LLMs(model, spec) as (plain, speculating):
        prompt, params = {"prompt_token_ids": [5, 6, 7, 8]}, greedy(12)
        one, other = (llm.generate(prompt, params, use_tqdm=False)[0].outputs[0] for llm in (plain, speculating))
        assert one.token_ids == other.token_ids

    code, _, error = call(
        capsys,
        "train",
        "--head",
        "mtp",
        "--out",
        str(tmp_path / "x"),
        "--markov-rank",
        "8",
        "--draft-layers",
        "2",
        *data,
    )
    assert code == 2 and "--head mtp takes no --draft-layers, --markov-rank" in error


def test_minutes_end_with_a_finished_head(tmp_path: Path, model: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    steps = TRAIN.index("--steps")
    options = ["--out", str(tmp_path), *TRAIN[:steps], *TRAIN[steps + 2 :], *SHAPE, *model]
    code, text, error = call(capsys, "train", *options, "--minutes", "0.05")
    assert code == 0, error
    seconds = float(text.split(" steps, ")[1].split(" s:")[0])
    assert 2.5 <= seconds <= 5
    assert "| minutes | 0.05 |" in (tmp_path / "README.md").read_text()
    # More time is more training; by steps it would be another one.
    code, text, error = call(capsys, "train", *options, "--minutes", "0.06")
    assert code == 0 and "taking up" in text and " steps, " in text, error
    code, _, error = call(capsys, "train", *options)
    assert code == 2 and "holds another training" in error


def test_eval_without_a_head_measures_what_needs_none(model: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code, text, error = call(capsys, "eval", "--k", "2", "--num-sequences", "4", "--max-tokens", "16", *model)
    assert code == 0, error
    methods = [line.split()[:2] for line in text.splitlines()[1:-1]]
    assert methods == [["self-made", method] for method in ("none", "ngram", "lookup")]


def test_what_is_refused(tmp_path: Path, model: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    draft = str(ROOT / "vanilla" / "draft")
    for argv, message in (
        (["eval", draft, *model], "made for another target: vocab_size is 256, the target's is 384"),
        (["eval", str(tmp_path), *model], "config.json: cannot be read"),
        (["eval", "--prompts", str(tmp_path / "none"), *model], "cannot be read (No such file"),
        (["train", "--out", str(tmp_path / "x"), "--target-layer-ids", "5", *model], "possible are -1"),
        (["train", "--out", str(tmp_path / "x"), "--steps", "0", *model], "steps must be at least 1"),
        (["train", *model], "--out"),
        (
            ["eval", *model, "--max-model-len", "20", "--num-sequences", "5"],
            "none of 5 prompts that the target made up",
        ),
        (["eval", draft, "--calibrate", *model], "unknown argument"),
        (["eval", "--to-card", *model], "--to-card: give DRAFT or --mtp"),
        (["eval", "--mtp", str(tmp_path), *model], "config.json"),
        ([], "ACTION"),
    ):
        code, _, error = call(capsys, *argv)
        assert code == 2 and message in error, error
    assert not (tmp_path / "x").exists()


def test_a_card_has_no_directory_of_the_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sys.argv", ["x", "dspark", "eval", str(tmp_path / "my draft"), "--k", "7", "data/a.jsonl"])
    assert command_line() == "runnerscope dspark eval 'my draft' --k 7 data/a.jsonl"
