"""Host waits: runner V2 makes none inside a step, observed or not; runner V1 makes exactly the documented ones.

Counted twice: by the engine's own counter, and by stubs around every call that could wait for a device or read a value
from it. What the stream's worker thread does is the device's business and is not counted.
"""

from __future__ import annotations

import gc
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch

import engine.cpu_stream
from engine import LLM, SamplingParams
from engine.hooks import Event, HostWait, SpanEnded
from tests.engine.engine_helpers import TraceRequest, both_loops, greedy, prompt_of, reference, run_trace, tiny_llm

READS = (
    "item", "tolist", "cpu", "numpy", "nonzero", "to_list", "__bool__", "__int__", "__float__", "__index__",
    "__array__", "__iter__",
    "__len__", "__contains__", "__complex__", "__repr__", "masked_select", "unique", "storage", "equal", "allclose",
)  # fmt: skip
WAITS = (
    (engine.cpu_stream.CpuEvent, "synchronize"), (threading.Event, "wait"), (threading.Condition, "wait"),
    (threading.Thread, "join"),
)  # fmt: skip
FUNCTIONS = ("nonzero", "where", "equal", "allclose", "unique", "masked_select", "is_nonzero", "argwhere")


@contextmanager
def counted_waits() -> Iterator[Counter[str]]:
    """Counts calls, on this thread only, of everything that waits for the device or reads from it."""
    counts: Counter[str] = Counter()
    host = threading.current_thread()

    def counting(name: str, fn: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if threading.current_thread() is host:
                counts[name] += 1
            return fn(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in READS:
            if hasattr(torch.Tensor, name):
                patch.setattr(torch.Tensor, name, counting(f"Tensor.{name}", getattr(torch.Tensor, name)))
        for owner, name in WAITS:
            patch.setattr(owner, name, counting(f"{owner.__name__}.{name}", getattr(owner, name)))
        for name in FUNCTIONS:
            # torch.where with three arguments computes; with one it is nonzero.
            patch.setattr(torch, name, counting(f"torch.{name}", getattr(torch, name)))
        yield counts


@contextmanager
def counting_steps(llm: LLM) -> Iterator[Counter[str]]:
    """Counts within the runner's part of each step: state, inputs, forward, sample, and the empty step's."""
    gc.collect()  # an engine that another test has left ends its threads now, not inside a step
    total: Counter[str] = Counter()
    runner = llm.core.runner

    def wrapped(fn: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            with counted_waits() as counts:
                result = fn(*args)
            total.update(counts)
            return result

        return call

    names = ("update_states", "prepare_inputs", "forward", "sample_tokens", "finish_requests")
    for name in names:
        setattr(runner, name, wrapped(getattr(runner, name)))
    try:
        yield total
    finally:
        for name in names:
            delattr(runner, name)


def trace() -> list[TraceRequest]:
    """Prefill, chunks, decodes, every sampling feature, and (in few blocks) preemptions and resumptions."""
    features: list[SamplingParams] = [
        greedy(9),
        SamplingParams(temperature=0.9, top_k=7, seed=1, max_tokens=10, ignore_eos=True),
        SamplingParams(temperature=1.1, top_p=0.8, max_tokens=8, logprobs=2, ignore_eos=True),
        SamplingParams(
            temperature=0.7, min_p=0.05, seed=3, max_tokens=9, min_tokens=6, stop_token_ids=list(range(3, 60))
        ),
        greedy(7, logprobs=0, min_tokens=3, stop_token_ids=[4, 5]),
    ]
    return [
        TraceRequest(f"r{i}", tuple(prompt_of(5 + 4 * i, i)), params, arrival=2 * i)
        for i, params in enumerate(features)
    ]


CONFIG = {"max_num_batched_tokens": 11, "num_gpu_blocks_override": 13}


@both_loops
@pytest.mark.parametrize("observed", [False, True])
def test_v2_makes_no_host_wait_inside_a_step(loop: str, observed: bool) -> None:
    events: list[Event] = []
    pending = []
    with tiny_llm("v2", loop, **CONFIG) as llm, ExitStack() as stack:
        if observed:
            stack.enter_context(llm.hooks.subscribe(Event, events.append))
        counts = stack.enter_context(counting_steps(llm))

        def look(llm: LLM) -> None:
            if observed:
                pending.append(llm.core.snapshot())

        result = run_trace(llm, trace(), after_step=look)
        assert result.num_preemptions > 0
        assert counts == Counter()
        assert llm.core.device.waits.inside_step == {}
        assert llm.core.device.waits.outside_step.keys() == {"output"}
    if observed:
        assert {event.inside_step for event in events if isinstance(event, HostWait)} == {False}
        assert {event.lane for event in events if isinstance(event, SpanEnded)} == {"host", "compute", "copy"}
        assert [snapshot.result().runner for snapshot in pending] == ["v2"] * len(pending)
    # Being watched changes nothing: the greedy ones are right either way.
    for request in trace():
        if request.params.temperature == 0 and request.params.min_tokens == 0:
            assert result.tokens(request.request_id) == reference(request.prompt, request.params)


@pytest.mark.parametrize("observed", [False, True])
def test_v1_plain_waits_once_a_step_for_the_sampled_tokens(observed: bool) -> None:
    with tiny_llm("v1", "plain", **CONFIG) as llm, ExitStack() as stack:
        if observed:
            stack.enter_context(llm.hooks.subscribe(Event, lambda event: None))
        steps = _count_calls(llm, "sample_tokens")
        result = run_trace(llm, trace())
        assert result.num_preemptions > 0
        assert llm.core.device.waits.inside_step == {"sampled tokens": len(steps)}  # B
        assert llm.core.device.waits.outside_step == {}


@pytest.mark.parametrize("observed", [False, True])
def test_v1_overlapped_waits_once_a_step_for_its_input_buffers(observed: bool) -> None:
    with tiny_llm("v1", "overlapped", **CONFIG) as llm, ExitStack() as stack:
        if observed:
            stack.enter_context(llm.hooks.subscribe(Event, lambda event: None))
        steps = _count_calls(llm, "sample_tokens")
        empty = _count_calls(llm, "finish_requests")
        result = run_trace(llm, trace())
        assert result.num_preemptions > 0
        with_rows_leaving = [output for output in empty if output.finished_req_ids]
        # A: each step but the first, and of the empty ones those in which rows leave.
        assert llm.core.device.waits.inside_step == {"prepare_inputs": len(steps) - 1 + len(with_rows_leaving)}
        assert llm.core.device.waits.outside_step == {"output": len(steps)}


def _count_calls(llm: LLM, name: str) -> list[Any]:
    """The first argument of each call of the runner's method from now on; None for a call without."""
    calls: list[Any] = []
    method = getattr(llm.core.runner, name)

    def counted(*args: Any) -> Any:
        calls.append(args[0] if args else None)
        return method(*args)

    setattr(llm.core.runner, name, counted)
    return calls


@both_loops
def test_v1_makes_no_other_wait(loop: str) -> None:
    """Beside A or B, V1's host reads no device tensor: the stubs see one event a documented wait, no more."""
    with tiny_llm("v1", loop, **CONFIG) as llm, counting_steps(llm) as counts:
        run_trace(llm, trace())
        documented = sum(llm.core.device.waits.inside_step.values())
        assert counts["CpuEvent.synchronize"] == counts["Event.wait"] == documented
    allowed = {"CpuEvent.synchronize", "Event.wait", "Condition.wait"}
    # B reads the tokens that it has waited for: copies on the host, no tensor of the device.
    allowed |= {"Tensor.tolist", "Tensor.numpy"} if loop == "plain" else set()
    assert set(counts) <= allowed


@pytest.mark.parametrize("read", [
    lambda x: x[0].item(), lambda x: x.tolist(), lambda x: bool(x[0]), lambda x: int(x[0]), lambda x: x.nonzero(),
    lambda x: float(x[0]), lambda x: x.numpy(), lambda x: x.cpu(), lambda x: list(range(5))[x[0]],
    lambda x: torch.nonzero(x),
    lambda x: engine.cpu_stream.CpuEvent.synchronize(_set_event()), lambda x: list(x),
])  # fmt: skip
def test_the_stub_sees_a_read(read: Callable[[torch.Tensor], object]) -> None:
    x = torch.tensor([1, 2])
    with counted_waits() as counts:
        read(x)
    assert sum(counts.values()) > 0


def _set_event() -> engine.cpu_stream.CpuEvent:
    event = engine.cpu_stream.CpuEvent()
    event.set()
    return event


def test_the_stub_does_not_see_the_worker_thread() -> None:
    x = torch.tensor([1, 2])
    with counted_waits() as counts:
        thread = threading.Thread(target=lambda: (x.tolist(), x[0].item()))
        thread.start()
        while thread.is_alive():
            pass
    assert not {name for name in counts if name.startswith("Tensor")}
