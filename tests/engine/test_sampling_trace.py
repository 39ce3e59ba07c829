"""A watched draw: the same tokens as an unwatched one, no host wait more, and the race that it shows is the race."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from engine import LLM, SamplingParams
from engine.device import Device
from engine.hooks import Event, Hooks, Sampled, SamplingTraced
from engine.runner_v1.input_batch import CachedRequestState, InputBatch
from engine.runner_v1.sampler import sample
from engine.runner_v1.step_sampling import make_step_sampling
from engine.runner_v1.trace import sample_traced
from engine.sample.logits_processors import LogitsProcessor, LogitsRows
from engine.sample.order import ORDER
from engine.sample.trace import MODEL, read_traces
from tests.engine.engine_helpers import VOCAB, both_loops, both_runners, ids, prompt_of, run_trace, tiny_llm
from tests.engine.engine_helpers import TraceRequest as Request
from tests.kernels.test_no_host_wait import NoHostWait, forbid_waits


class Favour(LogitsProcessor):
    """One token gets a bonus."""

    def apply(self, logits: torch.Tensor, rows: LogitsRows) -> torch.Tensor:
        logits[:, 17] += 1.5
        return logits


SHORT: dict[str, Any] = {"max_tokens": 7, "ignore_eos": True}
TRACE = [
    Request("greedy", tuple(prompt_of(5)), SamplingParams(temperature=0, **SHORT)),
    Request("plain", tuple(prompt_of(6)), SamplingParams(temperature=0.9, **SHORT)),
    Request("seeded", tuple(prompt_of(19)), SamplingParams(temperature=1.3, seed=3, top_p=0.7, **SHORT)),
    Request("filtered", tuple(prompt_of(4)), SamplingParams(top_k=20, min_p=0.02, logprobs=2, **SHORT), arrival=2),
    Request(
        "everything", tuple(prompt_of(9)), SamplingParams(
            temperature=0.7, frequency_penalty=0.4, logit_bias={5: 3.0}, min_tokens=4, stop_token_ids=(8,),
            bad_words_token_ids=((11,),), logits_processors=(Favour(),), prompt_logprobs=1, **SHORT,
        ), arrival=3,
    ),
]  # fmt: skip
SMALL: dict[str, Any] = {"max_num_batched_tokens": 9, "num_gpu_blocks_override": 14}


def _watched(runner: str, loop: str) -> tuple[dict[str, tuple[int, ...]], list[Any], dict[str, int], dict[str, int]]:
    events: list[Event] = []
    with (
        tiny_llm(runner, loop, **SMALL) as llm,
        llm.hooks.subscribe((Sampled, SamplingTraced), events.append),
    ):
        result = run_trace(llm, TRACE)
        waits = llm.core.device.waits
        tokens = {request.request_id: result.tokens(request.request_id) for request in TRACE}
        return tokens, events, dict(waits.inside_step), dict(waits.outside_step)


@both_runners
@both_loops
def test_watching_changes_no_token_and_adds_no_wait(runner: str, loop: str) -> None:
    tokens, events, inside, outside = _watched(runner, loop)
    with tiny_llm(runner, loop, **SMALL) as llm:
        alone = run_trace(llm, TRACE)
        assert alone.num_preemptions > 0, "the case is meant to have a request that comes back"
        assert tokens == {request.request_id: alone.tokens(request.request_id) for request in TRACE}
        assert (inside, outside) == (llm.core.device.waits.inside_step, llm.core.device.waits.outside_step)
    if runner == "v2":
        assert not inside
    sampled, traced = events[::2], events[1::2]
    assert len(sampled) == sum(map(len, tokens.values()))
    for told, seen in itertools.zip_longest(sampled, traced):
        assert (type(told), type(seen)) == (Sampled, SamplingTraced)
        assert (told.request_id, told.position, told.sampled_in_step, told.token_id) == (
            seen.request_id, seen.position, seen.sampled_in_step, seen.trace.sampled,
        )  # fmt: skip


@both_runners
def test_a_trace_shows_the_race_that_was_run(runner: str) -> None:
    _, events, _, _ = _watched(runner, "overlapped")
    for event in events[1::2]:
        trace = event.trace
        last = trace.stages[-1].logits
        scores = [float("-inf") if x is None else x + n for x, n in zip(last, trace.noise, strict=True)]
        assert trace.token_ids[max(range(len(scores)), key=scores.__getitem__)] == trace.sampled
        assert trace.greedy == (event.request_id == "greedy")
        stages = [name for stage in trace.stages[1:] for name in stage.stage]
        assert trace.stages[0].stage == MODEL and stages == [name for name in ORDER if name in stages]
        assert all(0 < stage.mass_left <= 1 + 1e-5 for stage in trace.stages)


@both_runners
def test_a_seeded_noise_comes_from_seed_and_position(runner: str) -> None:
    """V2's noise of a position is the same whatever was drawn before; V1's generator gives the n-th draw the n-th."""
    params = SamplingParams(seed=5, max_tokens=4, ignore_eos=True)

    def noises(prompt: list[int]) -> list[dict[int, float]]:
        events: list[Any] = []
        with tiny_llm(runner) as llm, llm.hooks.subscribe(SamplingTraced, events.append):
            llm.generate(ids(*prompt), params, use_tqdm=False)
        return [dict(zip(event.trace.token_ids, event.trace.noise, strict=True)) for event in events]

    short, long = noises(prompt_of(5)), noises(prompt_of(7))
    shift = 0 if runner == "v1" else 2  # draw 0 of the long prompt stands where draw 2 of the short one does
    pairs = list(zip(short[shift:], long, strict=False))
    common = [(a[t], b[t]) for a, b in pairs for t in a.keys() & b.keys()]
    assert common and all(x == pytest.approx(y, abs=1e-5) for x, y in common)


def test_who_watches_everything_watches_no_draw_unless_asked() -> None:
    def kinds(*types: type[Event]) -> set[type[Event]]:
        events: list[Event] = []
        with tiny_llm("v2") as llm, llm.hooks.subscribe(types, events.append):
            _generate(llm)
        return {type(event) for event in events}

    assert SamplingTraced not in kinds(Event)
    assert kinds(SamplingTraced) == {SamplingTraced}
    assert {SamplingTraced, Sampled} < kinds(Event, SamplingTraced)


def _generate(llm: LLM) -> None:
    llm.generate(ids(*prompt_of(5)), SamplingParams(max_tokens=2), use_tqdm=False)


def test_a_trace_of_v1_waits_for_nothing_and_leaves_the_draw_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = InputBatch(Device(torch.device("cpu"), Hooks("v1")), len(TRACE), 64, 8, vocab_size=VOCAB)
    for request in TRACE:
        p = request.params
        batch.add_request(
            CachedRequestState(
                request.request_id, list(request.prompt), [11], [1], 0, p, frozenset(p.stop_token_ids), generator=None
            )
        )
    batch.refresh_metadata()
    batch.device.drain()
    metadata, step = batch.sampling_metadata, make_step_sampling(batch, frozenset())
    assert metadata is not None
    logits = torch.randn(len(TRACE), VOCAB, generator=torch.Generator().manual_seed(1)) * 3
    plain = sample(logits.clone(), metadata, step, torch.Generator().manual_seed(2))
    with monkeypatch.context() as patch, torch.inference_mode(), NoHostWait("cpu"):
        forbid_waits(patch)
        output, tensors = sample_traced(logits, metadata, step, torch.Generator().manual_seed(2))
    assert torch.equal(output.sampled, plain.sampled)
    traces = read_traces({name: tensor.numpy() for name, tensor in tensors.items()}, [r.request_id for r in TRACE], {1})
    assert traces is not None and "plain" not in traces and traces["greedy"].greedy
    assert [trace.sampled for trace in traces.values()] == [int(plain.sampled[i]) for i in (0, 2, 3, 4)]
    for trace in traces.values():
        scores = [-9e9 if x is None else x + n for x, n in zip(trace.stages[-1].logits, trace.noise, strict=True)]
        assert trace.token_ids[scores.index(max(scores))] == trace.sampled
