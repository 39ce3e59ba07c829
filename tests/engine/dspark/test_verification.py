"""Schedules of verification inside the engine: the answers, the sizes of steps, and the law of the output."""

from __future__ import annotations

import itertools
from collections import Counter
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from engine import LLM, ConfigError, SamplingParams
from engine.dspark.costs import CostTable
from engine.dspark.schedule import Budgets
from engine.hooks import DraftVerified, Event, InputsPrepared, VerificationBudgeted
from engine.snapshot import speculation_view
from tests.engine.dspark.golden import ROOT, golden
from tests.engine.dspark.test_engine import MODEL, engine
from tests.engine.engine_helpers import TraceRequest, both_loops, greedy, ids, prompt_of, run_trace
from tests.engine.replays import repeat_instead_of_capture

pytestmark = pytest.mark.slow

SCHEDULES: dict[str, dict[str, Any]] = {
    "fixed": {},
    "threshold": {"verification_schedule": "threshold", "confidence_threshold": 0.2},
    "early_stop": {"verification_schedule": "early_stop"},
    "budgeted": {"verification_schedule": "budgeted"},
}
SIZES = (1, 2, 5)
NUM_DRAFTS = 5


def spec_of(schedule: str, **more: Any) -> dict[str, Any]:
    return {
        "speculative_config": {"method": "dspark", "model": str(ROOT / "vanilla" / "draft")}
        | SCHEDULES[schedule]
        | more
    }


def dear_tokens(llm: LLM) -> None:
    """As if a step cost as much as its tokens, which makes budgets small; how long a step takes here is nothing to
    assert on."""
    verification = llm.core.runner.speculation.verification
    sizes = tuple(range(1, 80))
    table = CostTable(sizes, tuple(400.0 + 40.0 * n for n in sizes))
    verification._budgets = Budgets(dict.fromkeys(range(1, 6), table))
    rates = torch.tensor([1e6 / cost for cost in table.up_to(len(verification._steps_per_second) - 1)])
    verification._steps_per_second.copy_(rates)


def trace_of(count: int = 8) -> list[TraceRequest]:
    vocab, sequence = golden("vanilla").target.config.vocab_size, golden("vanilla").sequence
    prompts = [sequence[:length] for length in (3, 9, 14, 20)]
    prompts += [[token % vocab for token in prompt_of(length, length)] for length in (5, 12, 19, 30)]
    return [TraceRequest(f"r{i}", tuple(prompt), greedy(20 + i), i % 5) for i, prompt in enumerate(prompts[:count])]


