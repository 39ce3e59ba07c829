"""A model or a subscriber that fails: the caller hears of it, no request loses a token, the engine goes on."""

from __future__ import annotations

import pytest

from engine import LLM
from engine.hooks import Event, OutputDelivered, RequestScheduled
from tests.engine.engine_helpers import (
    assert_empty,
    both_loops,
    both_runners,
    greedy,
    ids,
    prompt_of,
    reference,
    replaced_model,
    tiny_llm,
    tokens_of,
)

PROMPTS = [prompt_of(6, 1), prompt_of(11, 2), prompt_of(17, 3)]


def still_right(llm: LLM) -> None:
    outputs = llm.generate([ids(*prompt) for prompt in PROMPTS], greedy(9), use_tqdm=False)
    assert tokens_of(outputs) == [reference(prompt, greedy(9)) for prompt in PROMPTS]
    assert_empty(llm)


class DeviceOnFire(Exception):
    pass


def _fail(*args: object, **kwargs: object) -> None:
    raise DeviceOnFire("in mid-forward")


@both_runners
@both_loops
@pytest.mark.parametrize("after", [0, 1, 2, 5])
@pytest.mark.parametrize("where", ["forward", "compute_logits"])
def test_a_failing_model_reaches_the_caller_and_costs_no_token(runner: str, loop: str, after: int, where: str) -> None:
    with tiny_llm(runner, loop, max_num_batched_tokens=12) as llm:
        for index, prompt in enumerate(PROMPTS):
            llm.add(ids(*prompt), greedy(12), request_id=f"r{index}")
        tokens = {}
        for _ in range(after):
            for output in llm.step():
                tokens[output.request_id] = output.outputs[0].token_ids
        kept = dict(tokens)
        with replaced_model(llm, **{where: _fail}), pytest.raises(DeviceOnFire, match="in mid-forward"):
            for _ in range(3):
                for output in llm.step():
                    kept[output.request_id] = output.outputs[0].token_ids
        llm.core.check_integrity()
        for request_id, token_ids in kept.items():
            assert tuple(llm.core.scheduler.requests[request_id].output_token_ids) == token_ids
        tokens = kept
        while llm.core.has_unfinished():
            for output in llm.step():
                tokens[output.request_id] = output.outputs[0].token_ids
            llm.core.check_integrity()
        assert tokens == {f"r{i}": reference(prompt, greedy(12)) for i, prompt in enumerate(PROMPTS)}
        still_right(llm)


@both_runners
@both_loops
def test_generate_takes_its_own_requests_back_when_the_model_fails(runner: str, loop: str) -> None:
    with tiny_llm(runner, loop) as llm:
        llm.add(ids(*PROMPTS[2]), greedy(9), request_id="mine")
        with replaced_model(llm, forward=_fail), pytest.raises(DeviceOnFire):
            llm.generate([ids(*prompt) for prompt in PROMPTS], greedy(9), use_tqdm=False)
        assert list(llm.core.scheduler.requests) == ["mine"]
        outputs = [output for _ in range(14) for output in llm.step()]
        assert outputs[-1].outputs[0].token_ids == reference(PROMPTS[2], greedy(9))
        still_right(llm)


@both_runners
@both_loops
def test_failing_again_and_again_ends_when_the_model_works_again(runner: str, loop: str) -> None:
    """Every fifth forward fails: requests are computed anew each time and still come out right."""
    with tiny_llm(runner, loop) as llm:
        forward, calls, failures = llm.core.runner.model, [0], 0

        def sometimes(*args: object, **kwargs: object) -> object:
            calls[0] += 1
            if calls[0] % 5 == 0:
                raise DeviceOnFire(f"forward {calls[0]}")
            return forward(*args, **kwargs)

        with replaced_model(llm, forward=sometimes):
            llm.add(ids(*PROMPTS[0]), greedy(9), request_id="a")
            tokens: tuple[int, ...] = ()
            while llm.core.has_unfinished():
                try:
                    for output in llm.step():
                        tokens = output.outputs[0].token_ids
                except DeviceOnFire:
                    failures += 1
                    assert failures < 50
        assert failures > 1 and tokens == reference(PROMPTS[0], greedy(9))
        still_right(llm)


@both_runners
@both_loops
@pytest.mark.parametrize("event", [Event, RequestScheduled, OutputDelivered])
def test_a_failing_subscriber_is_reported_and_dropped(runner: str, loop: str, event: type[Event]) -> None:
    calls = []

    def broken(event: Event) -> None:
        calls.append(event)
        raise ZeroDivisionError("in a view")

    with tiny_llm(runner, loop) as llm, llm.hooks.subscribe(event, broken):
        still_right(llm)
        assert len(calls) == 1
        assert len(llm.hooks.errors) == 1 and "ZeroDivisionError('in a view')" in llm.hooks.errors[0]
        assert not llm.hooks.wanted
