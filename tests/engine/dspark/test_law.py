"""The law of the output: drawn drafts of a real draft, every schedule, both rejection rules, the kernels of the engine.

One context, many requests that differ in their seeds only. All of them are one batch, so a schedule that looks at other
requests does.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace

import pytest
import torch

from engine.dspark.schedule import early_stop_lengths, fixed_lengths, survival, threshold_lengths, top_budget_lengths
from engine.dspark.target import prefill_with_hidden
from engine.spec_decode import DraftSampler
from kernels import noise
from kernels.rejection import DraftedBatch, rejection_sample
from tests.engine.dspark.golden import golden
from tests.engine.dspark.paged import PagedLoop, Request

REQUESTS, BATCHES, K, TEMPERATURE = 10_000, 10, 2, 2.5
WARM, ROWS = torch.full((REQUESTS,), TEMPERATURE), torch.arange(REQUESTS, dtype=torch.int32)
Schedule = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture(autouse=True)
def few_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise, "LANES", 64)  # 256 tokens need no tile of 1,024


@cache
def context() -> tuple[PagedLoop, torch.Tensor, torch.Tensor]:
    """A loop that has drafted its first block, and the target's logits behind the anchor [V], and behind each token
    there [V, V]."""
    given = golden("vanilla")
    loop = PagedLoop(given.target, given.config, given.weights)
    request = Request(given.values["prompt"].tolist(), list(range(1, 20)))
    loop.step([request])
    rows, vocab = [], given.target.config.vocab_size
    for begin in range(0, vocab, 64):
        texts = [[*request.tokens, token] for token in range(begin, begin + 64)]
        last, _ = prefill_with_hidden(given.target, texts, given.config.target_layer_ids)
        rows += [states[-2:] for states in last]
    logits = given.target.compute_logits(torch.cat(rows)).view(vocab, 2, vocab)
    return loop, logits[0, 0] / TEMPERATURE, logits[:, 1] / TEMPERATURE


@dataclass
class Batch:
    """Drafts i64 [requests, K], what they were drawn from, their confidences before the sigmoid, and the seeds."""

    tokens: torch.Tensor
    logits: torch.Tensor
    confidences: torch.Tensor
    seeds: torch.Tensor


@cache
def draft(batch: int) -> Batch:
    loop, _, _ = context()
    rows = SimpleNamespace(temperature=WARM, seeds=torch.arange(REQUESTS) + 1_000_003 * batch)
    step = SimpleNamespace(idx_mapping=ROWS, rows=rows)
    sampler = DraftSampler("probabilistic", REQUESTS, K, loop.target.config.vocab_size, torch.device("cpu"), "torch")
    hidden, inputs = loop.drafter.hidden.expand(REQUESTS, -1, -1), loop.drafter.inputs
    anchors = inputs.input_ids[:1].long().expand(REQUESTS)
    positions = inputs.positions.expand(REQUESTS, -1)
    found = loop.drafter.propose(hidden, anchors, positions, K, (sampler, step))
    assert found.confidence_logits is not None and sampler.logits is not None
    return Batch(found.tokens, sampler.logits, found.confidence_logits, rows.seeds)


def output_of(schedule: Schedule, method: str, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """First output tokens [requests], and second ones, -1 where the round gave one token only."""
    _, first_logits, second_logits = context()
    loop, _, _ = context()
    drafts = draft(batch)
    lengths = schedule(torch.sigmoid(drafts.confidences))
    cu = torch.cat((torch.zeros(1, dtype=torch.int32), (lengths + 1).cumsum(0, dtype=torch.int32)))
    kept = torch.arange(K + 1) <= lengths.unsqueeze(1)
    ids = torch.cat((torch.zeros(REQUESTS, 1, dtype=torch.int64), drafts.tokens), 1)
    # Behind two accepted drafts comes a bonus token that this test doesn't look at.
    target = torch.zeros(REQUESTS, K + 1, first_logits.shape[0])
    target[:, 0], target[:, 1] = first_logits, second_logits[drafts.tokens[:, 0]]
    places = loop.drafter.inputs.positions[: K + 1].expand(REQUESTS, -1) + 1
    judged = DraftedBatch(ROWS, cu, ids[kept], places[kept], K)
    out = rejection_sample(target[kept], drafts.logits, judged, WARM, drafts.seeds, method=method)
    second = torch.where(out.num_sampled > 1, out.sampled[:, 1], -1)
    return out.sampled[:, 0], second


def deviations(schedule: Schedule, method: str) -> tuple[float, float]:
    """Chi-square of the first tokens against the target's law, in standard deviations; and of the second ones, each
    against the law behind its own first token."""
    _, first_logits, second_logits = context()
    p, behind = first_logits.softmax(-1), second_logits.softmax(-1)
    seen, seen_second, expected_second, variance = (torch.zeros(p.shape) for _ in range(4))
    for batch in range(BATCHES):
        first, second = output_of(schedule, method, batch)
        seen += torch.bincount(first, minlength=len(p))
        has = second >= 0
        seen_second += torch.bincount(second[has], minlength=len(p))
        laws = behind[first[has]]
        expected_second += laws.sum(0)
        variance += (laws * (1 - laws)).sum(0)
    expected = p * REQUESTS * BATCHES
    likely = expected >= 5
    first_score = ((seen - expected)[likely].square() / expected[likely]).sum() - likely.sum()
    likely_second = variance >= 5
    # Of its own law each count has this variance; neighbours are only weakly tied.
    scores = (seen_second - expected_second)[likely_second].square() / variance[likely_second]
    second_score = scores.sum() - likely_second.sum()
    return float(first_score / (2 * likely.sum()) ** 0.5), float(second_score / (2 * likely_second.sum()) ** 0.5)


def median_confidence() -> float:
    return float(torch.sigmoid(draft(0).confidences)[:, 1].median())


# A token more costs a 36th of what a step of REQUESTS costs: worth it for the better second drafts alone.
SPS = 1.0 / (1.0 + torch.arange(REQUESTS * (K + 1) + 1) / (36.0 * REQUESTS))
SCHEDULES: dict[str, Schedule] = {
    "fixed": lambda c: fixed_lengths(REQUESTS, K, c.device),
    "threshold": lambda c: threshold_lengths(c, min(median_confidence(), float(c[0, 0]))),
    "early stop": lambda c: early_stop_lengths(c, SPS),
    "budgeted": lambda c: top_budget_lengths(c, torch.tensor(int(1.4 * REQUESTS))),
}


@pytest.mark.slow
@pytest.mark.parametrize("method", ["standard", "block"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_gives_the_targets_law(name: str, method: str) -> None:
    first, second = deviations(SCHEDULES[name], method)
    assert abs(first) < 5 and abs(second) < 5


def test_the_schedules_here_do_decide_something() -> None:
    confidences = torch.sigmoid(draft(0).confidences)
    assert confidences[:, 1].unique().numel() > 20
    for name in ("threshold", "early stop", "budgeted"):
        assert SCHEDULES[name](confidences).unique().numel() > 1, name


@pytest.mark.slow
def test_a_leak_shows() -> None:
    """The first draft is verified only where the second looks good: its confidence tells what the first one is."""

    def leaking(confidences: torch.Tensor) -> torch.Tensor:
        good = survival(confidences)[:, 1] > survival(confidences)[:, 1].median()
        return torch.where(good, K, 0).to(torch.int32)

    first, _ = deviations(leaking, "standard")
    assert first > 20
