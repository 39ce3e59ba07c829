"""`runnerscope bench`: a report of every side."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from engine.bench.workload import Ask, Workload
from tests.engine.cli.command import run


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