@pytest.mark.parametrize("captured", [False, True], ids=["piece by piece", "replayed"])
@pytest.mark.parametrize("schedule", SCHEDULES)
@both_loops
def test_greedy_answers_are_those_without_drafts(
    loop: str, schedule: str, captured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = trace_of()
    with engine("vanilla", loop, drafts=False) as llm:
        plain = run_trace(llm, trace)
    sizes = {}
    if captured:
        pools = repeat_instead_of_capture(monkeypatch)
        sizes = {"cudagraph_capture_sizes": SIZES}
    with engine("vanilla", loop, **spec_of(schedule), **sizes) as llm:
        dear_tokens(llm)
        seen: list[Event] = []
        with llm.hooks.subscribe(VerificationBudgeted, seen.append):
            drafted = run_trace(llm, trace)
        assert llm.core.device.waits.inside_step == {}
    for request in trace:
        assert drafted.tokens(request.request_id) == plain.tokens(request.request_id)
    assert sum(output.metrics.num_accepted_tokens for output in drafted.outputs.values()) > 2
    assert not captured or pools[-1].num_replays > 20
    budgets = [event.budget for event in seen]
    if schedule == "budgeted":
        assert len(set(budgets)) > 2 and all(event.budget <= NUM_DRAFTS * 5 for event in seen)
        # The first rounds know no confidences; what is expected later is more than a token a request.
        known = [event for event in seen if event.expected_tokens is not None]
        assert known and all(event.expected_tokens >= event.num_reqs for event in known)
    else:
        assert budgets == []


@pytest.mark.parametrize("schedule", ["threshold", "early_stop", "budgeted"])
def test_a_schedule_verifies_less(schedule: str) -> None:
    """Of the same text: fewer drafts are judged, and those that are left out are the ones behind."""
    sequence = golden("vanilla").sequence
    judged: dict[str, list[DraftVerified]] = {}
    for name in ("fixed", schedule):
        with engine("vanilla", "plain", **spec_of(name)) as llm:
            dear_tokens(llm)
            judged[name] = []
            with llm.hooks.subscribe(DraftVerified, judged[name].append):
                llm.generate([ids(*sequence[:9]), ids(*sequence[:14])], greedy(30), use_tqdm=False)
    lengths = {name: [len(event.uniforms) for event in events] for name, events in judged.items()}
    assert max(lengths["fixed"]) == NUM_DRAFTS
    assert 0 < np.mean(lengths[schedule]) < np.mean(lengths["fixed"]) - 0.5


@pytest.mark.parametrize("captured", [False, True], ids=["piece by piece", "replayed"])
def test_a_budget_makes_the_step_smaller(captured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {}
    if captured:
        repeat_instead_of_capture(monkeypatch)
        sizes = {"cudagraph_capture_sizes": SIZES}
    with engine("vanilla", "overlapped", **spec_of("budgeted"), **sizes) as llm:
        dear_tokens(llm)
        seen: list[Event] = []
        with llm.hooks.subscribe(VerificationBudgeted, seen.append), llm.hooks.subscribe(InputsPrepared, seen.append):
            llm.generate([ids(*golden("vanilla").sequence[:9])], greedy(40), use_tqdm=False)
    pairs = [(a, b) for a, b in itertools.pairwise(seen) if isinstance(a, VerificationBudgeted)]
    budgets = [budget.budget for budget, _ in pairs]
    for budget, inputs in pairs:
        assert isinstance(inputs, InputsPrepared)
        assert inputs.num_tokens_padded == 1 + budget.budget or (not captured and inputs.num_tokens < 1 + NUM_DRAFTS)
    assert min(budgets) < NUM_DRAFTS


@pytest.mark.parametrize("captured", [False, True], ids=["piece by piece", "replayed"])
def test_a_budget_holds_beside_prompts(captured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt comes while another request has drafts: some of them are verified in the step that computes it."""
    sizes = {}
    if captured:
        repeat_instead_of_capture(monkeypatch)
        sizes = {"cudagraph_capture_sizes": SIZES}
    sequence = golden("vanilla").sequence
    first, second = ids(*sequence[:9]), ids(*sequence[4:18])
    with engine("vanilla", "plain", **spec_of("budgeted"), **sizes) as llm:
        dear_tokens(llm)
        seen: list[Event] = []
        outputs = {}
        llm.add(first, greedy(40))
        with llm.hooks.subscribe(VerificationBudgeted, seen.append), llm.hooks.subscribe(InputsPrepared, seen.append):
            for step in range(100):
                if step == 6:
                    llm.add(second, greedy(20))
                outputs |= {output.request_id: output for output in llm.step() if output.finished}
                if len(outputs) == 2:
                    break
    beside = [(a, b) for a, b in itertools.pairwise(seen) if isinstance(a, VerificationBudgeted) and a.num_tokens == 15]
    assert len(beside) == 1
    budget, inputs = beside[0]
    assert isinstance(budget, VerificationBudgeted) and isinstance(inputs, InputsPrepared)
    assert (budget.num_reqs, budget.num_drafts) == (1, NUM_DRAFTS) and budget.budget < NUM_DRAFTS
    assert inputs.num_tokens == 15 + budget.budget
    with engine("vanilla", "plain") as llm:
        expected = llm.generate([first, second], [greedy(40), greedy(20)], use_tqdm=False)
    got = [outputs[request_id].outputs[0].token_ids for request_id in sorted(outputs)]
    assert got == [output.outputs[0].token_ids for output in expected]


def test_costs_are_measured_at_start() -> None:
    with engine("vanilla", "plain", **spec_of("budgeted")) as llm:
        view = speculation_view(llm.core)
    assert view is not None
    assert (view.method, view.num_drafts, view.verification_schedule, view.calibration) == (
        "dspark", NUM_DRAFTS, "budgeted", None,
    )  # fmt: skip
    tables = {of.num_reqs: of.table for of in view.step_costs}
    assert set(tables) == {1, 5}
    assert tables[1].sizes == (1, 2, 4, 6) and tables[5].sizes == (5, 10, 20, 30)
    assert all(0 < cost < 60e6 for table in tables.values() for cost in table.costs)


PAIRS = 2500
ROOMY = {"max_num_seqs": 50, "max_num_batched_tokens": 512, "num_gpu_blocks_override": 700}


def endings(llm: LLM, seed: int) -> Counter:
    """How often which three tokens follow the first sampled one behind one prompt. A seed serves `n` requests, the next
    is far from it."""
    found: Counter = Counter()
    for i in range(PAIRS // 50):
        params = SamplingParams(temperature=0.7, top_k=4, n=50, max_tokens=4, seed=seed + 1000 * i, ignore_eos=True)
        (output,) = llm.generate([ids(*golden("vanilla").sequence[:9])], params, use_tqdm=False)
        found.update(tuple(completion.token_ids[1:4]) for completion in output.outputs)
    return found


@cache
def endings_without_drafts() -> Counter:
    with engine("vanilla", "overlapped", drafts=False, **ROOMY) as llm:
        return endings(llm, 1000)


@pytest.mark.parametrize("method", ["greedy", "probabilistic"])
@pytest.mark.parametrize("schedule", ["threshold", "early_stop", "budgeted"])
def test_the_output_has_the_targets_law(schedule: str, method: str) -> None:
    plain = endings_without_drafts()
    with engine("vanilla", "overlapped", **spec_of(schedule, draft_sample_method=method), **ROOMY) as llm:
        dear_tokens(llm)
        drafted = endings(llm, 500)
    common = [key for key, n in (plain + drafted).items() if n >= 20]
    a, b = (np.array([*(of[key] for key in common), PAIRS - sum(of[key] for key in common)]) for of in (plain, drafted))
    statistic, freedom = float(((a - b) ** 2 / np.maximum(a + b, 1)).sum()), len(a) - 1
    assert freedom > 20
    assert statistic < freedom + 5 * (2 * freedom) ** 0.5, (statistic, freedom)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"verification_schedule": "paper"}, "possible are"),
        ({"verification_schedule": "threshold"}, "needs one from 0 to 1"),
        ({"confidence_threshold": 0.2}, "no other takes it"),
        ({"verification_schedule": "threshold", "confidence_threshold": 2}, "possible are 0"),
    ],
)
def test_bad_schedules(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM("tiny-llama", speculative_config={"method": "dspark", "model": "x", **values})


def test_a_drafter_without_confidences_is_refused() -> None:
    spec = {"method": "ngram", "num_speculative_tokens": 3, "verification_schedule": "budgeted"}
    with pytest.raises(ConfigError, match="have no confidences"):
        LLM("tiny-llama", speculative_config=spec)


assert MODEL["max_num_seqs"] == SIZES[-1]
