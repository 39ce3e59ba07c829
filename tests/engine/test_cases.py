"""Traps that real engines fell into, by their number in the list of cases: T4, T6, T8, T9, T25, and their kin."""

from __future__ import annotations

import pytest
import torch

from engine import SamplingParams
from engine.hooks import RequestPreempted, RequestResumed, RequestScheduled
from tests.engine.engine_helpers import (
    LOOPS,
    RUNNERS,
    TraceRequest,
    both_loops,
    both_runners,
    greedy,
    ids,
    make_llm,
    prompt_of,
    reference,
    replaced_model,
    run_trace,
    tiny_llm,
    tokens_of,
)
from tests.engine.snapshot_truth import assert_truthful

# -- T4: preempted and resumed ---------------------------------------------------------------------------------------


@both_runners
@both_loops
@pytest.mark.parametrize("caching", [True, False])
def test_t4_a_resumed_request_has_its_new_blocks_and_no_old_one(runner: str, loop: str, caching: bool) -> None:
    events: list[RequestPreempted | RequestResumed | RequestScheduled] = []
    types = (RequestPreempted, RequestResumed, RequestScheduled)
    prompts = [prompt_of(10, 1), prompt_of(10, 2), prompt_of(6, 3)]
    blocks_before: dict[str, list[int]] = {}
    resumed_with_other_blocks = 0
    config = {"num_gpu_blocks_override": 9, "enable_prefix_caching": caching}
    with tiny_llm(runner, loop, **config) as llm, llm.hooks.subscribe(types, events.append):
        for index, prompt in enumerate(prompts):
            llm.add(ids(*prompt), greedy(12), request_id=f"r{index}")
        tokens = {}
        while llm.core.has_unfinished():
            seen = len(events)
            for output in llm.step():
                tokens[output.request_id] = output.outputs[0].token_ids
            assert_truthful(llm)
            for event in events[seen:]:
                if isinstance(event, RequestScheduled) and event.kind == "resumed":
                    assert event.num_computed_tokens == event.num_cached_tokens
            for request in llm.core.scheduler.running:
                now = llm.core.scheduler.kv_cache.block_ids(request.request_id)
                before = blocks_before.get(request.request_id, now)
                resumed_with_other_blocks += now[: len(before)] != before
                blocks_before[request.request_id] = now
    assert any(isinstance(event, RequestPreempted) for event in events)
    assert any(isinstance(event, RequestResumed) for event in events)
    # Without a cache to find its old blocks in, a resumed request gets others.
    assert caching or resumed_with_other_blocks > 0
    assert [tokens[f"r{i}"] for i in range(3)] == [reference(prompt, greedy(12)) for prompt in prompts]


# -- T6: chunks beside a decode --------------------------------------------------------------------------------------


@both_runners
def test_t6_only_the_chunk_that_completes_the_prompt_reserves_a_token(runner: str) -> None:
    scheduled: list[RequestScheduled] = []
    first, second = prompt_of(4, 3), prompt_of(20, 4)
    with (
        tiny_llm(runner, "overlapped", max_num_batched_tokens=8, max_num_seqs=4) as llm,
        llm.hooks.subscribe(RequestScheduled, scheduled.append),
    ):
        llm.add(ids(*first), greedy(12), request_id="decoding")
        llm.step()
        llm.add(ids(*second), greedy(1), request_id="prompt")
        placeholders, tokens = [], {}
        while llm.core.has_unfinished():
            for output in llm.step():
                tokens[output.request_id] = output.outputs[0].token_ids
            request = llm.core.scheduler.requests.get("prompt")
            if request is not None:
                placeholders.append(request.num_output_placeholders)
    assert [e.num_tokens for e in scheduled if e.request_id == "prompt"] == [7, 7, 6]
    assert placeholders[:3] == [0, 0, 1]
    assert tokens == {"decoding": reference(first, greedy(12)), "prompt": reference(second, greedy(1))}
    assert len(tokens["prompt"]) == 1


# -- T8: padding -----------------------------------------------------------------------------------------------------


def test_t8_a_padded_step_writes_no_slot_of_its_padding() -> None:
    """Three decodes run at the size of four. A sentinel in the cache shows each slot that was written."""
    sentinel = 7.25
    logits: dict[tuple[int, ...], list[torch.Tensor]] = {}
    prompts = [prompt_of(5, seed) for seed in (1, 2, 3)]
    for sizes in ((), (4,)):
        with tiny_llm("v2", "plain", cudagraph_capture_sizes=sizes, max_num_seqs=4) as llm:
            seen = logits.setdefault(sizes, [])
            compute = llm.core.runner.model.compute_logits
            with replaced_model(
                llm, compute_logits=lambda h, seen=seen, compute=compute: seen.append(compute(h)) or seen[-1]
            ):
                for prompt in prompts:
                    llm.add(ids(*prompt), greedy(6))
                llm.step()
                for _ in range(3):
                    cache = llm.core.worker.kv_cache
                    before = cache.clone()
                    owned = [
                        b
                        for r in llm.core.scheduler.running
                        for b in llm.core.scheduler.kv_cache.block_ids(r.request_id)
                    ]
                    free = [b for b in range(cache.shape[2]) if b not in owned]
                    cache[:, :, free] = sentinel
                    llm.step()
                    batch = llm.core.snapshot().result().inputs
                    assert batch is not None and (batch.num_tokens, batch.num_tokens_padded) == (3, 4 if sizes else 3)
                    assert batch.slot_mapping == (*batch.slot_mapping[:3], *((-1,) if sizes else ()))
                    _check_only_slots_changed(cache, before, batch.slot_mapping[:3], free, sentinel)
    for plain, padded in zip(logits[()], logits[4,], strict=True):
        assert plain.shape == padded.shape
        torch.testing.assert_close(plain, padded, rtol=0, atol=2e-5)
        assert torch.equal(plain.argmax(-1), padded.argmax(-1))


