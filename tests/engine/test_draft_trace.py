"""Watched drafts: the same tokens as unwatched ones, no host wait more, and p, q and u are what decided."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch

from engine import LLM, SamplingParams
from engine.hooks import DRAFT_EVENTS, DraftProposed, DraftVerified, Event, Sampled
from engine.sample.draft_trace import draft_tensors, padded_drafts, padded_rows, read_draft_traces
from tests.engine.drafters import SIDES
from tests.engine.dspark.golden import HEADS, ROOT, golden
from tests.engine.engine_helpers import TraceRequest, greedy, ids, prompt_of, run_trace, tiny_llm
from tests.engine.test_sync_budget import counting_steps

pytestmark = pytest.mark.slow

REPEATING = (prompt_of(5, 1) * 6)[:26]
# So few tokens are allowed that a text repeats itself.
FEW: dict[str, Any] = {"allowed_token_ids": [5, 6, 7], "max_tokens": 24, "ignore_eos": True}
TRACE = [
    TraceRequest("greedy", tuple(REPEATING), SamplingParams(temperature=0, **FEW)),
    TraceRequest("drawn", tuple(REPEATING[3:]), SamplingParams(temperature=0.8, seed=3, **FEW)),
    TraceRequest("late", tuple(REPEATING[:9]), SamplingParams(top_k=2, seed=5, logprobs=1, **FEW), 3),
    TraceRequest("stops", tuple(REPEATING[1:]), SamplingParams(seed=1, stop_token_ids=(7,), min_tokens=9, **FEW), 1),
]
FEW_BLOCKS = {"num_gpu_blocks_override": 26, "max_num_batched_tokens": 19}


def ngram(**rule: Any) -> dict[str, Any]:
    spec = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    return {"speculative_config": spec | rule}


SYNTHETIC = {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [0.8, 0.5, 0.2]}


def watched(runner: str, loop: str, types: Any = DRAFT_EVENTS, **config: Any) -> tuple[Any, list[Any], dict[str, int]]:
    """The run, its events, and its waits inside steps."""
    events: list[Event] = []
    with tiny_llm(runner, loop, **FEW_BLOCKS, **config) as llm:
        with llm.hooks.subscribe(types, events.append) if types else nullcontext(), counting_steps(llm) as counts:
            result = run_trace(llm, TRACE)
        if runner == "v2":
            assert counts == Counter(), "a runner V2 that is watched waits for nothing"
        assert llm.hooks.errors == []
        return result, events, dict(llm.core.device.waits.inside_step)


def pairs(events: list[Any]) -> list[tuple[DraftProposed, DraftVerified]]:
    """Every round, in order; each is told whole."""
    told = [event for event in events if isinstance(event, DRAFT_EVENTS)]
    for one, other in zip(told[::2], told[1::2], strict=True):
        assert (type(one), type(other)) == (DraftProposed, DraftVerified)
        assert (one.request_id, one.position, one.verified_in_step) == (
            other.request_id, other.position, other.verified_in_step,
        )  # fmt: skip
    return list(zip(told[::2], told[1::2], strict=True))


@pytest.mark.parametrize(("runner", "loop"), SIDES)
def test_watching_changes_no_token_and_adds_no_wait(runner: str, loop: str) -> None:
    seen, _, waits = watched(runner, loop, **ngram())
    alone, nothing, waits_alone = watched(runner, loop, None, **ngram())
    assert nothing == [] and alone.num_preemptions > 0, "the case is meant to have a request that comes back"
    for request in TRACE:
        assert seen.tokens(request.request_id) == alone.tokens(request.request_id)
    assert waits == waits_alone


@pytest.mark.parametrize(("runner", "loop"), SIDES)
def test_a_round_tells_the_tokens_that_came_of_it(runner: str, loop: str) -> None:
    result, events, _ = watched(runner, loop, (Sampled, *DRAFT_EVENTS), **ngram())
    sampled = {(e.request_id, e.position): e for e in events if isinstance(e, Sampled)}
    accepted: dict[str, list[int]] = {}
    for proposed, verified in pairs(events):
        k = len(proposed.token_ids)
        assert 1 <= k <= 3 and proposed.confidences is None
        assert {len(x) for x in (proposed.draft_probs, verified.target_probs, verified.uniforms)} == {k}
        stand = (*proposed.token_ids[: verified.num_accepted], verified.next_token_id)
        came = [
            event.token_id
            for j in range(len(stand))
            if (event := sampled.get((proposed.request_id, proposed.position + j)))
            and event.sampled_in_step == verified.verified_in_step
        ]
        assert came and tuple(came) == stand[: len(came)]
        request = result.outputs[proposed.request_id]
        ended = proposed.position + len(came) == len(request.prompt_token_ids) + len(request.outputs[0].token_ids)
        assert len(came) == len(stand) or ended, "only an end drops a part of a round"
        accepted.setdefault(proposed.request_id, []).append(verified.num_accepted)
    assert set(accepted) == {request.request_id for request in TRACE}
    assert sum(map(sum, accepted.values())) > 5 and min(map(min, accepted.values())) == 0
    for request_id, metrics in ((r, output.metrics) for r, output in result.outputs.items()):
        assert metrics.num_drafts >= len(accepted[request_id])


@pytest.mark.parametrize(
    "rule", [{}, {"rejection_sample_method": "block"}, SYNTHETIC], ids=["standard", "block", "syn"]
)
@pytest.mark.parametrize(("runner", "loop"), [("v1", "plain"), ("v2", "overlapped")])
def test_p_q_and_u_are_what_decided(runner: str, loop: str, rule: dict[str, Any]) -> None:
    _, events, _ = watched(runner, loop, **ngram(**rule))
    method, unsure = rule.get("rejection_sample_method", "standard"), 0
    for proposed, verified in pairs(events):
        p, q, u = verified.target_probs, proposed.draft_probs, verified.uniforms
        assert verified.method == method
        assert all(0 <= x <= 1 for x in (*p, *q)) and all(0 <= x < 1 for x in u)
        assert q == (1.0,) * len(q), "a draft that was looked up was not drawn"
        if proposed.request_id == "greedy":
            assert set(p) <= {0.0, 1.0}
        else:
            unsure += any(0 < x < 1 for x in p)
        if method == "standard":
            passed = [x * y < z for x, y, z in zip(u, q, p, strict=True)]
        elif method == "synthetic":  # conditional rates of the unconditional 0.8, 0.5, 0.2
            passed = [x < rate for x, rate in zip(u, (0.8, 0.5 / 0.8, 0.2 / 0.5), strict=False)]
        else:
            continue
        assert verified.num_accepted == (passed + [False]).index(False)
    assert unsure > 0


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("loop", ["plain", "overlapped"])
def test_a_drafter_with_confidences_tells_those_of_the_drafts(head: str, loop: str) -> None:
    values, events = golden(head).values, []
    llm = LLM(
        str(ROOT / head / "target"), dtype="float32", skip_tokenizer_init=True, async_scheduling=loop == "overlapped",
        max_model_len=96, max_num_seqs=5, max_num_batched_tokens=64, num_gpu_blocks_override=200, block_size=4,
        speculative_config={"method": "dspark", "model": str(ROOT / head / "draft")},
    )  # fmt: skip
    wanted = len(values["sequence"]) - len(values["prompt"])
    try:
        with llm.hooks.subscribe(DRAFT_EVENTS, events.append):
            llm.generate(ids(*values["prompt"].tolist()), greedy(wanted + 20), use_tqdm=False)
        assert llm.core.device.waits.inside_step == {}
    finally:
        llm.close()
    for k, (proposed, verified) in enumerate(pairs(events)[:8]):
        assert list(proposed.token_ids) == values[f"round{k}.draft_tokens"].tolist()
        assert verified.num_accepted == int(values[f"round{k}.num_accepted"])
        assert proposed.confidences is not None
        golden_values = torch.sigmoid(values[f"round{k}.confidence_logits"].float()).flatten().tolist()
        assert proposed.confidences == pytest.approx(golden_values, abs=1e-4)


def test_only_who_names_the_events_gets_them() -> None:
    with tiny_llm("v2", **ngram()) as llm:
        with llm.hooks.subscribe(Event, lambda event: None):
            assert not llm.hooks.wants(DRAFT_EVENTS)
        with llm.hooks.subscribe(DraftVerified, lambda event: None):
            assert llm.hooks.wants(DRAFT_EVENTS) and DraftProposed not in llm.hooks.wanted


@pytest.mark.parametrize("confident", [False, True])
def test_rows_without_drafts_and_discarded_rows_have_no_round(confident: bool) -> None:
    # Four requests with 2, 0, 2 and 1 drafts; the third's second draft is none, the fourth is still in its prompt.
    token_ids = torch.tensor([9, 20, 21, 9, 9, 30, -1, 9, 40], dtype=torch.int32)
    cu_num_logits = torch.tensor([0, 3, 4, 7, 9], dtype=torch.int32)
    drafts = padded_drafts(token_ids, cu_num_logits, 2)
    assert drafts.tolist() == [[20, 21], [-1, -1], [30, -1], [40, -1]]
    p = padded_rows(torch.arange(9) / 8, cu_num_logits, 2)
    confidences = torch.full((4, 3), 0.25) if confident else None
    ((name, tensor),) = draft_tensors("block", drafts, p, p / 2, p / 4, confidences).items()
    sampled = np.array([[20, 7, -1], [5, -1, -1], [30, 8, -1], [-1, -1, -1]])
    traces = read_draft_traces(
        {"sampled": sampled, name: tensor.numpy()}, list("abcd"), sampled, np.array([2, 1, 2, 0])
    )
    assert traces is not None and set(traces) == {"a", "c"}
    first, third = traces["a"], traces["c"]
    assert (first.method, first.token_ids, first.num_accepted, first.next_token_id) == ("block", (20, 21), 1, 7)
    assert (first.target_probs, first.draft_probs, first.uniforms) == ((0.0, 0.125), (0.0, 0.0625), (0.0, 0.03125))
    assert (third.token_ids, third.target_probs, third.num_accepted, third.next_token_id) == ((30,), (0.5,), 1, 8)
    assert (first.confidences, third.confidences) == (((0.25, 0.25), (0.25,)) if confident else (None, None))
    assert read_draft_traces({"sampled": sampled}, list("abcd"), sampled, np.array([2, 1, 2, 0])) is None
