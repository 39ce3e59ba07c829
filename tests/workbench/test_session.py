"""Sessions: both runners under one cursor, step by step, phase by phase, and what a record says."""

from __future__ import annotations

import itertools

import pytest

from engine import SamplingParams
from engine.hooks import HostWait, RequestScheduled, RowMoved, SpanEnded
from tests.workbench.sessions import outputs, prompt, tiny_session

PHASES = ("schedule", "update states", "prepare inputs", "forward", "sample", "output")


@pytest.mark.parametrize("overlapped", [False, True])
def test_both_runners_write_the_same_text_under_the_same_names(overlapped: bool) -> None:
    session = tiny_session(async_scheduling=overlapped)
    session.run_until("end")
    assert session.finished
    assert outputs(session, "v1") == outputs(session, "v2")
    assert {name: len(tokens) for name, tokens in outputs(session, "v1").items()} == {"A": 6, "B": 3, "C": 6}
    assert session.llm("v1").loaded is session.llm("v2").loaded
    assert list(session.recording.colors) == list(session.recording.prompts) == ["A", "B", "C"]
    assert len(set(session.recording.colors.values())) == 3


def test_each_step_begins_where_the_last_one_ended() -> None:
    session = tiny_session()
    session.run(3)
    session.step()
    session.run(4)
    for runner in session.runners:
        steps = [record.runners[runner] for record in session.recording.steps]
        assert [step.step for step in steps] == list(range(1, 9))
        for last, this in itertools.pairwise(steps):
            if this.step != 4:  # C arrives before step 4: its queue is another one
                assert this.before is last.snapshot
            assert this.begin_ns >= last.end_ns
        assert steps[3].before.waiting == ("C",)
        assert all(step.snapshot.step == step.step for step in steps)


def test_the_cursor_moves_over_the_record_and_the_engines_never_rewind() -> None:
    session = tiny_session()
    start = session.record
    assert start.step == 0
    assert start.history.steps == [start]
    session.run(5)
    core = session.llm("v2").core
    assert core.step_count == 5
    assert session.back().step == 4
    assert session.goto(0).step == 0
    assert session.back().step == 0
    assert session.step().step == 1
    assert session.run(3).step == 4
    assert core.step_count == 5, "moving through the record must not run the engine"
    assert session.run(3).step == 7
    assert core.step_count == 7
    assert session.goto(9).step == 9
    record = session.goto(3)
    assert [past.step for past in record.history.steps] == [1, 2, 3]
    assert record.history.steps[-1] is record


def test_at_the_end_stepping_changes_nothing() -> None:
    session = tiny_session()
    last = session.run_until("end").step
    assert session.step().step == session.step_phase().step == session.run(5).step == last
    assert session.num_steps == last


def test_a_run_has_no_pause_inside_and_one_before_the_next_step() -> None:
    session = tiny_session()
    session.run(4)
    session.step()
    for runner in session.runners:
        steps = [record.runners[runner] for record in session.recording.steps]
        assert [len(step.pauses) for step in steps] == [0, 0, 0, 0, 1]
        begin, end = steps[4].pauses[0]
        busy = [span.end_ns for step in steps[:4] for span in step.of(SpanEnded, HostWait)]
        assert max(busy) <= begin <= end <= min(span.begin_ns for span in steps[4].of(SpanEnded))
    # V2's run came after V1's: neither disturbs the other's times
    last_of_v1 = max(span.end_ns for span in session.recording.steps[3].runners["v1"].of(SpanEnded))
    first_of_v2 = min(span.begin_ns for span in session.recording.steps[0].runners["v2"].of(SpanEnded))
    assert last_of_v1 <= first_of_v2


def test_device_spans_belong_to_the_step_that_launched_them() -> None:
    session = tiny_session()
    session.run(6)
    for record in session.recording.steps:
        for done in record.runners.values():
            forwards = [span for span in done.of(SpanEnded) if span.name == "forward" and span.lane == "compute"]
            assert [span.step for span in forwards] == [record.step]


def test_v2_waits_for_nothing_inside_a_step_while_it_is_watched() -> None:
    session = tiny_session()
    session.run_until("end")
    assert all(record.runners["v2"].waits == 0 for record in session.recording.steps)
    assert any(record.runners["v1"].waits > 0 for record in session.recording.steps)


