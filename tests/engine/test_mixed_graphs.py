"""Captured steps of any batch, imitated on a CPU: prompts, chunks, decodes and drafts, as if launched piece by
piece."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine import SamplingParams
from engine.hooks import SamplingTraced
from engine.runner_v2.output_turns import OutputTurns
from kernels import SampledStep, StateRows, finish_step
from tests.engine.drafters import CIRCUMSTANCES, PROMPTS, itself, lookup, ngram, one_head
from tests.engine.engine_helpers import TraceRequest, both_loops, greedy, ids, prompt_of, reference, run_trace, tiny_llm
from tests.engine.replays import repeat_instead_of_capture

SIZES = {"cudagraph_capture_sizes": (1, 2, 4, 8)}


def test_a_prompt_and_decodes_run_as_one_captured_step(monkeypatch: pytest.MonkeyPatch) -> None:
    pools = repeat_instead_of_capture(monkeypatch)
    trace = [TraceRequest(f"r{i}", tuple(prompt_of(3 + 7 * i, i)), greedy(9 + i), arrival=i) for i in range(5)]
    with tiny_llm("v2", **SIZES, max_num_batched_tokens=16) as llm:
        result = run_trace(llm, trace)
        sizes = {size for size in llm.core.runner.graphs.work if size.is_mixed}
        steps = llm.core.step_count
    assert {(size.num_reqs, size.num_tokens) for size in sizes} == {(8, 16)}
    for request in trace:
        assert result.tokens(request.request_id) == reference(request.prompt, request.params)
    # All but those at the end that had nothing to compute.
    assert pools[-1].num_replays >= steps - 3


def test_what_a_captured_step_cannot_do_is_launched_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    pools = repeat_instead_of_capture(monkeypatch)
    prompt = prompt_of(9)
    with tiny_llm("v2", **SIZES) as llm:
        for params in (greedy(1, prompt_logprobs=2), greedy(1, logprobs=1), greedy(1, repetition_penalty=1.2)):
            (output,) = llm.generate(ids(*prompt), params, use_tqdm=False)
            assert len(output.outputs[0].token_ids) == 1
        assert pools[-1].num_replays == 0
        with llm.hooks.subscribe(SamplingTraced, lambda event: None):
            llm.generate(ids(*prompt_of(8)), greedy(2), use_tqdm=False)
        assert pools[-1].num_replays == 0
        llm.generate(ids(*prompt_of(7)), SamplingParams(max_tokens=3, top_k=5, ignore_eos=True), use_tqdm=False)
    assert pools[-1].num_replays >= 3


def test_an_output_stays_until_the_replay_after_the_next() -> None:
    turns = OutputTurns(num_rows=3, width=2, device=torch.device("cpu"), confidences=torch.rand(4, 2))
    zeros, starts = torch.zeros(4, dtype=torch.int32), torch.arange(4, dtype=torch.int32)
    rows = StateRows(zeros.clone(), torch.zeros(4, 1).long(), zeros.clone(), torch.zeros(4, 99).int(), zeros)

    def replay(step: int) -> list[int]:
        """What is put into the next place: tokens, and their counts in the halves of two words more."""
        sampled, counts = torch.full((3, 2), step), torch.tensor([1, 2, 1], dtype=torch.int32)
        finish_step(SampledStep(starts[:3], starts, zeros, starts, sampled, counts), rows, turns.places)
        return [step] * 6 + [1 + (2 << 32), 1]

    replay(9)
    turns.start()
    outputs: list[torch.Tensor] = []
    expected: list[list[int]] = []
    for step in range(5):
        expected.append(replay(step))
        output = turns.last()
        outputs.append(output["tokens"])
        assert torch.equal(output["confidences"], turns.places.confidence_rows[:3])
        assert outputs[step].tolist() == expected[step]
        assert step == 0 or outputs[step - 1].tolist() == expected[step - 1]


@pytest.mark.slow
@pytest.mark.parametrize("circumstances", ["together", "chunks", "few blocks", "small blocks"])
@pytest.mark.parametrize("spec", [ngram, itself, one_head, lookup], ids=lambda spec: spec.__name__)
@both_loops
def test_drafts_of_every_kind(loop: str, spec: Any, circumstances: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pools = repeat_instead_of_capture(monkeypatch)
    trace = [TraceRequest(f"r{i}", tuple(prompt), greedy(20 + i), arrival=i % 4) for i, prompt in enumerate(PROMPTS)]
    keywords = spec(3) | CIRCUMSTANCES[circumstances]
    sizes = tuple(n for n in (1, 2, 4, 8) if n <= keywords.get("max_num_seqs", 8))
    with tiny_llm("v2", loop, **keywords, cudagraph_capture_sizes=sizes) as llm:
        result = run_trace(llm, trace)
        assert llm.core.device.waits.inside_step == {}
        llm.core.check_integrity()
    assert pools[-1].num_replays >= 10
    for request in trace:
        assert result.tokens(request.request_id) == reference(request.prompt, request.params)


@pytest.mark.usefixtures("few_splits")
@pytest.mark.parametrize("spec", [None, one_head], ids=["no drafts", "one head"])
def test_the_kernels_that_a_gpu_runs(spec: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pools = repeat_instead_of_capture(monkeypatch)
    trace = [TraceRequest(f"r{i}", tuple(prompt_of(3 + i, i)), greedy(3 + i), arrival=i) for i in range(3)]
    keywords = {"max_num_seqs": 4, "max_num_batched_tokens": 8, "cudagraph_capture_sizes": (2, 4)}
    with tiny_llm("v2", **keywords, **(spec(1) if spec else {}), kernel_backend="interpret") as llm:
        result = run_trace(llm, trace)
    assert pools[-1].num_replays >= 5
    for request in trace:
        assert result.tokens(request.request_id) == reference(request.prompt, request.params)
