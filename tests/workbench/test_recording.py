"""Recordings: saved, loaded and exported without loss, and damaged ones refused with a reason."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from engine.hooks import HostWait, SpanEnded
from tests.workbench.records import make_recording
from tests.workbench.sessions import tiny_session
from tests.workbench.vocabulary import EVIL
from workbench import Recording
from workbench.codec import RecordingError


@pytest.mark.parametrize("name", ["run.json", "run.json.gz"])
def test_a_real_run_survives_the_disk(name: str, tmp_path: Path) -> None:
    session = tiny_session()
    session.run_until("end")
    path = session.recording.save(tmp_path / name)
    loaded = Recording.load(path)
    assert loaded.steps == session.recording.steps
    assert loaded.meta == json.loads(json.dumps(session.recording.meta))
    assert (loaded.prompts, loaded.colors) == (session.recording.prompts, session.recording.colors)
    assert loaded.token_text == session.recording.token_text
    assert len(loaded.steps[4].history.steps) == 5
    assert [p.name for p in tmp_path.iterdir()] == [name], "no half-written file beside it"
    third = loaded.steps[2].runners["v1"]
    assert third.before is loaded.steps[1].runners["v1"].snapshot, "a shared snapshot is shared again"


def test_the_same_run_is_the_same_bytes(tmp_path: Path) -> None:
    recording = make_recording()
    first = recording.save(tmp_path / "a.json.gz").read_bytes()
    assert Recording.load(tmp_path / "a.json.gz").save(tmp_path / "b.json.gz").read_bytes() == first


def test_texts_come_back_as_they_were(tmp_path: Path) -> None:
    recording = make_recording()
    recording.token_text[3] = "\u2028\x00\ud7ff é 😀" + EVIL
    loaded = Recording.load(recording.save(tmp_path / "run.json"))
    assert loaded.token_text[3] == recording.token_text[3]
    assert loaded.steps[0].text(3) == recording.token_text[3]
    assert loaded.steps[0].text(10**6) == "<1000000>"


def test_a_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_recording(steps=2).save(tmp_path / "run.json")
    before = path.read_bytes()

    def no_space(self: Path, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", no_space)
    with pytest.raises(OSError, match="No space left"):
        make_recording(steps=3).save(path)
    assert path.read_bytes() == before


def _damage(change: Any) -> Any:
    data = json.loads(json.dumps(make_recording(steps=2).to_json()))
    change(data)
    return data


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda d: d.update(format="x"), "this is no recording"),
        (lambda d: d.update(version=99), "version 1, not 99"),
        (lambda d: d.pop("snapshots"), "damaged"),
        (lambda d: d["steps"][0]["v1"].update(snapshot=99), "damaged"),
        (lambda d: d["steps"][0].update(v3=d["steps"][0]["v1"]), "runner 'v3' is neither"),
        (lambda d: d["snapshots"][0].update(step="one"), r"snapshots\[0\]\.step: expected int, found 'one'"),
        (lambda d: d["snapshots"][0].update(step=True), r"snapshots\[0\]\.step: expected int"),
        (lambda d: d["snapshots"][0].update(loop="wild"), r"snapshots\[0\]\.loop: expected one of"),
        (lambda d: d["snapshots"][0].pop("rows"), r"snapshots\[0\]: the fields of Snapshot"),
        (lambda d: d["snapshots"][0].update(more=1), r"\['more'\] do not fit"),
        (lambda d: d["snapshots"][0]["pool"]["free"].append("x"), r"pool\.free: expected a list of int"),
        (lambda d: d["steps"][0]["v1"]["events"][0].update(type="Popen"), r"events\[0\]: 'Popen' is no event"),
        (lambda d: d["steps"][0]["v1"]["events"].append(7), "None is no event"),
    ],
)
def test_a_damaged_recording_says_where(change: Any, error: str) -> None:
    with pytest.raises(RecordingError, match=error):
        Recording.from_json(_damage(change))


@pytest.mark.parametrize("name", ["run.json", "run.json.gz"])
def test_a_cut_off_file_is_refused(name: str, tmp_path: Path) -> None:
    path = make_recording(steps=2).save(tmp_path / name)
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(RecordingError, match=rf"{name} is damaged or cut off"):
        Recording.load(path)
    path.write_bytes(gzip.compress(b"[1, 2]"))
    with pytest.raises(RecordingError, match="this is no recording"):
        Recording.load(path)


def test_the_chrome_trace_holds_what_was_measured_and_no_more() -> None:
    session = tiny_session()
    session.run(5)
    trace = session.recording.to_chrome_trace()
    assert json.loads(json.dumps(trace)) == trace
    complete = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    measured = [
        event
        for record in session.recording.steps
        for done in record.runners.values()
        for event in done.of(SpanEnded, HostWait)
    ]
    assert len(complete) == len(measured) > 50
    assert min(event["ts"] for event in complete) == 0
    assert all(event["dur"] >= 0 for event in complete)
    assert sum(e["dur"] for e in complete) == pytest.approx(sum(m.end_ns - m.begin_ns for m in measured) / 1000)
    names = {(e["pid"], e["args"]["name"]) for e in trace["traceEvents"] if e["name"] == "process_name"}
    assert names == {(1, "runner V1"), (2, "runner V2")}
    lanes = {(e["pid"], e["cat"], e["tid"]) for e in complete}
    assert {(2, "host", 1), (2, "compute", 2), (2, "copy", 3), (1, "wait", 1)} <= lanes
    assert trace["otherData"]["model"] == "tiny-llama"


def test_an_empty_recording_can_be_kept_too(tmp_path: Path) -> None:
    loaded = Recording.load(Recording({"model": "m"}).save(tmp_path / "empty.json"))
    assert list(loaded.steps) == []
    assert loaded.runners == ()
    assert loaded.to_chrome_trace()["traceEvents"] == []
