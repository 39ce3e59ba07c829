"""Runner V2's sampler in a step with drafts: every feature counts for the drafts too, and logprobs come for each
token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from engine import SamplingParams
from engine.runner_v2.sample.logprobs import row_to_dict
from engine.runner_v2.sample.rejection_sampler import DraftedStep, RejectionSampler, RejectionSamplerOutput
from engine.runner_v2.sample.structured_outputs import GrammarBitmask
from kernels import flatten_sampled, noise
from tests.engine.sampler_bench import SamplerBench, sampler_bench
from tests.engine.test_v2_sampler_logprobs import check_entry
from tests.kernels.draws import chi_square_z
from tests.kernels.test_no_host_wait import NoHostWait, forbid_waits

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.slow,
]  # the interpreter's NumPy: -inf - -inf
FORMS = ("torch", "interpret", "loop")
VOCAB = 40
FEATURES: dict[str, Any] = {
    "presence_penalty": 0.7,
    "frequency_penalty": -0.4,
    "repetition_penalty": 1.3,
    "logit_bias": {2: 3.5, 5: -1.25},
    "bad_words_token_ids": ((4,), (6, 7), (1, 2, 3)),
    "min_tokens": 5,
}


def drafted_step(
    bench: SamplerBench, rows: Sequence[int], num_outputs: Sequence[int], drafts: Sequence[Sequence[int]]
) -> DraftedStep:
    flat = bench.rows(rows, num_outputs, drafts)
    num_logits = [len(own) + 1 for own in drafts]
    return DraftedStep(
        idx_mapping=torch.tensor(rows, dtype=torch.int32),
        cu_num_logits=torch.tensor(np.cumsum([0, *num_logits]), dtype=torch.int32),
        expanded_idx_mapping=flat["idx_mapping"],
        expanded_local_pos=flat["drafts"].expanded_local_pos,
        token_ids=flat["drafts"].token_ids,
        positions=flat["positions"],
        max_drafts=max(map(len, drafts)),
    )


def tokens_of(output: RejectionSamplerOutput) -> list[list[int]]:
    sampled, counts = output.verified.sampled.tolist(), output.verified.num_sampled.tolist()
    return [row[:count] for row, count in zip(sampled, counts, strict=True)]


def run(
    bench: SamplerBench,
    rows: Sequence[int],
    num_outputs: Sequence[int],
    drafts: Sequence[Sequence[int]],
    logits: torch.Tensor,
    method: str = "standard",
    **options: Any,
) -> RejectionSamplerOutput:
    plan, step = bench.plan(rows, drafts), drafted_step(bench, rows, num_outputs, drafts)
    with torch.inference_mode():
        # Without logprobs they may be changed in place, and some tests look at them again.
        given = logits if plan.logprobs.wanted else logits.clone()
        before = given.clone()
        output = RejectionSampler(bench.sampler, method).sample(plan, given, step, **options)
    assert not plan.logprobs.wanted or "grammar" in options or torch.equal(given, before)
    return output


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("method", ["standard", "block"])
def test_greedy_with_every_feature_is_a_step_for_each_token(method: str, form: str) -> None:
    """The drafts are what steps without drafts give, up to the one that is spoilt."""
    generator = torch.Generator().manual_seed(4)
    params = SamplingParams(temperature=0, max_tokens=20, **FEATURES)
    for spoilt in range(4):
        logits = torch.randn(4, VOCAB, generator=generator) * 3
        prompt, output, steps = [1, 6, 3], [1, 2], []
        for j in range(4):
            with sampler_bench(form="torch") as bench:
                row = bench.add(prompt, params, [*output, *steps], (8, 9))
                bench.apply_staged_writes()
                step = bench.rows([row], [len(output) + j])
                steps.append(int(bench.sample(bench.plan([row]), logits[j : j + 1].clone(), **step).sampled))
        drafts = [(token + (j == spoilt)) % VOCAB for j, token in enumerate(steps[:3])]
        with sampler_bench(form=form) as bench:
            row = bench.add(prompt, params, output, (8, 9))
            bench.apply_staged_writes()
            got = run(bench, [row], [len(output)], [drafts], logits, method)
        assert tokens_of(got) == [steps[: spoilt + 1]]


@pytest.mark.parametrize("form", FORMS)
def test_without_drafts_it_is_the_sampler(form: str) -> None:
    params = [
        SamplingParams(temperature=0),
        SamplingParams(temperature=0.7, seed=1),
        SamplingParams(temperature=1.3, top_k=5, seed=2),
        SamplingParams(temperature=0.9, top_p=0.6, min_p=0.05, seed=3, presence_penalty=0.5),
    ]
    with sampler_bench(form=form) as bench:
        rows = [bench.add([1, 2, 3], own) for own in params]
        bench.apply_staged_writes()
        for seed in range(5):
            logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2
            plain = bench.sample(bench.plan(rows), logits.clone(), **bench.rows(rows, [seed] * 4)).sampled
            assert tokens_of(run(bench, rows, [seed] * 4, [[]] * 4, logits)) == plain.tolist()


@pytest.mark.parametrize("form", FORMS)
def test_a_draft_that_is_none_harms_no_feature(form: str) -> None:
    with sampler_bench(form=form) as bench:
        rows = [bench.add([1, 2], SamplingParams(temperature=t, seed=5, **FEATURES)) for t in (0, 0.8)]
        bench.apply_staged_writes()
        logits = torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(1))
        got = tokens_of(run(bench, rows, [0, 0], [[-1, -1], [-1, -1]], logits))
        assert got == tokens_of(run(bench, rows, [0, 0], [[], []], logits[[0, 3]]))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("temperature", [0, 1.0])
def test_a_grammar_rejects_a_draft(temperature: float, form: str) -> None:
    bitmask = np.zeros((2, 2), dtype=np.int32)
    bitmask[0, 0], bitmask[1] = 1 << 7, -1  # token 7 alone, then all
    with sampler_bench(form=form) as bench:
        row = bench.add([1, 2], SamplingParams(temperature=temperature, seed=5))
        bench.apply_staged_writes()
        grammar = GrammarBitmask.upload(bench.device, np.arange(2), bitmask)
        logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(1))
        draft_logits = torch.randn(5, 1, VOCAB)
        for drafts in (None, draft_logits):
            options = {"grammar": grammar, "draft_logits": drafts}
            assert tokens_of(run(bench, [row], [0], [[3]], logits.clone(), **options)) == [[7]]
        accepted = tokens_of(run(bench, [row], [0], [[7]], logits.clone(), grammar=grammar))
        assert len(accepted[0]) == 2 and accepted[0][0] == 7


@pytest.mark.parametrize("form", FORMS)
def test_logprobs_of_accepted_tokens_and_of_the_one_behind(form: str) -> None:
    """2, 0 and 1 drafts accepted; one request asks for nothing. The model's own distribution, in spite of a bias."""
    logits = torch.randn(11, VOCAB, generator=torch.Generator().manual_seed(2)) * 2
    best = logits.argmax(dim=1).tolist()
    drafts = [best[0:2], [(best[3] + 1) % VOCAB, best[4]], [best[6], (best[7] + 1) % VOCAB], best[9:10]]
    with sampler_bench(form=form) as bench:
        asks = (3, 0, 35, None)
        rows = [bench.add([1, 2], SamplingParams(temperature=0, logprobs=k)) for k in asks]
        bench.apply_staged_writes()
        plan = bench.plan(rows, drafts)
        output = run(bench, rows, [0] * 4, drafts, logits)
        got = tokens_of(output)
        assert [len(tokens) for tokens in got] == [3, 1, 2, 2]
        assert output.logprobs is not None
        host = {name: tensor.numpy() for name, tensor in output.logprobs.as_dict().items()}
    right = logits.double().log_softmax(-1)
    for begin, tokens, k in zip((0, 3, 6, 9), got, asks, strict=True):
        for j, token in enumerate(tokens):
            if k is not None:
                check_entry(row_to_dict(plan.logprobs, host, begin + j, k), right[begin + j], token, k)


