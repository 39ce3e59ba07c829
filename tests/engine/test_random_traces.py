"""Anything together, from a seed: each request's answer is the one that it gets alone, field by field.

Steps are interrupted, fail, or are made by somebody else in passing; the books must agree after each.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import pytest

from engine import LLM, CompletionOutput, RequestOutput
from engine.hooks import ON_REQUEST, Event, OutputDelivered
from engine.runner_v2 import step_costs
from tests.engine.engine_helpers import close, ids, make_llm, replaced_model, run_trace
from tests.engine.late_device import device_timing
from tests.engine.random_cases import Case, alone, install_right_drafts, random_case, target
from tests.engine.replays import repeat_instead_of_capture

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("python_sigint")]  # many traces

SEEDS = (*range(16), 18, 54, 62, 149, 378)
"""The last ones preempt, or met a fault that others don't."""


class DeviceOnFire(Exception):
    pass


@contextmanager
def engine(case: Case, seed: int) -> Iterator[LLM]:
    with pytest.MonkeyPatch.context() as patch, device_timing(case.timing):
        patch.setattr(step_costs, "seconds_of", lambda runner, num_reqs, num_tokens: 1e-3 * (8 + num_tokens))
        if case.captured:
            repeat_instead_of_capture(patch)
        llm = make_llm(case.runner, case.loop, target(), **case.config)
        try:
            if llm.core.runner.decoder is not None:
                install_right_drafts(llm, case, seed)
            yield llm
        finally:
            close(llm)


def make_bumpy(llm: LLM, case: Case, rng: random.Random) -> None:
    """From now on a step may be interrupted, fail, or come behind a whole answer that somebody else has asked for."""
    step, core = llm.step, llm.core

    def interrupted() -> list[RequestOutput]:
        schedule = core.scheduler.schedule

        def hit(number: int) -> object:
            os.kill(os.getpid(), signal.SIGINT)
            return schedule(number)

        core.scheduler.schedule = hit
        try:
            with pytest.raises(KeyboardInterrupt):
                step()
        finally:
            core.scheduler.schedule = schedule
        return core.take_outputs()

    def failing() -> list[RequestOutput]:
        def fail(*args: object, **kwargs: object) -> None:
            raise DeviceOnFire("in mid-forward")

        with replaced_model(llm, forward=fail):
            try:
                return step()
            except DeviceOnFire:
                return []

    def generating() -> list[RequestOutput]:
        other = rng.choice(case.trace)
        (output,) = llm.generate(ids(*other.prompt), other.params, use_tqdm=False)
        if case.has_one_answer(other.params):
            assert_same(output.outputs[0], alone(case.runner, other.prompt, other.params).outputs[0])
        return step()

    bumps = {"interrupt": interrupted, "failure": failing, "generate": generating}

    def bumpy() -> list[RequestOutput]:
        bump = rng.choice(case.bumps)
        if rng.random() > 0.1 or (bump == "interrupt" and os.name != "posix"):
            return step()
        return bumps[bump]() if core.has_unfinished() else step()

    if case.bumps:
        llm.step = bumpy


def assert_same(got: CompletionOutput, right: CompletionOutput) -> None:
    assert got.token_ids == right.token_ids
    assert (got.text, got.finish_reason, got.stop_reason) == (right.text, right.finish_reason, right.stop_reason)
    assert_same_logprobs(got.logprobs, right.logprobs)


def assert_same_logprobs(got: object, right: object) -> None:
    assert (got is None) == (right is None) and len(got or ()) == len(right or ())
    for own, expected in zip(got or (), right or (), strict=True):
        assert (own is None) == (expected is None)
        # Those of equals may be listed in any order, but for the sampled token, which comes first.
        assert next(iter(own or ()), None) == next(iter(expected or ()), None)
        values = [sorted(entry.logprob for entry in (one or {}).values()) for one in (own, expected)]
        assert values[0] == pytest.approx(values[1], abs=2e-4)


def check(case: Case, llm: LLM, delivered: dict[str, list[int]]) -> tuple[int, int, int]:
    result = run_trace(llm, case.trace)
    for one in case.trace:
        right, output = alone(case.runner, one.prompt, one.params), result.outputs.get(one.request_id)
        if output is None or not output.finished:
            assert one.abort_at is not None, f"{one.request_id} has no end"
            tokens = result.tokens(one.request_id)
            assert not case.has_one_answer(one.params) or tokens == right.outputs[0].token_ids[: len(tokens)]
            continue
        metrics, got = output.metrics, output.outputs[0]
        assert metrics.num_accepted_tokens == sum(metrics.accepted_per_round) <= metrics.num_draft_tokens
        assert metrics.num_drafts == len(metrics.accepted_per_round)
        assert got.logprobs is None or len(got.logprobs) == len(got.token_ids)
        assert not case.watched or tuple(delivered[one.request_id]) == got.token_ids
        if case.has_one_answer(one.params):
            assert_same(got, right.outputs[0])
            assert_same_logprobs(output.prompt_logprobs, right.prompt_logprobs)
    accepted = sum(output.metrics.num_accepted_tokens for output in result.outputs.values())
    return result.num_preemptions, result.num_cached_tokens, accepted


def run(seed: int) -> tuple[int, int, int]:
    case, delivered = random_case(seed), {}

    def note(event: Event) -> None:
        if isinstance(event, OutputDelivered):
            delivered.setdefault(event.request_id, []).extend(event.new_token_ids)

    with engine(case, seed) as llm:
        make_bumpy(llm, case, random.Random(seed))
        with llm.hooks.subscribe((Event, *ON_REQUEST), note) if case.watched else nullcontext():
            seen = check(case, llm, delivered)
        assert llm.hooks.errors == []
    return seen


def test_any_answer_is_that_of_the_request_alone() -> None:
    seen = []
    for seed in SEEDS:
        try:
            seen.append(run(seed))
        except Exception as error:
            error.add_note(f"seed {seed}: {random_case(seed)}")
            raise
    # The traces must have been hard enough to mean something.
    preemptions, hits, accepted = (sum(column) for column in zip(*seen, strict=True))
    assert preemptions > 10 and hits > 50 and accepted > 50, seen
