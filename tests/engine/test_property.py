"""Random request traces: both runners, both loops, any timing of the device give the tokens of each request run alone.

After each step the books of scheduler, blocks and rows must agree, and on the real device a snapshot must be the truth.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import LLM, SamplingParams
from tests.engine.engine_helpers import (
    LOOPS,
    RUNNERS,
    TraceRequest,
    close,
    make_llm,
    reference,
    run_trace,
    tiny_model,
)
from tests.engine.late_device import device_timing
from tests.engine.snapshot_truth import assert_truthful

pytestmark = pytest.mark.slow  # many traces


def fixed(max_examples: int) -> settings:
    """The same traces again when somebody looks at a red run, on every machine."""
    return settings(derandomize=True, deadline=None, max_examples=max_examples)


# A few openings, so that prefixes are shared.
OPENINGS = ((), (7, 8, 9, 10), (7, 8, 9, 10, 11, 12, 13, 14), (7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17))


@st.composite
def params(draw: st.DrawFn) -> SamplingParams:
    max_tokens = draw(st.integers(1, 14))
    return SamplingParams(
        temperature=0, max_tokens=max_tokens, min_tokens=draw(st.integers(0, max_tokens)),
        # A tenth of the vocabulary: some request stops at each turn.
        stop_token_ids=range_set(draw(st.sampled_from((0, 0, 40))), draw(st.integers(3, 300))),
        ignore_eos=draw(st.booleans()), logprobs=draw(st.sampled_from((None, None, 0, 3))),
    )  # fmt: skip


def range_set(count: int, first: int) -> tuple[int, ...]:
    return tuple(range(first, first + count))


@st.composite
def traces(draw: st.DrawFn) -> tuple[list[TraceRequest], dict[str, Any]]:
    block_size = draw(st.sampled_from((1, 2, 3, 4)))
    trace = []
    for index in range(draw(st.integers(3, 7))):
        opening = draw(st.sampled_from(OPENINGS))
        rest = draw(st.lists(st.integers(3, 383), min_size=1, max_size=12))
        trace.append(TraceRequest(
            f"r{index}", (*opening, *rest), draw(params()), arrival=draw(st.integers(0, 6)),
            abort_at=draw(st.sampled_from((None, None, None, 1, 4, 9))), priority=draw(st.integers(0, 2)),
        ))  # fmt: skip
    longest = max(len(request.prompt) + request.params.max_tokens - 1 for request in trace)
    max_num_seqs = draw(st.integers(1, 6))
    budget = draw(st.one_of(st.integers(max_num_seqs, 40), st.just(40)))
    return trace, {
        # What the longest request needs and little more, so that the others are preempted for it.
        "block_size": block_size, "num_gpu_blocks_override": 1 + -(-longest // block_size) + draw(st.integers(0, 4)),
        "max_num_seqs": max_num_seqs, "max_model_len": 40, "max_num_batched_tokens": budget,
        "enable_chunked_prefill": budget < 40 or draw(st.booleans()),
        "enable_prefix_caching": draw(st.booleans()), "scheduling_policy": draw(st.sampled_from(("fcfs", "priority"))),
        "cudagraph_capture_sizes": draw(st.sampled_from(((), (2, 4)))),
    }  # fmt: skip


def check(llm: LLM, trace: list[TraceRequest], model: str, look: bool) -> tuple[int, int]:
    result = run_trace(llm, trace, after_step=assert_truthful if look else None)
    for request in trace:
        right = reference(request.prompt, request.params, model)
        tokens = result.tokens(request.request_id)
        output = result.outputs.get(request.request_id)
        if request.abort_at is None:
            assert tokens == right, f"{request.request_id}: {tokens}, alone it is {right}"
            assert output is not None and output.finished
        else:
            assert tokens == right[: len(tokens)], f"{request.request_id}: {tokens} is no beginning of {right}"
        if output is not None and request.params.logprobs is not None:
            assert len(output.outputs[0].logprobs) == len(tokens)
    return result.num_preemptions, result.num_cached_tokens


@pytest.mark.parametrize("max_examples", [10, pytest.param(60, marks=pytest.mark.slow)])
@pytest.mark.parametrize("timing", ["threads", "late"])
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("runner", RUNNERS)
def test_any_trace_gives_the_tokens_of_each_request_alone(
    runner: str, loop: str, timing: str, max_examples: int
) -> None:
    seen = {"preemptions": 0, "hits": 0}

    @fixed(max_examples)
    @given(traces(), st.sampled_from(("tiny-llama", "tiny-qwen3")))
    def run(case: tuple[list[TraceRequest], dict[str, Any]], model: str) -> None:
        trace, config = case
        if runner == "v1":
            config = config | {"cudagraph_capture_sizes": ()}
        with device_timing(timing):
            llm = make_llm(runner, loop, tiny_model(model), **config)
        try:
            num_preemptions, num_hits = check(llm, trace, model, look=timing == "threads")
        finally:
            close(llm)
        seen["preemptions"] += num_preemptions
        seen["hits"] += num_hits

    run()
    # The traces must have been hard enough to mean something.
    assert seen["preemptions"] > 0 and seen["hits"] > 0, seen