@pytest.mark.parametrize("method", ["standard", "block"])
def test_the_law_is_that_of_the_sampler_with_its_filters(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """2,000 rows at a time: the first token behind temperature, top_k and a penalty, over sampled drafts."""
    monkeypatch.setattr(noise, "LANES", 1)  # seven tokens need no tile of 1,024
    num_reqs, rounds = 2_000, 30
    params = dict(temperature=0.8, top_k=4, repetition_penalty=1.5)
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(3, 7, generator=generator)
    draft = torch.randn(2, 7, generator=generator)
    counts = torch.zeros(7, dtype=torch.int64)
    with sampler_bench(vocab=7, max_reqs=num_reqs, max_len=200) as bench:
        rows = [bench.add([1, 2], SamplingParams(seed=i, **params)) for i in range(num_reqs)]
        bench.apply_staged_writes()
        one = bench.rows(rows[:1], [0])
        *_, processed = bench.before_the_draw(bench.plan(rows[:1]), logits[:1], **one).values()
        law = processed[0].double().softmax(0)
        for start in range(rounds):
            drafts = draft.softmax(1).multinomial(num_reqs, replacement=True, generator=generator).t().tolist()
            output = run(
                bench, rows, [start * 3] * num_reqs, drafts, logits.repeat(num_reqs, 1), method,
                draft_logits=draft.expand(num_reqs + 1, -1, -1).contiguous(),
            )  # fmt: skip
            counts += output.verified.sampled[:, 0].bincount(minlength=7)
    assert not counts[law == 0].any() and int((law > 0).sum()) == 4
    assert abs(chi_square_z(counts, law * num_reqs * rounds)) < 3.3


def test_it_never_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    with sampler_bench() as bench:
        rows = [bench.add([1, 2], SamplingParams(temperature=0.5, logprobs=2, **FEATURES)) for _ in range(3)]
        bench.apply_staged_writes()
        drafts = [[3, 4], [], [5]]
        plan, step = bench.plan(rows, drafts), drafted_step(bench, rows, [0] * 3, drafts)
        sampler = RejectionSampler(bench.sampler, "synthetic", [0.5, 0.5])
        with monkeypatch.context() as patch, NoHostWait("cpu"):
            forbid_waits(patch)
            sampler.sample(plan, torch.zeros(6, VOCAB), step)


@pytest.mark.parametrize("form", ["torch", "interpret"])
def test_flatten_sampled(form: str) -> None:
    sampled = torch.tensor([[5, 6, -1, -1], [7, -1, -1, -1], [1, 2, 3, 4]])
    cu = torch.tensor([0, 3, 4, 8], dtype=torch.int32)
    expected = [5, 6, 0, 7, 1, 2, 3, 4]
    assert flatten_sampled(sampled, cu, 8, form=form).tolist() == expected
    assert flatten_sampled(sampled, cu, 8, form="loop").tolist() == expected
    assert flatten_sampled(sampled[:0], cu[:1], 0, form=form).tolist() == []
