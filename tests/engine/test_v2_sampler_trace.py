"""A trace of one row's sampling: every stage, the mass that filters cut, the noise, and the token that was drawn."""

from __future__ import annotations

import pytest
import torch

from engine import SamplingParams
from engine.runner_v2.sample.trace import trace_tensors
from engine.sample.trace import MODEL, SamplingTrace, StageTrace, read_traces
from tests.engine.sampler_bench import SamplerBench, sampler_bench
from tests.kernels.test_no_host_wait import NoHostWait, forbid_waits

VOCAB = 40
PLAIN = SamplingParams(temperature=0)
PARAMS = SamplingParams(
    temperature=0.8, min_p=0.05, top_k=9, top_p=0.7, seed=4, logit_bias={5: 2.0}, frequency_penalty=0.5,
    bad_words_token_ids=((7,),),
)  # fmt: skip


def traced(
    bench: SamplerBench, params: list[SamplingParams], logits: torch.Tensor
) -> tuple[list[SamplingTrace], list[int]]:
    rows = [bench.add([1, 2], own, [3, 5]) for own in params]
    bench.apply_staged_writes()
    plan, step = bench.plan(rows), bench.rows(rows, [2] * len(rows))
    sampled = bench.sample(plan, logits.clone(), **step).sampled[:, 0]
    fetch = bench.device.fetch(
        lambda: trace_tensors(bench.sampler, plan, logits, bench.sampler.rows(**step), sampled, 6)
    )
    traces = read_traces(fetch.result(), [str(row) for row in rows])
    assert traces is not None
    return list(traces.values()), sampled.tolist()


def best(trace: SamplingTrace, stage: StageTrace, k: int = 6) -> list[tuple[int, float]]:
    """The k best tokens behind a stage, as the trace has them."""
    known = [(t, x) for t, x in zip(trace.token_ids, stage.logits, strict=True) if x is not None]
    return sorted(known, key=lambda pair: -pair[1])[:k]


def test_a_trace_tells_what_happened() -> None:
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(2)) * 2
    logits[0, 7] = 9.0
    with sampler_bench() as bench:
        (trace, greedy), sampled = traced(bench, [PARAMS, PLAIN], logits)
    assert [trace.sampled, greedy.sampled] == sampled
    names = [stage.stage for stage in trace.stages]
    assert names == [
        MODEL, ("allowed_token_ids", "logit_bias", "min_tokens"), ("penalties",), ("bad_words",), ("temperature",),
        ("min_p",), ("top_k",), ("top_p",),
    ]  # fmt: skip
    row = logits[0].double()
    first = trace.stages[0]
    assert best(trace, first)[0][0] == 7 and first.mass_left == pytest.approx(1.0)
    assert first.log_normaliser == pytest.approx(float(row.logsumexp(0)), rel=1e-6)
    row[5] += 2.0
    row[3] -= 0.5
    row[5] -= 0.5
    cut = 1 - row.softmax(0)[7]
    row[7] = float("-inf")
    words = trace.stages[3]
    assert words.num_left == VOCAB - 1 and words.mass_left == pytest.approx(float(cut), rel=1e-4)
    order = row.argsort(descending=True).tolist()
    assert [token for token, _ in best(trace, words)] == order[:6]
    assert [logit for _, logit in best(trace, words)] == pytest.approx([float(row[t]) for t in order[:6]], abs=1e-5)
    assert words.logits[trace.token_ids.index(7)] is None
    probabilities = (row / 0.8).softmax(0)[order]
    kept = int((probabilities >= 0.05 * probabilities[0]).sum())
    assert trace.stages[5].num_left == kept
    assert trace.stages[5].mass_left == pytest.approx(float(probabilities[:kept].sum()), rel=1e-4)
    assert trace.stages[6].num_left == min(kept, 9) and trace.stages[7].num_left < min(kept, 9)
    scores = {
        t: logit + noise
        for t, logit, noise in zip(trace.token_ids, trace.stages[-1].logits, trace.noise, strict=True)
        if logit is not None
    }
    assert max(scores, key=lambda t: scores[t]) == trace.sampled and min(trace.noise) > -2.9
    runners = sorted(scores, key=lambda t: -scores[t])[:6]
    followed = [*runners, *(token for stage in trace.stages for token, _ in best(trace, stage))]
    assert sorted(trace.token_ids) == sorted(set(followed)), "nothing that was never among the best"
    assert not trace.greedy


def test_a_greedy_row_has_no_noise_and_passes_through_all_filters() -> None:
    logits = torch.randn(2, VOCAB)
    with sampler_bench() as bench:
        (_, greedy), _ = traced(bench, [PARAMS, PLAIN], logits)
    assert greedy.greedy and set(greedy.noise) == {0.0} and greedy.sampled == int(logits[1].argmax())
    for stage in greedy.stages:
        assert stage.mass_left == pytest.approx(1.0, abs=1e-5) and stage.num_left == VOCAB
        assert [x for _, x in best(greedy, stage)] == pytest.approx(logits[1].topk(6).values.tolist())


def test_a_trace_leaves_logits_and_states_alone_and_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(1, VOCAB)
    with sampler_bench() as bench:
        row = bench.add([1, 2], PARAMS, [3, 5])
        bench.apply_staged_writes()
        plan, step = bench.plan([row]), bench.rows([row], [2])
        before = [logits.clone(), bench.sampler.penalties.output_bin_counts.clone()]
        with monkeypatch.context() as patch, torch.inference_mode(), NoHostWait("cpu"):
            forbid_waits(patch)
            trace_tensors(bench.sampler, plan, logits, bench.sampler.rows(**step), torch.zeros(1, dtype=torch.int64))
        assert torch.equal(logits, before[0])
        assert torch.equal(bench.sampler.penalties.output_bin_counts, before[1])
