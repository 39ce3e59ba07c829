"""Sessions: what both runners do under one cursor, and what an error or a Ctrl-C leaves behind."""

from __future__ import annotations

import itertools
import signal

import pytest

from engine import LLM, ConfigError, SamplingParams
from engine.hooks import HostWait, RequestScheduled, RowMoved, RowWritten, SpanEnded
from tests.workbench.sessions import GREEDY, TINY, outputs, prompt, tiny_session
from workbench import Session, StepRecord
from workbench.prompts import parse_prompts

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


def test_preemption_is_found_when_blocks_run_out() -> None:
    long = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    session = tiny_session([prompt(1, 8), prompt(2, 8), prompt(3, 8)], sampling_params=long, num_gpu_blocks_override=14)
    record = session.run_until("preempted")
    states = {view.request_id: view.status for view in record.runners["v1"].snapshot.requests}
    assert "preempted" in states.values()
    session.run_until("resumed")
    session.run_until("end")
    assert outputs(session, "v1") == outputs(session, "v2")
    assert all(len(tokens) == 20 for tokens in outputs(session, "v1").values())


def test_a_request_comes_in_its_step_even_after_everything_else_is_done() -> None:
    session = tiny_session([prompt(1, 3, max_tokens=1), prompt(2, 3, max_tokens=1, arrive_at_step=7)], runners="v2")
    session.run_until("end")
    for record in session.recording.steps:
        known = {view.request_id for view in record.runners["v2"].snapshot.requests}
        assert ("B" in known) == (record.step >= 7)
    assert [len(tokens) for tokens in outputs(session, "v2").values()] == [1, 1]


def test_requests_come_and_go_in_the_middle() -> None:
    session = tiny_session()
    session.run(2)
    assert session.add(prompt(5, 4, max_tokens=2)) == "D"
    assert "D" in {e.request_id for e in session.step().runners["v2"].of(RowWritten)}
    session.abort("A")
    session.run_until("end")
    reasons = {view.request_id: view.finish_reason for view in session.record.runners["v1"].snapshot.requests}
    assert reasons["A"] == "abort"
    assert reasons["D"] == "length"
    assert outputs(session, "v1") == outputs(session, "v2")
    with pytest.raises(ValueError, match="no request 'Q' in this session; the requests are A, B, C, D"):
        session.abort("Q")
    session.add(prompt(6, 4, max_tokens=2))
    assert not session.finished
    session.run_until("end")
    assert len(outputs(session, "v2")["E"]) == 2


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


def test_reset_keeps_the_weights_and_a_refused_one_keeps_the_session() -> None:
    session = tiny_session()
    session.run(3)
    weights, record = session.llm("v1").loaded, session.record
    with pytest.raises(ConfigError, match="block_size=0"):
        session.reset(block_size=0)
    with pytest.raises(ValueError, match="empty"):
        session.reset([{"prompt_token_ids": []}])
    with pytest.raises(ConfigError, match="unknown keyword 'block_siz'"):
        session.reset(block_siz=8)
    assert session.record is record
    assert session.step().step == 4, "the old engines still run"
    session.reset(runners="v2", block_size=8)
    assert (session.runners, session.num_steps, session.cursor) == (("v2",), 0, 0)
    assert session.llm("v2").loaded is weights
    assert session.llm("v2").config.block_size == 8
    session.run_until("end")
    assert len(outputs(session, "v2")["A"]) == 6


def test_a_request_that_can_never_run_is_refused_before_anything_has_run() -> None:
    with pytest.raises(ValueError, match="max_model_len"):
        tiny_session([prompt(1, 4), prompt(2, 200, arrive_at_step=5)])
    session = tiny_session()
    session.run(2)
    with pytest.raises(ValueError, match="max_model_len"):
        session.add(prompt(2, 200))
    assert session.add(prompt(2, 2)) == "D"
    session.run_until("end")
    assert outputs(session, "v1") == outputs(session, "v2")


@pytest.mark.parametrize("loop", [False, True])
def test_ctrl_c_in_mid_step_keeps_whole_steps_and_the_runners_in_line(loop: bool) -> None:
    plain = tiny_session(async_scheduling=loop)
    plain.run_until("end")
    session = tiny_session(async_scheduling=loop)

    def interrupt(event: RequestScheduled) -> None:
        if event.step == 3 and event.runner == "v1":
            signal.raise_signal(signal.SIGINT)

    with session.llm("v1").hooks.subscribe(RequestScheduled, interrupt), pytest.raises(KeyboardInterrupt):
        session.run(20)
    assert session.num_steps == 0, "V2 has done nothing yet"
    assert session.llm("v1").core.step_count == 3, "V1 ended the step in which the key was pressed"
    session.step()
    assert session.record.step == 1
    assert session.llm("v1").core.step_count == 3, "V2 catches up, V1 waits"
    session.run_until("end")
    assert outputs(session, "v1") == outputs(session, "v2") == outputs(plain, "v1")
    assert [r.step for r in session.recording.steps] == [r.step for r in plain.recording.steps]


