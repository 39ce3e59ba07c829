"""Runner V2's sampler: the order of its stages, what is drawn from, and grammars among them."""

from __future__ import annotations

import pytest
import torch

from engine import SamplingParams
from engine.runner_v2.sample import SamplerPlan
from engine.runner_v2.sample.sampler import STAGES
from engine.sample.logits_processors import LogitsProcessor, LogitsRows
from engine.sample.order import ORDER
from engine.sample.structured_outputs_params import StructuredOutputsParams
from kernels import Purpose, gumbel_sample
from tests.engine.sampler_bench import sampler_bench
from tests.engine.sampler_requests import EVERYTHING, FORMS, NEG_INF, VOCAB, NotTwice, allow_only

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's NumPy: -inf - -inf


def test_the_stages_are_the_documented_order() -> None:
    assert tuple(name for names in STAGES for name in names) == ORDER


def test_stages_come_in_order_and_end_in_what_is_drawn_from() -> None:
    params = SamplingParams(
        **(EVERYTHING | {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "logits_processors": (NotTwice(),)})
    )
    with sampler_bench() as bench:
        rows = [bench.add([1, 2, i], params, [6, 1], (8, 9)) for i in range(2)]
        held = StructuredOutputsParams(regex="a+")
        rows.append(bench.add([1], SamplingParams(temperature=1.2, structured_outputs=held), [6, 1]))
        bench.apply_staged_writes()
        plan, step, logits = bench.plan(rows), bench.rows(rows, [2, 2, 2]), torch.randn(3, VOCAB)
        grammar = allow_only(bench, [2], list(range(2, 20)))
        stages = bench.before_the_draw(plan, logits, **step, grammar=grammar)
        assert plan.stages == tuple(stage for stage in STAGES if stage != ("logprobs",))
        assert list(stages) == [" ".join(stage) for stage in plan.stages[:-1]]
        sampled = bench.sample(plan, logits.clone(), **step, grammar=grammar).sampled[:, 0]
        final = stages["min_p top_k top_p"]
        drawn = gumbel_sample(
            final, step["idx_mapping"], bench.states.temperature.gpu, bench.states.seeds.gpu, step["positions"],
            purpose=Purpose.SAMPLE, form="torch",
        )  # fmt: skip
        assert torch.equal(sampled, drawn)


@pytest.mark.parametrize("form", FORMS)
def test_a_grammar_binds_the_token_and_its_logprobs(form: str) -> None:
    """Logprobs are of what the grammar allows, as in vLLM; a row without a grammar is left alone."""
    with sampler_bench(form=form) as bench:
        rows = [bench.add([1], SamplingParams(temperature=1.0, seed=i, logprobs=3)) for i in range(2)]
        bench.apply_staged_writes()
        logits = torch.randn(2, VOCAB)
        right = torch.cat([logits[:1].double().log_softmax(-1), logits[1:, [33, 35]].double().log_softmax(-1)], dim=1)
        grammar = allow_only(bench, [1], [33, 35])
        out = bench.sample(bench.plan(rows), logits, **bench.rows(rows, [0, 0]), grammar=grammar)
    assert out.sampled[1, 0] in (33, 35) and out.logprobs is not None and out.logprobs.few is not None
    few = out.logprobs.few
    torch.testing.assert_close(few.logprobs[0].double(), right[0, few.token_ids[0]], atol=1e-5, rtol=1e-5)
    own = right[0, VOCAB + [33, 35].index(int(out.sampled[1, 0]))]
    torch.testing.assert_close(few.logprobs[1, 0].double(), own, atol=1e-5, rtol=1e-5)
    assert few.logprobs[1, 3] == NEG_INF


def test_a_batch_with_a_grammar_is_like_no_captured_one() -> None:
    with sampler_bench() as bench:
        rows = [
            bench.add([1], SamplingParams(temperature=0, structured_outputs=StructuredOutputsParams(regex="a+"))),
            bench.add([1], SamplingParams(temperature=0)),
        ]
        assert bench.plan(rows) == SamplerPlan(all_greedy=True, structured_outputs=True)
        assert bench.plan(rows[1:]) == SamplerPlan(all_greedy=True)


def test_a_processor_that_returns_something_else_says_so() -> None:
    class Wrong(LogitsProcessor):
        def apply(self, logits: torch.Tensor, rows: LogitsRows) -> torch.Tensor:
            return logits[:, :3]

    with sampler_bench() as bench:
        row = bench.add([1], SamplingParams(temperature=0, logits_processors=(Wrong(),)))
        bench.apply_staged_writes()
        with pytest.raises(TypeError, match="Wrong.apply must return logits"):
            bench.sample(bench.plan([row]), torch.zeros(1, VOCAB), **bench.rows([row], [0]))