def test_phases_walk_through_a_step_without_making_it_twice() -> None:
    walked, whole = tiny_session(async_scheduling=False), tiny_session(async_scheduling=False)
    whole.run(2)
    walked.step()
    seen = []
    for _ in PHASES[:-1]:
        record = walked.step_phase()
        assert walked.num_steps == 1
        assert record.step == 2
        assert record.history.steps[-1] is record
        seen.append({done.phase for done in record.runners.values()})
    assert seen == [{phase} for phase in PHASES[:-1]]
    record = walked.step_phase()
    assert {done.phase for done in record.runners.values()} == {"output"}
    assert walked.num_steps == 2
    assert walked.recording.steps[1] is record
    for runner in walked.runners:
        done = record.runners[runner]
        assert len(done.pauses) == len(PHASES), "one before each phase"
        assert done.snapshot.requests == whole.recording.steps[1].runners[runner].snapshot.requests
        assert done.snapshot.rows == whole.recording.steps[1].runners[runner].snapshot.rows
    walked.run_until("end")
    whole.run_until("end")
    assert outputs(walked, "v2") == outputs(whole, "v2")


def test_a_step_begun_by_phases_is_ended_by_step_and_left_by_back() -> None:
    session = tiny_session()
    session.step()
    session.step_phase()
    session.step_phase()
    assert session.back().step == 1
    assert session.step_phase().step == 2
    assert session.step().step == 2
    assert session.num_steps == 2
    session.run_until("end")
    assert outputs(session, "v1") == outputs(session, "v2")


def test_run_until_stops_where_it_is_told() -> None:
    session = tiny_session()
    assert any(session.run_until("token").runners["v1"].of(RequestScheduled))
    record = session.run_until("prefix hit")
    hit = [event for event in record.runners["v2"].of(RequestScheduled) if event.request_id == "C"]
    assert hit[0].num_cached_tokens == 8
    finished = session.run_until("finished").runners["v2"].snapshot.requests
    assert [view.request_id for view in finished if view.status == "finished"] == ["B"]
    session.goto(0)
    moved = session.run_until(RowMoved)
    assert [event.how for event in moved.runners["v1"].of(RowMoved)] == ["condense"]
    assert not list(moved.runners["v2"].of(RowMoved))
    session.goto(0)
    assert session.run_until(lambda record: record.step >= 3).step == 3
    with pytest.raises(ValueError, match=r"'finishd'.*Did you mean 'finished'"):
        session.run_until("finishd")
    with pytest.raises(TypeError, match="an event type of engine"):
        session.run_until(7)  # type: ignore[arg-type]


def test_a_runner_that_is_done_idles_while_the_other_goes_on() -> None:
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=30, stop_token_ids=tuple(range(40)))
    session = tiny_session([prompt(1, 5), prompt(2, 5)], sampling_params=params)
    session.run_until("end")
    ends = {}
    for runner in session.runners:
        active = [record.step for record in session.recording.steps if record.runners[runner].events]
        ends[runner] = active[-1]
    assert ends["v1"] != ends["v2"], "these two draw differently and stop at different lengths"
    early = min(ends, key=lambda runner: ends[runner])
    for record in session.recording.steps[ends[early] :]:
        idle = record.runners[early]
        assert idle.events == ()
        assert idle.snapshot is idle.before


def test_every_token_has_a_text() -> None:
    session = tiny_session()
    session.step()
    record = session.record
    for view in record.runners["v1"].snapshot.requests:
        assert all(record.token_text[token] == f"<{token}>" for token in view.prompt_token_ids)
    assert tiny_session().record.token_text, "before the first step, too"


def test_meta_names_what_ran() -> None:
    meta = tiny_session().recording.meta
    assert (meta["model"], meta["device"], meta["kernel_backend"]) == ("tiny-llama", "cpu", "torch")
    assert meta["config"]["block_size"] == 4
    assert meta["date"].startswith("20")
    assert meta["commit"]


def test_reprs_are_short_and_hold_no_time() -> None:
    session = tiny_session()
    record = session.step()
    assert repr(session) == "<Session v1+v2 step 1 of 1>"
    assert repr(record) == "<StepRecord step 1 of v1 and v2>"
    assert repr(record.runners["v1"]).startswith("<RunnerStep v1 step 1 after output: ")


def test_the_text_of_a_token_is_known_as_soon_as_the_device_has_it() -> None:
    session = tiny_session()
    for _ in range(6):
        record = session.step()
        newest = {row.cells["last_sampled_token"] for row in record.runners["v2"].snapshot.rows if row.request_id}
        assert newest - {None, -1} <= record.token_text.keys()
