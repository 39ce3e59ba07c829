"""Requests of a session: they come, go, wait for room, and are asked for wrongly."""

from __future__ import annotations

import pytest

from engine import LLM, SamplingParams
from engine.hooks import RequestScheduled, RowWritten
from tests.workbench.sessions import TINY, outputs, prompt, tiny_session
from workbench import Session, StepRecord
from workbench.prompts import parse_prompts


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
