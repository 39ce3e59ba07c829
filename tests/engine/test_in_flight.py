"""What may happen while a step is in flight or between its phases, and must change no token."""

from __future__ import annotations

import pytest

from engine import LLM, RequestOutput, SamplingParams
from engine.hooks import RequestScheduled
from engine.sched_output import SchedulerOutput
from tests.engine.engine_helpers import (
    TraceRequest,
    assert_empty,
    both_loops,
    both_runners,
    greedy,
    ids,
    prompt_of,
    reference,
    run_trace,
    tiny_llm,
    tokens_of,
)
from tests.engine.late_device import device_timing

Tokens = dict[str, tuple[int, ...]]


def finish(llm: LLM, tokens: Tokens | None = None) -> Tokens:
    """Steps to the end; the last tokens of each request."""
    tokens = {} if tokens is None else tokens
    while llm.core.has_unfinished() or llm.core.in_flight:
        note(llm.step(), tokens)
        llm.core.check_integrity()
    return tokens


def note(outputs: list[RequestOutput], tokens: Tokens) -> None:
    tokens |= {output.request_id: output.outputs[0].token_ids for output in outputs}


def right(**prompts_and_counts: tuple[list[int], int]) -> Tokens:
    return {name: reference(prompt, greedy(n)) for name, (prompt, n) in prompts_and_counts.items()}


timings = pytest.mark.parametrize("timing", ["threads", "late"])
some_phases = pytest.mark.parametrize("num_phases", [1, 3, 5])
FIRST, SECOND, THIRD = prompt_of(5), prompt_of(9), prompt_of(14)


# -- buffers that the device has still to read -----------------------------------------------------------------------


@both_runners
def test_a_row_that_moves_in_an_empty_step_leaves_the_step_in_flight_alone(runner: str) -> None:
    """FIRST ends while the last step of both is in flight, so the next step is empty and frees its row. If SECOND's row
    moves into it before the step in flight has copied its block table, FIRST's dead row writes into SECOND's blocks.
    """
    answer = reference(FIRST, greedy(3))
    moved_in_empty_step = []
    with device_timing("late"), tiny_llm(runner, "overlapped", max_num_seqs=2) as llm:
        llm.add(ids(*FIRST), greedy(8, stop_token_ids=(answer[2],)), request_id="first")
        llm.add(ids(*SECOND), greedy(4), request_id="second")
        freed = llm.core.runner.finish_requests

        def seen(scheduled: SchedulerOutput) -> None:
            if not scheduled.total_num_scheduled_tokens:
                moved_in_empty_step.extend(scheduled.finished_req_ids)
            freed(scheduled)

        llm.core.runner.finish_requests = seen
        assert finish(llm) == {"first": answer} | right(second=(SECOND, 4))
        assert "first" in moved_in_empty_step
        # What SECOND left in the cache is read by the next.
        longer = [*SECOND, *reference(SECOND, greedy(4))]
        output = llm.generate(ids(*longer), greedy(6), use_tqdm=False)[0]
        assert output.num_cached_tokens > 0
        assert output.outputs[0].token_ids == reference(longer, greedy(6))


@both_runners
@both_loops
def test_rows_that_are_used_again_at_once(runner: str, loop: str) -> None:
    """One row, many requests: each is written while its predecessor's last step may still be in flight."""
    prompts = [prompt_of(3 + i % 5, i) for i in range(9)]
    with device_timing("late"), tiny_llm(runner, loop, max_num_seqs=1) as llm:
        outputs = llm.generate([ids(*p) for p in prompts], [greedy(1 + i % 3) for i in range(9)], use_tqdm=False)
        assert tokens_of(outputs) == [reference(p, greedy(1 + i % 3)) for i, p in enumerate(prompts)]


