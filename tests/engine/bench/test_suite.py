"""`runnerscope bench` on the standard workloads, at sizes a CPU can do, through the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import runnerscope
from engine.bench.startup import start_again
from tests.engine.bench.conftest import MODEL

pytestmark = pytest.mark.slow

SMALL = ["--model", "tiny-qwen3", "--requests", "4", "--input-len", "16", "--output-len", "16", "--threads", "1"]


@pytest.fixture(autouse=True)
def _little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.bench.ceilings._BYTES", {"cpu": 2**22})


def bench(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    try:
        code = runnerscope.main(["bench", *argv])
    except SystemExit as end:
        code = int(end.code or 0)
    out, err = capsys.readouterr()
    return code, out, err


def test_json_has_every_figure_of_both_runners(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = bench(capsys, *SMALL, "--workload", "A,C", "--observe", "--json", "--commit", "abc123")
    assert code == 0, err
    report = json.loads(out)
    assert report["about"]["commit"] == "abc123" and {"device", "torch", "triton", "date"} <= set(report["about"])
    assert report["about"]["model"] == "tiny-qwen3, dummy weights, bfloat16"
    ceilings = report["ceilings"]
    assert ceilings["limit"] == max(ceilings["copy"], ceilings["read"]) > 0
    assert list(report["start_up"]) == ["v2", "v1"]
    for start in report["start_up"].values():
        assert start["total"] == pytest.approx(start["weights"] + start["engine"] + start["first_token"])
    fixed, mixed = report["workloads"]
    # tiny-qwen3: KV of a token is 2 layers x (K, V) x 2 heads x 32 x 2 bytes; the mean context is 16 + 15 / 2.
    assert fixed["kv_bytes_per_step"] == 4 * 23.5 * 512 and (fixed["tokens_in"], fixed["tokens_out"]) == (64, 64)
    assert mixed["tokens_in"] < 64 and mixed["steps"] <= 16
    for workload in (fixed, mixed):
        moved = workload["weight_bytes_per_step"] + workload["kv_bytes_per_step"]
        for side, name in zip(workload["sides"], ("V2", "V1"), strict=True):
            assert side["side"] == name
            rate = side["tokens_per_second"]
            assert len(side["seconds"]) == 5 and rate["min"] <= rate["median"] <= rate["max"]
            assert side["bandwidth"] == pytest.approx(moved / (side["ms_per_step"]["median"] / 1e3))
            assert side["share_of_limit"] == pytest.approx(side["bandwidth"] / ceilings["limit"])
            assert side["host_us_per_step"] > 0 and side["device_span_us_per_step"] > 0
            assert side["cached_tokens"] == side["preemptions"] == 0
            assert sum(side["host_parts_us_per_step"].values()) == pytest.approx(side["host_us_per_step"])
            assert side["host_parts_us_per_step"].keys() == side["host_processor_us_per_step"].keys()
            summary, every = side["observed"]["summary"], side["observed"]["every event"]
            assert (summary["pairs"], every["pairs"]) == (5, 1) and summary["events_read"] > 5 * workload["steps"]
            assert summary["loss_min"] <= summary["loss"] <= summary["loss_max"] < 1 and summary["read_us_per_step"] > 0
        assert workload["sides"][0]["waits_per_step"]["inside"] == {}
        assert set(workload["sides"][1]["waits_per_step"]["inside"]) == {"prepare_inputs"}


def test_the_table_and_the_trace_of_one_runner(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    code, out, err = bench(capsys, *SMALL, "--workload", "b1", "--runner", "v2", "--observe", "--profile", str(path))
    assert code == 0, err
    for word in (
        "tokens/s",
        "ms/step",
        "of limit",
        "main thread",
        "waits: inside",
        " output\n",
        "to first token",
        "mean host",
        "V2, processor",
        "in 5 pairs], ",
        "to read its log afterwards; every event",
    ):
        assert word in out
    assert "V1" not in out and "× " not in out
    assert "hooks of V2" in path.read_text() and f"trace of 10 steps: {path}" in out


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--workload", "A"], "need a CUDA device"),
        ([*SMALL, "--workload", "Z"], "possible are A, AT, B1, B8, C"),
        ([*SMALL, "--requests", "0"], "requests=0: at least 1"),
        ([*SMALL, "--output-len", "1"], "longer outputs"),
        ([*SMALL, "--input-len", "600"], "max_model_len=512"),
        ([*SMALL, "--tokenizer", "x"], "leave it out"),
        ([*SMALL, "--peer", "transformers"], "--requests belongs to the standard workloads"),
        ([*SMALL, "--profile", "no/such/folder/trace.json"], "its folder does not exist"),
        ([*SMALL, "--block-size", "0"], "block_size=0"),
    ],
)
def test_what_cannot_be_is_one_line(capsys: pytest.CaptureFixture[str], argv: list[str], says: str) -> None:
    code, out, err = bench(capsys, *argv)
    assert code == 2 and out == ""
    assert says in err and len(err.splitlines()) == 1


@pytest.mark.slow
def test_a_fresh_process_tells_its_whole_start() -> None:
    start = start_again(
        MODEL, {"use_v2_model_runner": True, "max_num_seqs": 4, "num_gpu_blocks_override": 16}, [1, 2, 3]
    )
    assert start.process is not None and start.process > 0.1 and start.first_token > 0 and start.capture == 0
    with pytest.raises(RuntimeError, match="max_num_seqs=0"):
        start_again(MODEL, {"max_num_seqs": 0}, [1])
