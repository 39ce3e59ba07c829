"""Runner V2's sampler: every feature against a plain float64 reference, with drafts, in rows that are used again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import SamplingParams
from engine.runner_v2.sample import SamplerPlan
from engine.runner_v2.sample.sampler import STAGES
from engine.runner_v2.sample.structured_outputs import GrammarBitmask
from engine.sample.logits_processors import LogitsProcessor, LogitsRows
from engine.sample.order import ORDER
from engine.sample.structured_outputs_params import StructuredOutputsParams
from kernels import Purpose, gumbel_sample, post_update
from tests.engine.sampler_bench import SamplerBench, sampler_bench
from tests.engine.sampling_reference import processed
from tests.kernels.test_no_host_wait import NoHostWait, forbid_waits

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's NumPy: -inf - -inf
VOCAB = 40
FORMS = ("torch", "interpret", "loop")
NEG_INF = float("-inf")


class NotTwice(LogitsProcessor):
    """Forbids the last token, and the prompt's first."""

    def apply(self, logits: torch.Tensor, rows: LogitsRows) -> torch.Tensor:
        last = rows.token_ids.gather(1, rows.lens.unsqueeze(1) - 1)
        return logits.scatter_(1, last, NEG_INF).scatter_(1, rows.token_ids[:, :1], NEG_INF)


class PlusOutputLength(LogitsProcessor):
    def apply(self, logits: torch.Tensor, rows: LogitsRows) -> torch.Tensor:
        logits[:, 3] += (rows.lens - rows.prompt_lens).float()
        return logits


EVERYTHING: dict[str, Any] = {
    "presence_penalty": 0.7,
    "frequency_penalty": -0.4,
    "repetition_penalty": 1.3,
    "logit_bias": {2: 3.5, 5: -1.25},
    "allowed_token_ids": tuple(range(1, 30)),
    "bad_words_token_ids": ((4,), (6, 7), (1, 2, 3)),
    "min_tokens": 5,
    "temperature": 0,
    "max_tokens": 20,
}


def token_lists(least: int, most: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, 9), min_size=least, max_size=most)


def some_params() -> st.SearchStrategy[SamplingParams]:
    """Any subset of the features."""
    return st.sets(st.sampled_from(sorted(EVERYTHING.keys() - {"temperature", "max_tokens"}))).map(
        lambda names: SamplingParams(temperature=0, max_tokens=20, **{name: EVERYTHING[name] for name in names})
    )


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


def fill(bench: SamplerBench) -> list[int]:
    return [bench.add([1, 2, 3], SamplingParams(**EVERYTHING), [6, 1], (8, 9)) for _ in range(2)]


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


# -- nothing is launched or uploaded that no request needs -------------------------------------------------------------


def test_plain_requests_upload_their_parameters_and_launch_nothing() -> None:
    params = SamplingParams(temperature=0.5, seed=3)
    with sampler_bench() as bench:
        bench.add([1, 2], params)
        assert bench.apply_staged_writes() == [] and bench.log == ["publish sampling"]
        assert bench.apply_staged_writes() == [] and bench.log == []
        bench.remove(0)
        bench.add([5], params)
        assert bench.apply_staged_writes() == [] and bench.log == [], "the row holds these values already"
        assert bench.sampler.penalties.output_bin_counts is None, "made without need"


@pytest.mark.parametrize(
    ("name", "launched", "log"),
    [
        ("logit_bias", ["write logit_bias"], ["publish logit_bias"]),
        ("allowed_token_ids", ["write logit_bias"], ["publish logit_bias"]),
        ("min_tokens", ["write logit_bias"], ["publish logit_bias"]),
        ("frequency_penalty", ["bincount"], ["publish penalties"]),
        ("bad_words_token_ids", ["write bad_words"], ["publish bad_words"]),
    ],
)
def test_a_feature_uploads_its_own_tables_once(name: str, launched: list[str], log: list[str]) -> None:
    with sampler_bench() as bench:
        bench.add([1, 2], SamplingParams(temperature=0, max_tokens=20, seed=3))
        bench.apply_staged_writes()
        params = SamplingParams(temperature=0, max_tokens=20, seed=3, **{name: EVERYTHING[name]})
        bench.add([1, 2], params, stop_ids=(8, 9))
        assert bench.apply_staged_writes() == launched
        assert [entry for entry in bench.log if entry != "upload"] == ["publish sampling", *log, *launched]
        assert bench.apply_staged_writes() == [] and bench.log == []