@timings
@both_runners
@both_loops
def test_sampling_rows_that_change_while_a_step_is_in_flight(runner: str, loop: str, timing: str) -> None:
    """Greedy, sampled and seeded requests come and go each step, so the sampling slices are sent anew each step."""
    params = [
        SamplingParams(
            temperature=(0, 0.8, 1.3)[i % 3], top_k=(0, 5)[i % 2], seed=i, max_tokens=2 + i % 4, ignore_eos=True
        )
        for i in range(12)
    ]  # fmt: skip
    trace = [TraceRequest(f"r{i}", tuple(prompt_of(4 + i % 3, i)), one, arrival=i // 2) for i, one in enumerate(params)]
    with device_timing(timing), tiny_llm(runner, loop, max_num_seqs=3) as llm:
        result = run_trace(llm, trace)
    with tiny_llm(runner, "plain", enable_prefix_caching=False) as llm:
        for request in trace:
            alone = llm.generate(ids(*request.prompt), request.params, use_tqdm=False)
            assert result.tokens(request.request_id) == alone[0].outputs[0].token_ids


# -- ids that are used again -----------------------------------------------------------------------------------------


@both_runners
@both_loops
@pytest.mark.parametrize("steps", [1, 3])
def test_an_id_is_free_at_once_when_its_request_is_aborted(runner: str, loop: str, steps: int) -> None:
    """The tokens in flight belong to the old request of that name, and so do its row and its blocks."""
    with device_timing("late"), tiny_llm(runner, loop) as llm:
        llm.add(ids(*FIRST), greedy(12), request_id="a")
        llm.add(ids(*THIRD), greedy(7), request_id="b")
        tokens: Tokens = {}
        for _ in range(steps):
            note(llm.step(), tokens)
        llm.abort(["a"])
        tokens.pop("a", None)
        llm.add(ids(*SECOND), greedy(6), request_id="a")
        assert finish(llm, tokens) == right(a=(SECOND, 6), b=(THIRD, 7))
        assert_empty(llm)


@both_runners
@both_loops
def test_an_id_is_free_when_its_request_has_finished(runner: str, loop: str) -> None:
    with tiny_llm(runner, loop) as llm:
        llm.add(ids(*THIRD), greedy(20), request_id="b")
        for prompt, n in ((FIRST, 1), (SECOND, 2), (FIRST, 3)):
            llm.add(ids(*prompt), greedy(n), request_id="a")
            tokens: Tokens = {}
            while "a" in llm.core.scheduler.requests:
                note(llm.step(), tokens)
            assert tokens["a"] == reference(prompt, greedy(n))
        assert finish(llm)["b"] == reference(THIRD, greedy(20))


# -- between the phases of a step ------------------------------------------------------------------------------------


def _advance(llm: LLM, num_phases: int) -> list[str]:
    names = []
    for _, name in zip(range(num_phases), llm.core.phases(), strict=False):
        names.append(name)
    return names


@both_runners
@both_loops
@some_phases
def test_a_step_left_half_way_is_taken_up_by_the_next(runner: str, loop: str, num_phases: int) -> None:
    with device_timing("late"), tiny_llm(runner, loop) as llm:
        llm.add(ids(*FIRST), greedy(6), request_id="a")
        tokens: Tokens = {}
        note(llm.step(), tokens)
        step = llm.core.step_count
        assert len(_advance(llm, num_phases)) == num_phases
        llm.add(ids(*SECOND), greedy(5), request_id="b")
        note(llm.step(), tokens)
        assert llm.core.step_count == step + 1
        assert finish(llm, tokens) == right(a=(FIRST, 6), b=(SECOND, 5))
        assert_empty(llm)


@both_runners
@both_loops
def test_phases_and_steps_may_be_mixed(runner: str, loop: str) -> None:
    """One phase at a time, whole steps, iterators that are thrown away: the same code, the same tokens."""
    with tiny_llm(runner, loop) as llm:
        llm.add(ids(*FIRST), greedy(9), request_id="a")
        llm.add(ids(*THIRD), greedy(9), request_id="b")
        tokens: Tokens = {}
        for turn in range(200):
            if not (llm.core.has_unfinished() or llm.core.in_flight):
                break
            if turn % 7 == 6:
                note(llm.step(), tokens)
            else:
                _advance(llm, 1 + turn % 3)
            note(llm.core.take_outputs(), tokens)
        assert tokens == right(a=(FIRST, 9), b=(THIRD, 9))


@both_runners
@both_loops
@some_phases
@pytest.mark.parametrize("whom", ["old", "new"])
def test_an_abort_between_two_phases(runner: str, loop: str, num_phases: int, whom: str) -> None:
    """Of a request that the step has scheduled: a running one, or one that is new in it."""
    with device_timing("late"), tiny_llm(runner, loop) as llm:
        llm.add(ids(*FIRST), greedy(9), request_id="old")
        tokens: Tokens = {}
        note(llm.step(), tokens)
        llm.add(ids(*SECOND), greedy(8), request_id="new")
        llm.add(ids(*THIRD), greedy(7), request_id="other")
        _advance(llm, num_phases)
        llm.abort([whom])
        # Its blocks go to the next at once, and its name too.
        llm.add(ids(*prompt_of(20, 4)), greedy(6), request_id=whom)
        tokens.pop(whom, None)
        left = {"old": (FIRST, 9), "new": (SECOND, 8), "other": (THIRD, 7)} | {whom: (prompt_of(20, 4), 6)}
        assert finish(llm, tokens) == right(**left)
        assert_empty(llm)


@both_runners
@both_loops
@some_phases
def test_recover_between_two_phases(runner: str, loop: str, num_phases: int) -> None:
    """As after a failure: the step is given up, every request is computed again, and none loses a token."""
    with tiny_llm(runner, loop) as llm:
        llm.add(ids(*FIRST), greedy(9), request_id="a")
        llm.add(ids(*THIRD), greedy(9), request_id="b")
        tokens: Tokens = {}
        for _ in range(3):
            note(llm.step(), tokens)
        _advance(llm, num_phases)
        llm.core.recover()
        note(llm.core.take_outputs(), tokens)
        llm.core.check_integrity()
        assert llm.core.scheduler.kv_cache.usage == 0
        assert finish(llm, tokens) == right(a=(FIRST, 9), b=(THIRD, 9))
        assert_empty(llm)


@both_runners
@both_loops
def test_recover_when_nothing_is_wrong(runner: str, loop: str) -> None:
    with tiny_llm(runner, loop) as llm:
        llm.core.recover()
        assert tokens_of(llm.generate(ids(*FIRST), greedy(5), use_tqdm=False)) == [reference(FIRST, greedy(5))]
        llm.core.recover()
        assert tokens_of(llm.generate(ids(*FIRST), greedy(5), use_tqdm=False)) == [reference(FIRST, greedy(5))]
        assert_empty(llm)


# -- ends while a step is in flight ----------------------------------------------------------------------------------


@timings
@both_runners
@pytest.mark.parametrize("stop_at", [0, 1, 2, 3])
def test_a_stop_token_that_arrives_while_the_next_step_runs(runner: str, timing: str, stop_at: int) -> None:
    """The overlapped loop has computed one token too many; it is dropped, and its blocks are clean for the next."""
    answer = reference(SECOND, greedy(6))
    at = answer.index(answer[stop_at])
    with device_timing(timing), tiny_llm(runner, "overlapped", num_gpu_blocks_override=9) as llm:
        llm.add(ids(*SECOND), greedy(6, stop_token_ids=(answer[stop_at],)), request_id="a")
        llm.add(ids(*FIRST), greedy(11), request_id="b")
        llm.add(ids(*THIRD), greedy(6), request_id="c")
        assert finish(llm) == {"a": answer[: at + 1]} | right(b=(FIRST, 11), c=(THIRD, 6))
        assert_empty(llm)


@timings
@both_runners
@both_loops
def test_requests_that_sit_a_step_out_for_want_of_blocks(runner: str, loop: str, timing: str) -> None:
    """V1 takes their rows away and must fill in, from the host, the tokens that it had only as placeholders."""
    scheduled: list[RequestScheduled] = []
    prompts = {f"r{i}": prompt_of(7, i) for i in range(4)}
    with device_timing(timing), tiny_llm(runner, loop, num_gpu_blocks_override=10, enable_prefix_caching=False) as llm:
        with llm.hooks.subscribe(RequestScheduled, scheduled.append):
            for request_id, prompt in prompts.items():
                llm.add(ids(*prompt), greedy(16), request_id=request_id)
            tokens = finish(llm)
        assert tokens == {name: reference(prompt, greedy(16)) for name, prompt in prompts.items()}
        steps = {name: [e.step for e in scheduled if e.request_id == name and e.kind != "new"] for name in prompts}
        assert any(b - a > 1 for own in steps.values() for a, b in zip(own, own[1:], strict=False))
        assert_empty(llm)
