"""Runner V2's sampler: every feature against a plain float64 reference, with drafts, in rows that are used again."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import SamplingParams
from engine.runner_v2.sample import SamplerPlan
from engine.sample.logits_processors import LogitsProcessor, LogitsRows
from kernels import post_update
from tests.engine.sampler_bench import sampler_bench
from tests.engine.sampler_requests import EVERYTHING, FORMS, VOCAB, NotTwice, fill, some_params, token_lists
from tests.engine.sampling_reference import processed

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's NumPy: -inf - -inf


class PlusOutputLength(LogitsProcessor):
    def apply(self, logits: torch.Tensor, rows: LogitsRows) -> torch.Tensor:
        logits[:, 3] += (rows.lens - rows.prompt_lens).float()
        return logits


REQUESTS = st.lists(st.tuples(token_lists(1, 6), token_lists(0, 6), some_params()), min_size=1, max_size=4)


@pytest.mark.parametrize("form", FORMS)
@given(requests=REQUESTS, seed=st.integers(0, 1000))
@settings(max_examples=12)
def test_any_features_of_any_requests(form: str, requests: list, seed: int) -> None:
    logits = torch.randn(len(requests), VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    with sampler_bench(form=form) as bench:
        rows = [bench.add(prompt, params, output, stop_ids=(8, 9)) for prompt, output, params in requests]
        bench.apply_staged_writes()
        plan = bench.plan(rows)
        step = bench.rows(rows, [len(output) for _, output, _ in requests])
        stages = bench.before_the_draw(plan, logits, **step)
        sampled = bench.sample(plan, logits.clone(), **step).sampled[:, 0]
    got = list(stages.values())[-1] if stages else logits
    for i, (prompt, output, params) in enumerate(requests):
        expected = processed(logits[i].tolist(), params, prompt, output, stop_ids=(8, 9))
        np.testing.assert_allclose(got[i].double().numpy(), expected, rtol=1e-5, atol=1e-5)
        assert expected[sampled[i]] >= expected.max() - 1e-4


@pytest.mark.parametrize("form", FORMS)
@given(
    requests=st.lists(
        st.tuples(token_lists(1, 4), token_lists(0, 4), token_lists(0, 3), some_params(), st.booleans()),
        min_size=1,
        max_size=3,
    )
)
@settings(max_examples=8)
def test_a_row_behind_drafts_is_that_of_a_request_that_has_these_tokens(form: str, requests: list) -> None:
    processors = (NotTwice(), PlusOutputLength())

    def with_processors(params: SamplingParams, wanted: bool) -> SamplingParams:
        kwargs = {name: EVERYTHING[name] for name in EVERYTHING if getattr(params, name) == EVERYTHING[name]}
        return SamplingParams(**(kwargs | {"temperature": 0, "logits_processors": processors if wanted else ()}))

    drafts = [own for _, _, own, _, _ in requests]
    logits = torch.randn(sum(len(own) + 1 for own in drafts), VOCAB, generator=torch.Generator().manual_seed(3))
    with sampler_bench(form=form) as bench:
        rows = [bench.add(p, with_processors(params, w), out, (8, 9)) for p, out, _, params, w in requests]
        bench.apply_staged_writes()
        plan, step = bench.plan(rows, drafts), bench.rows(rows, [len(out) for _, out, *_ in requests], drafts)
        together = [logits, *bench.before_the_draw(plan, logits, **step).values()][-1]
    line = 0
    for prompt, output, own, params, wanted in requests:
        for j in range(len(own) + 1):
            with sampler_bench(form=form) as bench:
                row = bench.add(prompt, with_processors(params, wanted), [*output, *own[:j]], (8, 9))
                bench.apply_staged_writes()
                own_logits, step = logits[line : line + 1], bench.rows([row], [len(output) + j])
                alone = [own_logits, *bench.before_the_draw(bench.plan([row]), own_logits, **step).values()][-1]
            assert torch.equal(alone[0], together[line]), (line, j)
            line += 1


def test_a_row_keeps_nothing_of_the_request_before() -> None:
    """A plain request on the row of one that used everything, beside one that uses everything."""
    with sampler_bench(max_reqs=2) as bench:
        first, second = fill(bench)
        bench.apply_staged_writes()
        bench.remove(first)
        again = bench.add([1, 2], SamplingParams(temperature=0), stop_ids=(8, 9))
        assert again == first
        bench.apply_staged_writes()
        logits = torch.randn(2, VOCAB)
        stages = bench.before_the_draw(bench.plan([second, again]), logits, **bench.rows([second, again], [2, 0]))
        assert len(stages) == 3
        for x in stages.values():
            assert torch.equal(x[1], logits[1])
        assert bench.plan([again]) == SamplerPlan(all_greedy=True)
        expected = processed(logits[0].tolist(), SamplingParams(**EVERYTHING), [1, 2, 3], [6, 1], (8, 9))
        np.testing.assert_allclose(x[0].double().numpy(), expected, rtol=1e-5, atol=1e-5)


def test_counts_follow_what_is_sampled() -> None:
    """Kernel 10 adds the sampled tokens; the prompt, what came before a preemption, and these are penalised."""
    params = SamplingParams(temperature=0, frequency_penalty=0.5, presence_penalty=0.25, repetition_penalty=1.5)
    with sampler_bench() as bench:
        row = bench.add([1, 2, 2], params, [3, 3])
        bench.apply_staged_writes()
        counts = bench.sampler.penalties.output_bin_counts
        assert counts is not None and counts.shape == (5, VOCAB)
        states, one = bench.requests, torch.ones(1, dtype=torch.int32)
        idx = torch.tensor([row], dtype=torch.int32)
        output = [3, 3]
        for token in (7, 3, 1):
            with torch.inference_mode():
                post_update(
                    idx, states.num_computed_tokens.gpu, states.last_sampled_tokens, states.total_len.gpu,
                    states.all_token_ids.gpu, torch.tensor([[token]]), one, one - 1, torch.tensor([0, 1]).int(),
                    counts, form="torch",
                )  # fmt: skip
            output.append(token)
            logits = torch.randn(1, VOCAB)
            stages = bench.before_the_draw(bench.plan([row]), logits, **bench.rows([row], [len(output)]))
            expected = processed(logits[0].tolist(), params, [1, 2, 2], output)
            np.testing.assert_allclose(stages["penalties"][0].double().numpy(), expected, rtol=1e-5, atol=1e-5)
