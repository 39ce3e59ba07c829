"""The measurement against a peer: its workloads, whose turn it is, and its arithmetic."""

from __future__ import annotations

from engine.bench.measure import Result, Timing, agreement, interleave
from engine.bench.workload import Ask, Workload, workloads


def test_workloads_are_what_they_say() -> None:
    one, eight = workloads(lambda text: list(range(len(text.split()))))
    assert [len(ask.prompt_token_ids) for ask in one.asks] == [64] and one.wanted_tokens == 128
    assert len(eight.asks) == 8 and (min(a.max_tokens for a in eight.asks), eight.longest) == (32, 256)
    assert eight.wanted_tokens == 992
    assert len({ask.prompt_token_ids[0] for ask in eight.asks}) == 8


def test_sides_take_turns_and_the_warm_up_does_not_count() -> None:
    calls: list[str] = []

    def side(name: str):
        def run_once(workload: Workload) -> Result:
            calls.append(name)
            return Result(((1, 2, 3),), steps=3)

        return run_once

    workload = Workload("w", (Ask((1,), 3),))
    timings = interleave(workload, {"a": side("a"), "b": side("b")}, 3)
    assert calls == ["a", "b", *("a", "b") * 3]
    assert len(timings["a"].seconds) == 3
    low, high = timings["a"].spread
    assert low <= timings["a"].tokens_per_second <= high


def test_timing_arithmetic() -> None:
    timing = Timing((2.0, 1.0, 4.0), 9.0, steps=100, wanted_tokens=200, token_ids=())
    assert timing.median == 2.0 and timing.tokens_per_second == 100.0 and timing.spread == (50.0, 200.0)
    assert timing.ms_per_step == 20.0 and timing.bandwidth(10**9) == 50.0


def test_agreement_counts_up_to_the_first_difference() -> None:
    assert agreement(((1, 2, 3), (4, 5)), ((1, 9, 3), (4, 5))) == (3, 5)
    assert agreement(((1, 2),), ((1, 2),)) == (2, 2)
