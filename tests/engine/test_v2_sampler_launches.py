"""Runner V2's sampler launches, uploads and copies nothing that no request of a batch needs, and never waits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from engine import SamplingParams
from engine.runner_v2.sample import SamplerPlan
from engine.runner_v2.sample.structured_outputs import GrammarBitmask
from tests.engine.sampler_bench import sampler_bench
from tests.engine.sampler_requests import EVERYTHING, VOCAB, NotTwice, allow_only, fill
from tests.kernels.test_no_host_wait import NoHostWait, forbid_waits

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's NumPy: -inf - -inf


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