def _check_only_slots_changed(
    cache: torch.Tensor, before: torch.Tensor, slots: tuple[int, ...], free: list[int], sentinel: float
) -> None:
    block_size = cache.shape[3]
    expected = before.clone()
    expected[:, :, free] = sentinel
    for slot in slots:
        place = (slice(None), slice(None), slot // block_size, slot % block_size)
        assert not torch.equal(cache[place], expected[place]), f"slot {slot} was not written"
        expected[place] = cache[place]
    # All else is as it was: slot -1, the last of the cache, above all.
    assert torch.equal(cache, expected)
    assert bool((cache[:, :, -1, -1] == sentinel).all())


@pytest.mark.parametrize("num_decodes", [1, 2, 3, 4, 5])
def test_t8_padding_to_any_size_changes_no_token(num_decodes: int) -> None:
    prompts = [prompt_of(4 + seed, seed) for seed in range(num_decodes)]
    with tiny_llm("v2", cudagraph_capture_sizes=(2, 4, 8)) as llm:
        outputs = llm.generate([ids(*prompt) for prompt in prompts], greedy(8), use_tqdm=False)
    assert tokens_of(outputs) == [reference(prompt, greedy(8)) for prompt in prompts]


# -- T9: full prefix hits --------------------------------------------------------------------------------------------


@both_runners
@both_loops
@pytest.mark.parametrize(("length", "hit"), [(32, 16), (33, 32), (31, 16), (48, 32), (16, 0), (17, 16)])
def test_t9_a_hit_leaves_at_least_one_token_to_compute(runner: str, loop: str, length: int, hit: int) -> None:
    prompt = prompt_of(length, 9)
    scheduled: list[RequestScheduled] = []
    with tiny_llm(runner, loop, block_size=16, num_gpu_blocks_override=20) as llm:
        first = llm.generate(ids(*prompt), greedy(6), use_tqdm=False)[0]
        with llm.hooks.subscribe(RequestScheduled, scheduled.append):
            second = llm.generate(ids(*prompt), greedy(6), use_tqdm=False)[0]
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, hit)
    assert (scheduled[0].num_computed_tokens, scheduled[0].num_tokens) == (hit, length - hit)
    assert first.outputs[0].token_ids == second.outputs[0].token_ids == reference(prompt, greedy(6))


@both_runners
@both_loops
def test_t9_prefixes_are_found_in_answers_too(runner: str, loop: str) -> None:
    """A conversation: the next prompt is the last one and its answer. All but the last token of it can hit."""
    with tiny_llm(runner, loop, num_gpu_blocks_override=40) as llm:
        prompt, hits = prompt_of(7), []
        for _ in range(4):
            output = llm.generate(ids(*prompt), greedy(6), use_tqdm=False)[0]
            assert output.outputs[0].token_ids == reference(prompt, greedy(6))
            hits.append(output.num_cached_tokens)
            prompt = [*prompt, *output.outputs[0].token_ids, 5]
    assert hits == [0, 12, 16, 24]


# -- T25 with everything at once; the random ones are in test_property.py --------------------------------------------


@pytest.mark.slow
def test_t25_one_trace_on_every_runner_and_loop() -> None:
    trace = [
        TraceRequest(
            f"r{i}", tuple([*prompt_of(8, 1), *prompt_of(1 + 3 * i, i)]), greedy(4 + 3 * i), arrival=i, priority=-i
        )
        for i in range(5)
    ]
    seen = {}
    for runner in RUNNERS:
        for loop in LOOPS:
            llm = make_llm(
                runner, loop, max_num_batched_tokens=9, num_gpu_blocks_override=12, scheduling_policy="priority"
            )
            try:
                result = run_trace(llm, trace)
            finally:
                llm.close()
            assert result.num_preemptions > 0 and result.num_cached_tokens > 0
            seen[runner, loop] = {name: output.outputs[0].token_ids for name, output in result.outputs.items()}
    right = {request.request_id: reference(request.prompt, request.params) for request in trace}
    assert seen == dict.fromkeys(seen, right)


@pytest.mark.parametrize("form", ["loop", "torch", pytest.param("interpret", marks=pytest.mark.slow)])
def test_t25_every_form_of_the_kernels_gives_the_same_tokens(form: str) -> None:
    """Chunks, decodes, a preemption, greedy and sampled, through the whole engine."""
    sampled = SamplingParams(temperature=1.1, top_k=9, seed=3, max_tokens=5, ignore_eos=True)
    trace = [TraceRequest(f"r{i}", tuple(prompt_of(9, i)), greedy(5) if i < 2 else sampled) for i in range(3)]
    config = {"max_num_batched_tokens": 12, "num_gpu_blocks_override": 9, "max_num_seqs": 4}
    with tiny_llm("v2", **config) as llm:
        expected = run_trace(llm, trace)
    with tiny_llm("v2", kernel_backend=form, **config) as llm:
        result = run_trace(llm, trace)
    assert expected.num_preemptions > 0
    assert {r.request_id: result.tokens(r.request_id) for r in trace} == {
        r.request_id: expected.tokens(r.request_id) for r in trace
    }
