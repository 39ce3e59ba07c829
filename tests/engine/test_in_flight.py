"""What may happen while a step is in flight or between its phases, and must change no token."""

from __future__ import annotations

import pytest

from engine import LLM, SamplingParams
from tests.engine.engine_helpers import (
    EOS,
    TraceRequest,
    assert_empty,
    both_loops,
    both_runners,
    device_timing,
    greedy,
    ids,
    make_llm,
    prompt_of,
    reference,
    run_trace,
    tiny_llm,
    tokens_of,
)


def finish(llm: LLM) -> dict[str, tuple[int, ...]]:
    tokens = {}
    while llm.core.has_unfinished() or llm.core.in_flight:
        for output in llm.step():
            tokens[output.request_id] = output.outputs[0].token_ids
        llm.core.check_integrity()
    return tokens


@both_runners
def test_a_row_that_moves_in_an_empty_step_leaves_the_step_in_flight_alone(runner: str) -> None:
    """`first` ends while the last step of both is in flight, so the next step is empty and frees its row."""
    first, second = prompt_of(5), prompt_of(9)
    right = reference(first, greedy(3))
    with device_timing("late"), tiny_llm(runner, "overlapped", max_num_seqs=2) as llm:
        llm.add(ids(*first), greedy(8, stop_token_ids=(right[2],)), request_id="first")
        llm.add(ids(*second), greedy(4), request_id="second")
        empty_steps_with_rows_freed = 0
        tokens = {}
        while llm.core.has_unfinished():
            for output in llm.step():
                tokens[output.request_id] = output.outputs[0].token_ids
            running = llm.core.scheduler.running
            empty_steps_with_rows_freed += len(running) == 1 and running[0].num_output_placeholders == 0
        assert tokens["first"] == right and tokens["second"] == reference(second, greedy(4))
        # What `second` left in the cache is read by `third`.
        third = [*second, *tokens["second"]]
        output = llm.generate(ids(*third), greedy(6), use_tqdm=False)[0]
        assert output.num_cached_tokens > 0
        assert output.outputs[0].token_ids == reference(third, greedy(6))


