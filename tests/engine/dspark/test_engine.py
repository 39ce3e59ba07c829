"""DSpark in the engine: golden rounds of the published design, and answers that are those without drafts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from engine import LLM
from engine.runner_v2 import step_costs
from tests.engine.dspark.golden import HEADS, ROOT, golden
from tests.engine.engine_helpers import LOOPS, TraceRequest, both_loops, greedy, ids, prompt_of, run_trace
from tests.engine.replays import repeat_instead_of_capture

pytestmark = pytest.mark.slow

MODEL = {"max_model_len": 96, "max_num_seqs": 5, "max_num_batched_tokens": 64, "num_gpu_blocks_override": 200}


@contextmanager
def engine(head: str, loop: str, drafts: bool = True, **kwargs: Any) -> Iterator[LLM]:
    spec = {"method": "dspark", "model": str(ROOT / head / "draft")}
    keywords = MODEL | {"block_size": 4} | ({"speculative_config": spec} if drafts else {}) | kwargs
    llm = LLM(
        str(ROOT / head / "target"), dtype="float32", skip_tokenizer_init=True,
        async_scheduling=loop == "overlapped", **keywords,
    )  # fmt: skip
    try:
        yield llm
    finally:
        llm.close()


@pytest.mark.parametrize("head", HEADS)
@both_loops
def test_the_golden_rounds_through_the_engine(head: str, loop: str) -> None:
    """Eight rounds of the reference implementation: the same drafts, as many accepted, and the same text."""
    values = golden(head).values
    prompt, sequence = values["prompt"].tolist(), values["sequence"].tolist()
    accepted = [int(values[f"round{k}.num_accepted"]) for k in range(8)]
    with engine(head, loop) as llm:
        seen: list[torch.Tensor] = []
        decoder = llm.core.runner.decoder
        propose = decoder.propose

        def spying(step: Any) -> torch.Tensor:
            drafts = propose(step)
            seen.append(drafts.clone())
            return drafts

        decoder.propose = spying
        wanted = len(sequence) - len(prompt)
        (output,) = llm.generate(ids(*prompt), greedy(wanted + decoder.num_drafts + 1), use_tqdm=False)
        llm.core.drain()
        assert llm.core.device.waits.inside_step == {}
    tokens = list(output.outputs[0].token_ids)
    assert tokens[:wanted] == sequence[len(prompt) :]
    assert list(output.metrics.accepted_per_round[:8]) == accepted
    drafts = [own[0].tolist() for own in seen if (own >= 0).any()]
    for k in range(8):
        assert drafts[k] == values[f"round{k}.draft_tokens"].tolist(), k


@pytest.mark.parametrize(
    "circumstances",
    [{}, {"max_num_batched_tokens": 9, "max_num_seqs": 5}, {"num_gpu_blocks_override": 26}, {"max_num_seqs": 1}],
    ids=["together", "chunks", "few blocks", "one row"],
)
@both_loops
def test_greedy_answers_are_those_without_drafts(loop: str, circumstances: dict[str, Any]) -> None:
    """With prefix hits: the prompts are beginnings of one text, which the draft knows, and of others."""
    vocab, sequence = golden("vanilla").target.config.vocab_size, golden("vanilla").sequence
    prompts = [sequence[:length] for length in (3, 9, 14, 20)]
    prompts += [[token % vocab for token in prompt_of(length, length)] for length in (5, 12, 19, 30)]
    trace = [TraceRequest(f"r{i}", tuple(prompt), greedy(20 + i), i % 5) for i, prompt in enumerate(prompts)]
    results = []
    for drafts in (False, True):
        with engine("vanilla", loop, drafts, **circumstances) as llm:
            results.append(run_trace(llm, trace))
    plain, drafted = results
    for request in trace:
        assert drafted.tokens(request.request_id) == plain.tokens(request.request_id)
    assert sum(output.metrics.num_accepted_tokens for output in drafted.outputs.values()) > 10
    if not circumstances:
        assert drafted.num_cached_tokens > 0


@pytest.mark.parametrize("loop", LOOPS)
def test_fewer_drafts_than_the_block_has_are_its_first(loop: str) -> None:
    values = golden("vanilla").values
    prompt = values["prompt"].tolist()
    answers = []
    for count in (1, 3, None):
        spec = {"method": "dspark", "model": str(ROOT / "vanilla" / "draft")}
        spec |= {"num_speculative_tokens": count} if count else {}
        with engine("vanilla", loop, speculative_config=spec) as llm:
            (output,) = llm.generate(ids(*prompt), greedy(24), use_tqdm=False)
        answers.append(output)
        assert count is None or max(output.metrics.accepted_per_round) <= count
    assert len({answer.outputs[0].token_ids for answer in answers}) == 1
    assert answers[0].metrics.num_drafts > answers[-1].metrics.num_drafts


@pytest.mark.usefixtures("few_splits")
def test_captured_steps_of_the_kernels_that_a_gpu_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Imitated on a CPU, under a budget that leaves some drafts out."""
    pools = repeat_instead_of_capture(monkeypatch)
    monkeypatch.setattr(step_costs, "seconds_of", lambda runner, num_reqs, num_tokens: 1e-3 * (8 + num_tokens))
    trace = [TraceRequest(f"r{i}", tuple(golden("vanilla").sequence[: 3 + 4 * i]), greedy(8 + i), i) for i in range(2)]
    with engine("vanilla", "overlapped", drafts=False) as llm:
        plain = run_trace(llm, trace)
    spec = {"method": "dspark", "model": str(ROOT / "vanilla" / "draft"), "verification_schedule": "budgeted"}
    sizes = {"max_num_seqs": 2, "max_num_batched_tokens": 16, "cudagraph_capture_sizes": (2,)}
    with engine("vanilla", "overlapped", speculative_config=spec, kernel_backend="interpret", **sizes) as llm:
        drafted = run_trace(llm, trace)
    assert pools[-1].num_replays >= 6
    for request in trace:
        assert drafted.tokens(request.request_id) == plain.tokens(request.request_id)
    assert sum(output.metrics.num_accepted_tokens for output in drafted.outputs.values()) > 0
