"""`runnerscope dspark`: a draft from nothing to measured, on a tiny model; and what it refuses."""

import json
from pathlib import Path

import pytest

from engine.cli.main import build_parser, run
from engine.dspark import cli, read_draft
from engine.dspark.calibration import Calibration
from tests.engine.dspark.golden import ROOT
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
    header, dspark, lookup, _ = text.splitlines()
    assert header.split()[:3] == ["prompts", "draft", "rounds"] and header.count("accept") == 3
    assert dspark.split()[:2] == ["mine", "dspark"] and lookup.split()[:2] == ["mine", "lookup"]
    assert float(dspark.split()[3]) >= 1.0

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


def test_eval_without_a_draft_measures_the_lookup_alone(model: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code, text, error = call(capsys, "eval", "--k", "2", "--num-sequences", "4", "--max-tokens", "16", *model)
    assert code == 0, error
    assert [line.split()[:2] for line in text.splitlines()[1:-1]] == [["self-made", "lookup"]]


def test_what_is_refused(tmp_path: Path, model: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    draft = str(ROOT / "vanilla" / "draft")
    for argv, message in (
        (["eval", draft, *model], "made for another target: vocab_size is 256, the target's is 384"),
        (["eval", str(tmp_path), *model], "config.json: cannot be read"),
        (["eval", "--prompts", str(tmp_path / "none"), *model], "no such file"),
        (["train", "--out", str(tmp_path / "x"), "--target-layer-ids", "5", *model], "possible are -1"),
        (["train", "--out", str(tmp_path / "x"), "--steps", "0", *model], "steps must be at least 1"),
        (["train", *model], "--out"),
        (
            ["eval", *model, "--max-model-len", "20", "--num-sequences", "5"],
            "none of 5 prompts that the target made up",
        ),
        (["eval", draft, "--calibrate", *model], "unknown argument"),
        ([], "ACTION"),
    ):
        code, _, error = call(capsys, *argv)
        assert code == 2 and message in error, error
    assert not (tmp_path / "x").exists()
