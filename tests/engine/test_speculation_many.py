"""A hundred prompts with every way of drafting, on both runners: few blocks, chunks, prefix hits and stops."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.drafters import OTHERS, SIDES, ngram, one_head, repeating
from tests.engine.engine_helpers import TraceRequest, greedy, prompt_of, reference, run_trace, tiny_llm

pytestmark = pytest.mark.slow


def requests() -> list[TraceRequest]:
    """A third repeat themselves, a third begin like an earlier one, and every fifth stops at a token it will say."""
    trace = []
    for i in range(100):
        prompt = repeating(8 + i % 20, i) if i % 3 == 0 else prompt_of(3 + i % 17, i)
        if i % 3 == 1 and trace:
            prompt = [*trace[i // 2].prompt[:12], *prompt[:6]]
        params = greedy(6 + i % 13)
        if i % 5 == 0:
            said = reference(prompt, params)
            params = greedy(6 + i % 13, stop_token_ids=[said[len(said) // 2]])
        trace.append(TraceRequest(f"r{i}", tuple(prompt), params, arrival=i // 6))
    return trace


@pytest.mark.parametrize(("runner", "loop", "spec"), [*((*side, ngram) for side in SIDES), *OTHERS])
def test_a_hundred_answers_are_those_without_drafts(runner: str, loop: str, spec: Any) -> None:
    trace = requests()
    scarce = {"num_gpu_blocks_override": 24, "max_num_batched_tokens": 24}
    with tiny_llm(runner, loop, **spec(3), **scarce) as llm:
        result = run_trace(llm, trace)
        llm.core.check_integrity()
    assert result.num_preemptions > 0 and result.num_cached_tokens > 0
    for request in trace:
        assert result.tokens(request.request_id) == reference(request.prompt, request.params)
    ended = [output.outputs[0].finish_reason for output in result.outputs.values()]
    assert ended.count("stop") >= 20 and ended.count("length") > 50
    accepted = sum(output.metrics.num_accepted_tokens for output in result.outputs.values())
    assert accepted > (0 if spec is one_head else 20), "a head of random weights is seldom right"
