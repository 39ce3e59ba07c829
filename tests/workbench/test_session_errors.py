"""What a Ctrl-C, a failing step or a refused reset leaves of a session: whole steps, and runners that meet again."""

from __future__ import annotations

import signal

import pytest

from engine import ConfigError
from engine.hooks import RequestScheduled, SpanEnded
from tests.workbench.sessions import GREEDY, outputs, prompt, tiny_session


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