@pytest.mark.parametrize("by_phases", [False, True])
def test_a_failing_step_is_raised_once_and_the_session_goes_on(
    by_phases: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = tiny_session()
    plain.run_until("end")
    session = tiny_session()
    session.run(2)
    runner = session.llm("v2").core.runner
    forward = runner.forward

    def fail() -> None:
        monkeypatch.setattr(runner, "forward", forward)
        raise RuntimeError("a fault")

    monkeypatch.setattr(runner, "forward", fail)
    with pytest.raises(RuntimeError, match="a fault"):
        for _ in range(6):
            session.step_phase() if by_phases else session.run(4)
    session.run_until("end")
    assert outputs(session, "v1") == outputs(session, "v2") == outputs(plain, "v1")
    for record in session.recording.steps:
        assert [span.name for span in record.runners["v2"].of(SpanEnded)].count("schedule") <= 1


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


@pytest.mark.parametrize(
    ("prompts", "error"),
    [
        (3, "prompts are int: give a text, a dict, or a list of either"),
        (None, "prompts are NoneType"),
        ([3], "prompt A is int: give a text, or a dict"),
        ([prompt(1, 2, sampling_params={"n": 1})], "sampling_params must be a SamplingParams, got dict"),
        ([[1, 2]], 'prompt A is a list of ids: write it as {"prompt_token_ids"'),
        ([{"promt": "x"}], "unknown key 'promt', did you mean 'prompt'"),
        ([{"prompt": "x", "prompt_token_ids": [1]}], "give either 'prompt'"),
        ([{"max_tokens": 3}], "give either 'prompt'"),
        ([{"prompt": b"x"}], "'prompt' is bytes, but must be a text"),
        ([prompt(1, 2, arrive_at_step=0)], "arrive_at_step=0 must be a whole number of at least 1"),
        ([prompt(1, 2, max_tokens=0)], "max_tokens=0"),
        ([prompt(1, 2, sampling_params=SamplingParams(n=2))], "n=2, but a session follows single texts"),
    ],
)
def test_bad_prompts_are_named(prompts: object, error: str) -> None:
    with pytest.raises((ValueError, TypeError)) as caught:
        parse_prompts(prompts, None)
    assert error in str(caught.value)


def test_a_bad_request_is_refused_before_its_step_comes() -> None:
    with pytest.raises(ValueError, match="priority='high'"):
        tiny_session([prompt(1, 2, arrive_at_step=3, priority="high")])


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="possible are 'v1', 'v2', 'both'"):
        tiny_session(runners="v3")
    with pytest.raises(ConfigError, match="use_v2_model_runner is the session's to choose; give runners='v1' or 'v2'"):
        tiny_session(use_v2_model_runner=False)
    with pytest.raises(ValueError, match="2 sampling_params for 1 prompts"):
        tiny_session([prompt(1, 2)], sampling_params=[GREEDY, GREEDY])
    session = tiny_session()
    for bad in (0, -1, 1.5, True):
        with pytest.raises(ValueError, match="whole number of at least 1"):
            session.run(bad)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="whole number of at least 0"):
        session.goto(-1)


def test_priority_and_own_sampling_reach_the_engine() -> None:
    own = SamplingParams(temperature=0.7, top_p=0.9, seed=5, max_tokens=2)
    keywords = {**TINY, "scheduling_policy": "priority"}
    session = Session([prompt(1, 3, sampling_params=own), prompt(2, 3, priority=-1)], "v1", **keywords)
    record: StepRecord = session.step()
    views = {view.request_id: view for view in record.runners["v1"].snapshot.requests}
    assert views["B"].priority == -1
    rows = {row.request_id: row.cells for row in record.runners["v1"].snapshot.rows if row.request_id}
    assert rows["A"]["temperature"] == pytest.approx(0.7)
    assert rows["A"]["top_p"] == pytest.approx(0.9)
    assert next(iter(record.runners["v1"].of(RequestScheduled))).request_id == "B"


def test_the_text_of_a_token_is_known_as_soon_as_the_device_has_it() -> None:
    session = tiny_session()
    for _ in range(6):
        record = session.step()
        newest = {row.cells["last_sampled_token"] for row in record.runners["v2"].snapshot.rows if row.request_id}
        assert newest - {None, -1} <= record.token_text.keys()


def test_without_a_seed_a_session_draws_what_an_engine_alone_draws() -> None:
    params = SamplingParams(temperature=1.0, max_tokens=6, ignore_eos=True)
    prompts = [prompt(1, 5), prompt(2, 7), prompt(3, 4)]
    session = tiny_session(prompts, sampling_params=params, runners="v2")
    session.run_until("end")
    llm = LLM(**TINY)
    alone = llm.generate(prompts, params, use_tqdm=False)
    llm.close()
    drawn = outputs(session, "v2")
    assert [drawn[name] for name in "ABC"] == [output.outputs[0].token_ids for output in alone]
