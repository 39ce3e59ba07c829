"""Snapshots: equal to the truth at every pause, frozen, and free."""

from __future__ import annotations

import dataclasses

import pytest

from engine.snapshot import Snapshot
from tests.engine.engine_helpers import (
    TraceRequest,
    both_loops,
    both_runners,
    greedy,
    ids,
    make_llm,
    prompt_of,
    run_trace,
    tiny_llm,
)
from tests.engine.snapshot_truth import assert_truthful

TRACE = [
    TraceRequest("a", tuple(prompt_of(9)), greedy(12)),
    TraceRequest("b", tuple(prompt_of(21)), greedy(9), arrival=1),
    TraceRequest("c", tuple(prompt_of(9)), greedy(7), arrival=3),
    TraceRequest("d", tuple(prompt_of(5, 1)), greedy(11), arrival=3),
    TraceRequest("e", tuple(prompt_of(14, 2)), greedy(6), arrival=5, abort_at=8),
]


@both_runners
@both_loops
def test_a_snapshot_is_the_truth_after_every_step(runner: str, loop: str) -> None:
    """Chunks, shared prefixes, moves of rows, preemptions and an abort: ten blocks are few."""
    with tiny_llm(runner, loop, max_num_batched_tokens=10, num_gpu_blocks_override=11) as llm:
        result = run_trace(llm, TRACE, after_step=assert_truthful)
    assert result.num_preemptions > 0


@both_runners
@both_loops
def test_snapshots_change_no_token(runner: str, loop: str) -> None:
    with tiny_llm(runner, loop) as plain, tiny_llm(runner, loop) as watched:
        pending = []
        expected = run_trace(plain, TRACE)
        seen = run_trace(watched, TRACE, after_step=lambda llm: pending.append(llm.core.snapshot()))
    assert {name: output.outputs for name, output in expected.outputs.items()} == {
        name: output.outputs for name, output in seen.outputs.items()
    }
    assert len(pending) == seen.num_steps


@both_runners
def test_a_snapshot_keeps_its_moment(runner: str) -> None:
    """Read after the engine has gone on, it still shows the step at which it was taken."""
    with tiny_llm(runner, "plain") as llm:
        llm.add(ids(*prompt_of(6)), greedy(10), request_id="a")
        llm.step()
        pending, at_once = llm.core.snapshot(), llm.core.snapshot().result()
        while llm.core.has_unfinished():
            llm.step()
        later = pending.result()
        assert _without_time(later) == _without_time(at_once)
        assert pending.result() is later
        assert later.running == ("a",) and llm.core.snapshot().result().running == ()


def _without_time(snapshot: Snapshot) -> Snapshot:
    return dataclasses.replace(snapshot, time_ns=0)


@both_runners
def test_a_snapshot_is_frozen(runner: str) -> None:
    with tiny_llm(runner) as llm:
        llm.add(ids(*prompt_of(6)), greedy(4), request_id="a")
        llm.step()
        snapshot = llm.core.snapshot().result()
        for view in (
            snapshot,
            snapshot.requests[0],
            snapshot.rows[0],
            snapshot.pool,
            snapshot.pool.blocks[1],
            snapshot.inputs,
        ):
            name = dataclasses.fields(view)[0].name
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(view, name, None)


@both_runners
def test_before_the_first_step_there_are_no_inputs(runner: str) -> None:
    with tiny_llm(runner) as llm:
        llm.add(ids(*prompt_of(6)), greedy(4), request_id="a")
        snapshot = llm.core.snapshot().result()
        assert snapshot.inputs is None and snapshot.waiting == ("a",) and snapshot.step == 0
        assert all(row.request_id is None for row in snapshot.rows)


@both_runners
@both_loops
def test_between_the_phases_a_snapshot_can_be_taken_too(runner: str, loop: str) -> None:
    with tiny_llm(runner, loop) as llm:
        llm.add(ids(*prompt_of(6)), greedy(5), request_id="a")
        llm.add(ids(*prompt_of(9)), greedy(4), request_id="b")
        names = []
        while llm.core.has_unfinished():
            for phase in llm.core.phases():
                names.append(phase)
                snapshot = llm.core.snapshot().result()
                assert snapshot.step == llm.core.step_count
                assert len(snapshot.requests) <= 2 and snapshot.pool.blocks[0].ref_cnt == 0
        assert set(names) == {"schedule", "update states", "prepare inputs", "forward", "sample", "output"}


@both_runners
def test_finished_requests_stay_visible_if_asked_for(runner: str) -> None:
    llm = make_llm(runner, keep_finished=True)
    try:
        llm.add(ids(*prompt_of(6)), greedy(3), request_id="done")
        llm.add(ids(*prompt_of(7)), greedy(9), request_id="gone")
        for _ in range(6):
            llm.step()
        llm.abort(["gone"])
        views = {view.request_id: view for view in llm.core.snapshot().result().requests}
        assert views["done"].status == "finished" and views["done"].finish_reason == "length"
        assert views["gone"].finish_reason == "abort" and views["gone"].block_ids == ()
    finally:
        llm.close()
