"""Drafts on a CUDA device: captured steps, no host wait inside one, and the answers that there are without drafts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.hooks import DraftVerified, VerificationBudgeted
from tests.engine.dspark.golden import HEADS, golden
from tests.engine.dspark.test_engine import engine
from tests.engine.dspark.test_verification import SCHEDULES, dear_tokens, spec_of, trace_of
from tests.engine.engine_helpers import both_loops, greedy, ids, run_trace

pytestmark = pytest.mark.gpu

SIZES = {"cudagraph_capture_sizes": (1, 2, 5)}
DRAFTERS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3},
    "lookup": {"method": "dspark", "draft": "lookup", "num_speculative_tokens": 3},
    "probabilistic": spec_of("fixed", draft_sample_method="probabilistic")["speculative_config"],
    "block": spec_of("budgeted", rejection_sample_method="block")["speculative_config"],
    **{name: spec_of(name)["speculative_config"] for name in SCHEDULES},
}


@pytest.mark.parametrize("drafter", DRAFTERS)
@both_loops
def test_answers_graphs_and_waits(loop: str, drafter: str) -> None:
    trace = trace_of()
    with engine("vanilla", loop, drafts=False, **SIZES) as llm:
        plain = run_trace(llm, trace)
    with engine("vanilla", loop, speculative_config=DRAFTERS[drafter], **SIZES) as llm:
        runner = llm.core.runner
        assert runner.graphs.work and {size.num_reqs for size in runner.graphs.work} == {1, 2, 5}
        if drafter in ("budgeted", "block"):
            dear_tokens(llm)
        replays: list[Any] = []
        replay = runner.graphs.replay
        runner.graphs.replay = lambda *key: replays.append(key) or replay(*key)
        torch.cuda.set_sync_debug_mode("error")
        try:
            drafted = run_trace(llm, trace)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert llm.core.device.waits.inside_step == {}
    assert len(replays) > 10
    for request in trace:
        assert drafted.tokens(request.request_id) == plain.tokens(request.request_id)
    assert drafter in ("ngram", "lookup") or sum(x.metrics.num_accepted_tokens for x in drafted.outputs.values()) > 2


@pytest.mark.parametrize("head", HEADS)
def test_the_golden_rounds_from_captured_steps(head: str) -> None:
    values = golden(head).values
    prompt, sequence = values["prompt"].tolist(), values["sequence"].tolist()
    accepted = [int(values[f"round{k}.num_accepted"]) for k in range(8)]
    wanted = len(sequence) - len(prompt)
    with engine(head, "overlapped", **SIZES) as llm:
        (output,) = llm.generate(ids(*prompt), greedy(wanted + 6), use_tqdm=False)
    assert list(output.outputs[0].token_ids)[:wanted] == sequence[len(prompt) :]
    assert list(output.metrics.accepted_per_round[:8]) == accepted


def test_watched_drafts_are_those_of_the_captured_step() -> None:
    """Who watches drafts gets steps launched piece by piece, with the same budget's choice and the same answers."""
    prompt, outputs, events = golden("vanilla").sequence[:9], [], []
    with engine("vanilla", "overlapped", **spec_of("budgeted"), **SIZES) as llm:
        dear_tokens(llm)  # measured beside other work, steps can come out so that no draft pays
        outputs += llm.generate(ids(*prompt), greedy(30), use_tqdm=False)
        with llm.hooks.subscribe((DraftVerified, VerificationBudgeted), events.append):
            outputs += llm.generate(ids(*prompt), greedy(30), use_tqdm=False)
    assert outputs[0].outputs[0].token_ids == outputs[1].outputs[0].token_ids
    assert {type(event) for event in events} == {DraftVerified, VerificationBudgeted}
