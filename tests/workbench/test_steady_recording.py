"""The tool that records steady decoding of a standard workload, on the smallest model."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine import LLM
from engine.bench.workloads import STANDARD
from engine.hooks import Event, InputsPrepared, Sampled, SpanEnded
from workbench.codec import RecordingError
from workbench.recording import DATA, Recording
from workbench.steady_recording import record_steady
from workbench.views import timeline


@pytest.fixture(scope="module")
def engines():
    first = LLM("tiny-qwen3", load_format="dummy", skip_tokenizer_init=True, max_model_len=128, max_num_seqs=4,
                use_v2_model_runner=False)  # fmt: skip
    second = LLM(loaded=first.loaded, skip_tokenizer_init=True, max_model_len=128, max_num_seqs=4)
    yield {"v1": first, "v2": second}
    second.close()
    first.close()


def test_a_recording_of_steady_steps_opens_on_the_timeline(engines, tmp_path: Path):
    spec = STANDARD["A"].resized(3, 8, 100)
    made = record_steady(engines, spec, steps=5)
    recording = Recording.load(made.save(tmp_path / "A.json.gz"))
    assert len(recording.steps) == 5 and recording.meta["workload"] == str(spec)
    for name, llm in engines.items():
        assert not llm.core.has_unfinished() and llm.core.scheduler.kv_cache.usage == 0, "the engine is left empty"
        assert not llm.hooks.wanted
        for record in recording.steps:
            done = record.runners[name]
            spans = [e for e in done.of(SpanEnded) if e.lane == "host"]
            assert {e.name for e in spans} >= {"schedule", "prepare inputs", "forward", "sample", "output"}
            (prepared,) = done.of(InputsPrepared)
            assert prepared.num_reqs == prepared.num_tokens == 3, "each request decodes"
            assert not any(done.of(Sampled)), "nothing for each token"
            assert all(done.begin_ns <= e.begin_ns <= e.end_ns <= done.end_ns for e in spans)
            assert any(e.lane == "compute" for e in done.of(SpanEnded))
            assert done.snapshot.requests == () and done.snapshot.loop == "overlapped"
    model = timeline.view_model(recording.steps[-1])
    assert [r["runner"] for r in model["runners"]] == ["v1", "v2"] and all(r["bars"] for r in model["runners"])


@pytest.mark.parametrize("name", ["AT", "B8"])
def test_the_shipped_recordings_open(name: str):
    recording = Recording.shipped(name)
    assert recording.meta["device"] == "NVIDIA H200" and recording.meta["workload"].startswith(f"{name}:")
    assert len(recording.meta["commit"]) >= 12 and recording.meta["date"] and len(recording.steps) == 20
    v1, v2 = timeline.view_model(recording.steps[-1])["runners"]
    assert v1["numbers"]["waits_per_step"] == 1 and v2["numbers"]["waits_per_step"] == 0
    assert v2["numbers"]["ms_per_step"] < v1["numbers"]["ms_per_step"]
    assert {path.stem for path in DATA.iterdir() if path.stat().st_size < 500_000} == {"AT.json", "B8.json"}


def test_a_recording_that_is_not_shipped_is_named():
    with pytest.raises(RecordingError, match="'C'.*AT, B8"):
        Recording.shipped("C")


def test_a_workload_that_is_over_too_soon_is_refused(engines):
    with pytest.raises(ValueError, match="0 of 2 requests run"):
        record_steady(engines, STANDARD["A"].resized(2, 8, 10))
    assert all(not llm.core.has_unfinished() and Event not in llm.hooks.wanted for llm in engines.values())
