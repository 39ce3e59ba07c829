"""Tiny engines, request traces, and the reference they are held to."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Any

import pytest
import torch

from engine import LLM, RequestOutput, SamplingParams
from engine.models import LoadedModel, load_model

RUNNERS = ("v1", "v2")
LOOPS = ("plain", "overlapped")
VOCAB = 384
EOS = 2

both_runners = pytest.mark.parametrize("runner", RUNNERS)
both_loops = pytest.mark.parametrize("loop", LOOPS)


@cache
def tiny_model(name: str = "tiny-llama", dtype: torch.dtype = torch.float32) -> LoadedModel:
    return load_model(name, dtype=dtype, device=torch.device("cpu"), load_format="dummy")


def make_llm(runner: str = "v2", loop: str = "overlapped", loaded: LoadedModel | None = None, **kwargs: Any) -> LLM:
    """A tiny engine on shared weights; every keyword of `LLM` may be given."""
    defaults: dict[str, Any] = {
        "max_model_len": 64, "block_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 64,
        "num_gpu_blocks_override": 129,
    }  # fmt: skip
    return LLM(
        loaded=loaded or tiny_model(), use_v2_model_runner=runner == "v2", async_scheduling=loop == "overlapped",
        **(defaults | kwargs),
    )  # fmt: skip


def close(llm: LLM) -> None:
    """Ends the threads, as `LLM.close`, without its collection of garbage: a tenth of a second, hundreds of times."""
    llm.core.device.close()


@contextmanager
def tiny_llm(runner: str = "v2", loop: str = "overlapped", **kwargs: Any) -> Iterator[LLM]:
    llm = make_llm(runner, loop, **kwargs)
    try:
        yield llm
    finally:
        close(llm)


def greedy(max_tokens: int = 8, **kwargs: Any) -> SamplingParams:
    return SamplingParams(**({"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True} | kwargs))


def ids(*token_ids: int) -> dict[str, list[int]]:
    return {"prompt_token_ids": list(token_ids)}


def prompt_of(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(3, VOCAB, (length,), generator=generator).tolist()


def tokens_of(outputs: Iterable[RequestOutput]) -> list[tuple[int, ...]]:
    return [output.outputs[0].token_ids for output in outputs]


def note_drafts(llm: LLM) -> list[dict[str, list[int]]]:
    """Will hold the drafts that runner V1 gives the scheduler, of each step from now on, by request."""
    noted: list[dict[str, list[int]]] = []
    take = llm.core.runner.take_draft_token_ids

    def taken() -> dict[str, list[int]]:
        noted.append(take())
        return noted[-1]

    llm.core.runner.take_draft_token_ids = taken  # type: ignore[method-assign]
    return noted


@cache
def _reference_llm(name: str) -> LLM:
    return make_llm("v1", "plain", tiny_model(name), enable_prefix_caching=False, max_num_seqs=1)


@lru_cache(maxsize=4096)
def _reference(prompt: tuple[int, ...], params: SamplingParams, name: str) -> tuple[int, ...]:
    return _reference_llm(name).generate(ids(*prompt), params, use_tqdm=False)[0].outputs[0].token_ids


def reference(prompt: Iterable[int], params: SamplingParams, name: str = "tiny-llama") -> tuple[int, ...]:
    """The right greedy answer: the request alone, on the plain loop, nothing cached."""
    return _reference(tuple(prompt), params, name)


@dataclass(frozen=True)
class TraceRequest:
    """`arrival` and `abort_at` count the steps of the trace from 0."""

    request_id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    arrival: int = 0
    abort_at: int | None = None
    priority: int = 0


@dataclass
class TraceResult:
    outputs: dict[str, RequestOutput] = field(default_factory=dict)
    num_steps: int = 0

    def tokens(self, request_id: str) -> tuple[int, ...]:
        output = self.outputs.get(request_id)
        return output.outputs[0].token_ids if output else ()

    @property
    def num_preemptions(self) -> int:
        return sum(output.metrics.num_preemptions for output in self.outputs.values())

    @property
    def num_cached_tokens(self) -> int:
        return sum(output.num_cached_tokens for output in self.outputs.values())


def run_trace(
    llm: LLM, trace: Iterable[TraceRequest], after_step: Callable[[LLM], None] | None = None, limit: int = 3000
) -> TraceResult:
    """Adds and aborts at the right steps, checks every book after each step, and that nothing is left at the end."""
    result = TraceResult()
    to_come = sorted(trace, key=lambda request: request.arrival)
    aborts = [request for request in to_come if request.abort_at is not None]
    while to_come or llm.core.has_unfinished() or llm.core.in_flight:
        assert result.num_steps < limit, "no end"
        while to_come and to_come[0].arrival <= result.num_steps:
            request = to_come.pop(0)
            llm.add(ids(*request.prompt), request.params, request_id=request.request_id, priority=request.priority)
        llm.abort([request.request_id for request in aborts if request.abort_at == result.num_steps])
        for output in llm.step():
            result.outputs[output.request_id] = output
        result.num_steps += 1
        llm.core.check_integrity()
        if after_step is not None:
            after_step(llm)
    assert_empty(llm)
    return result


def assert_empty(llm: LLM) -> None:
    """No request, block or row is left behind."""
    core = llm.core
    while core.scheduler.has_requests() or core.in_flight:
        assert not core.scheduler.requests, f"requests left: {list(core.scheduler.requests)}"
        core.step()
    core.check_integrity()
    pool = core.scheduler.kv_cache
    assert pool.num_free_blocks == pool.num_usable_blocks
    assert not core.in_flight and not core.output_processor.child_ids("any")
    assert not core.output_processor._parents and not core.output_processor._children
    if core.use_v2:
        assert not core.runner.req_states.req_id_to_index
        assert len(core.runner.req_states.free_indices) == core.runner.max_num_reqs
    else:
        assert not core.runner.states.requests
        assert core.runner.input_batch.num_reqs == 0 and core.runner.input_batch.req_ids == []


@contextmanager
def limited_steps(llm: LLM, limit: int = 200) -> Iterator[None]:
    """A loop that waits for an output which never comes fails instead of going on for ever."""
    step, number = llm.core.step, itertools.count()

    def counted() -> list[RequestOutput]:
        assert next(number) < limit, f"no end after {limit} steps"
        return step()

    llm.core.step = counted
    try:
        yield
    finally:
        llm.core.step = step


class _ModelProxy:
    def __init__(self, model: Any, forward: Callable[..., Any], compute_logits: Callable[..., Any]) -> None:
        self._model, self._forward, self.compute_logits = model, forward, compute_logits

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


@contextmanager
def replaced_model(
    llm: LLM, *, forward: Callable[..., Any] | None = None, compute_logits: Callable[..., Any] | None = None
) -> Iterator[Any]:
    """Another forward or another way to the logits, for this engine alone; gives the model itself."""
    model = llm.core.runner.model
    llm.core.runner.model = _ModelProxy(model, forward or model, compute_logits or model.compute_logits)
    try:
        yield model
    finally:
        llm.core.runner.model = model