KERNELS = {
    "logit_bias": ("logit_bias.apply_logit_bias", "logit_bias"),
    "presence_penalty": ("penalties.apply_penalties", "penalties"),
    "bad_words_token_ids": ("bad_words.apply_bad_words", "max_bad_words"),
    "logits_processors": ("logits_processors.run_processor", "processors"),
    "logprobs": ("logprobs.topk_logprobs", "logprobs"),
}


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_is_launched_only_for_a_batch_that_uses_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[str] = []
    for other, (path, _) in KERNELS.items():
        where = f"engine.runner_v2.sample.{path}"
        module, function = where.rsplit(".", 1)
        original = getattr(__import__(module, fromlist=[function]), function)

        def logged(*args: Any, other: str = other, original: Any = original, **kwargs: Any) -> Any:
            launched.append(other)
            return original(*args, **kwargs)

        monkeypatch.setattr(where, logged)
    values = EVERYTHING | {"logits_processors": (NotTwice(),), "logprobs": 2}
    with sampler_bench() as bench:
        plain = bench.add([1, 2], SamplingParams(temperature=0))
        user = bench.add([1, 2], SamplingParams(temperature=0, max_tokens=20, **{name: values[name]}), [5], (8, 9))
        bench.apply_staged_writes()
        logits = torch.randn(2, VOCAB)
        bench.sample(bench.plan([plain]), logits[:1], **bench.rows([plain], [0]))
        assert launched == []
        plan = bench.plan([plain, user])
        bench.sample(plan, logits.clone(), **bench.rows([plain, user], [0, 1]))
        assert launched == [name]
    default = SamplerPlan(all_greedy=True)
    changed = [f for f in plan.__dataclass_fields__ if getattr(plan, f) != getattr(default, f)]
    assert changed == [KERNELS[name][1]]
    assert hash(plan) is not None and plan != default


def test_logits_are_copied_once_and_only_if_something_changes_them() -> None:
    with sampler_bench() as bench:
        plain, user = bench.add([1], SamplingParams(temperature=0)), fill(bench)[0]
        bench.apply_staged_writes()
        logits = torch.randn(1, VOCAB)
        before, copies = logits.clone(), []
        logits_clone = torch.Tensor.clone

        def clone(x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
            if x.shape == logits.shape:
                copies.append(x)
            return logits_clone(x, **kwargs)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.Tensor, "clone", clone)
            bench.sample(bench.plan([plain]), logits, **bench.rows([plain], [0]))
            assert copies == []
            bench.sample(bench.plan([user]), logits, **bench.rows([user], [2]))
            assert len(copies) == 1
        assert torch.equal(logits, before)


# -- order, grammar, draw ----------------------------------------------------------------------------------------------


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


def allow_only(bench: SamplerBench, logits_rows: list[int], tokens: list[int]) -> GrammarBitmask:
    words = np.zeros(-(-VOCAB // 32), dtype=np.uint32)
    for token in tokens:
        words[token // 32] |= np.uint32(1 << token % 32)
    bitmask = np.tile(words.view(np.int32), (len(logits_rows), 1))
    grammar = GrammarBitmask.upload(bench.device, np.array(logits_rows), bitmask)
    assert grammar is not None
    return grammar


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


def test_no_grammar_rows_upload_nothing() -> None:
    with sampler_bench() as bench:
        assert GrammarBitmask.upload(bench.device, np.array([], dtype=np.int32), np.zeros((0, 2), np.int32)) is None
        assert bench.log == []


def test_sampling_never_makes_the_host_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(
        **(EVERYTHING | {"temperature": 0.7, "top_k": 5, "logits_processors": (NotTwice(),), "logprobs": 35})
    )
    with sampler_bench() as bench:
        rows = [bench.add([1, 2], params, [6, 1], (8, 9)), bench.add([1], SamplingParams(temperature=0, logprobs=1))]
        bench.apply_staged_writes()
        plan, step = bench.plan(rows, [[3, 4], []]), bench.rows(rows, [2, 0], [[3, 4], []])
        logits, grammar = torch.randn(4, VOCAB), allow_only(bench, [0, 1], list(range(30)))
        with monkeypatch.context() as patch, torch.inference_mode(), NoHostWait("cpu"):
            forbid_waits(patch)
            out = bench.sampler.sample(plan, logits, **step, grammar=grammar)
        assert out.sampled.shape == (4, 1)


def test_a_processor_that_returns_something_else_says_so() -> None:
    class Wrong(LogitsProcessor):
        def apply(self, logits: torch.Tensor, rows: LogitsRows) -> torch.Tensor:
            return logits[:, :3]

    with sampler_bench() as bench:
        row = bench.add([1], SamplingParams(temperature=0, logits_processors=(Wrong(),)))
        bench.apply_staged_writes()
        with pytest.raises(TypeError, match="Wrong.apply must return logits"):
            bench.sample(bench.plan([row]), torch.zeros(1, VOCAB), **bench.rows([row], [0]))
