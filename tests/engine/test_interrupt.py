"""Ctrl-C: raised when the step has ended; nothing is half done or lost, and the engine goes on rightly."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from engine import LLM, RequestOutput
from engine.interrupts import deferred_interrupt
from tests.engine.engine_helpers import (
    assert_empty,
    both_loops,
    both_runners,
    greedy,
    ids,
    limited_steps,
    prompt_of,
    reference,
    replaced_model,
    tiny_llm,
    tokens_of,
)

pytestmark = pytest.mark.usefixtures("python_sigint")
PROMPTS = [prompt_of(6, 1), prompt_of(11, 2), prompt_of(17, 3)]
SIGNALS = pytest.mark.skipif(os.name != "posix", reason="sends itself a POSIX signal")


@contextmanager
def interrupt_after(seconds: float) -> Iterator[None]:
    """A real SIGINT to this process, from another thread."""
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


def still_right(llm: LLM) -> None:
    outputs = llm.generate([ids(*prompt) for prompt in PROMPTS], greedy(9), use_tqdm=False)
    assert tokens_of(outputs) == [reference(prompt, greedy(9)) for prompt in PROMPTS]
    assert_empty(llm)


@SIGNALS
@both_runners
@both_loops
@pytest.mark.parametrize("delay", [0.0, 0.004, 0.017, 0.05])
def test_ctrl_c_in_mid_step(runner: str, loop: str, delay: float) -> None:
    with tiny_llm(runner, loop) as llm:
        # Steps that last, so that the signal comes in the middle of one.
        forward = llm.core.runner.model

        def slow(*args: object, **kwargs: object) -> object:
            time.sleep(0.004)
            return forward(*args, **kwargs)

        with replaced_model(llm, forward=slow), pytest.raises(KeyboardInterrupt), interrupt_after(delay):
            llm.generate([ids(*prompt) for prompt in PROMPTS], greedy(44), use_tqdm=False)
            time.sleep(1)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert not llm.core.has_unfinished()
        llm.core.check_integrity()
        still_right(llm)


@SIGNALS
@both_runners
@both_loops
@pytest.mark.parametrize("phase", ["schedule", "update states", "prepare inputs", "forward", "sample", "output"])
def test_ctrl_c_in_each_phase(runner: str, loop: str, phase: str) -> None:
    """Sent from within the phase, it is raised when the step has ended: nothing is left half done."""
    with tiny_llm(runner, loop) as llm:
        for index, prompt in enumerate(PROMPTS):
            llm.add(ids(*prompt), greedy(9), request_id=f"r{index}")
        llm.step()
        method, owner = _where(llm, phase)
        original = getattr(owner, method)

        def interrupted(*args: object, **kwargs: object) -> object:
            setattr(owner, method, original)
            os.kill(os.getpid(), signal.SIGINT)
            return original(*args, **kwargs)

        setattr(owner, method, interrupted)
        step = llm.core.step_count
        with pytest.raises(KeyboardInterrupt):
            llm.step()
            llm.step()
        assert llm.core.step_count - step in (1, 2)
        llm.core.check_integrity()
        tokens: dict[str, tuple[int, ...]] = {}
        finished = set()
        while llm.core.has_unfinished() or llm.core._outputs:
            for output in llm.step():
                tokens[output.request_id] = output.outputs[0].token_ids
                finished |= {output.request_id} if output.finished else set()
        assert tokens == {f"r{i}": reference(prompt, greedy(9)) for i, prompt in enumerate(PROMPTS)}
        assert finished == tokens.keys()
        assert_empty(llm)


def _where(llm: LLM, phase: str) -> tuple[str, object]:
    core = llm.core
    return {
        "schedule": ("schedule", core.scheduler), "update states": ("update_states", core.runner),
        "prepare inputs": ("prepare_inputs", core.runner), "forward": ("forward", core.runner),
        "sample": ("sample_tokens", core.runner), "output": ("process", core.output_processor),
    }[phase]  # fmt: skip


@SIGNALS
@both_runners
@both_loops
def test_ctrl_c_loses_no_output_of_another_stream(runner: str, loop: str) -> None:
    """The step that one stream's reader interrupts may hold the last token of another's."""
    with tiny_llm(runner, loop) as llm:
        victim, other = llm.stream(ids(*PROMPTS[0]), greedy(30)), llm.stream(ids(*PROMPTS[1]), greedy(6))
        seen = [next(other)]
        next(victim)
        processed = llm.core.output_processor.process

        def interrupted(*args: object) -> list[RequestOutput]:
            outputs = processed(*args)
            if any(output.request_id == seen[0].request_id and output.finished for output in outputs):
                os.kill(os.getpid(), signal.SIGINT)
            return outputs

        llm.core.output_processor.process = interrupted
        with pytest.raises(KeyboardInterrupt):
            for _ in victim:
                pass
        llm.core.output_processor.process = processed
        with limited_steps(llm):
            seen += list(other)
        assert seen[-1].finished and seen[-1].outputs[0].token_ids == reference(PROMPTS[1], greedy(6))
        still_right(llm)


@SIGNALS
def test_a_deferred_interrupt_comes_after_the_block_and_only_once() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), deferred_interrupt():
        with deferred_interrupt():
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)
            done.append("inner")
        done.append("outer")
    assert done == ["inner", "outer"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_other_threads_may_step_an_engine() -> None:
    """Signals belong to the main thread; a step elsewhere just runs."""
    with tiny_llm("v2") as llm:
        results = []
        thread = threading.Thread(
            target=lambda: results.append(llm.generate(ids(*PROMPTS[0]), greedy(4), use_tqdm=False))
        )
        thread.start()
        thread.join(30)
        assert tokens_of(results[0]) == [reference(PROMPTS[0], greedy(4))]
