"""What V1 captures gives what it gives piece by piece: forwards of decodes, of decodes with drafts, and a drafter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from engine import LLM, SamplingParams
from engine.runner_v1.forward_graphs import ForwardGraphs
from engine.runner_v1.speculation import make_speculation
from tests.engine.drafters import itself, ngram, one_head
from tests.engine.engine_helpers import note_drafts
from tests.engine.replays import RepeatedWork

SIZES = (1, 2, 4)
PROMPTS = [[5, 6, 7, 5, 6, 7, 5, 6], [9, 8, 9, 8, 9, 8], [3, 4, 5], [7, 9, 7, 9, 7, 9, 7, 9, 7, 9, 7, 9]]
LENGTHS = (30, 20, 44, 37)
Answers = tuple[list[tuple[int, ...]], list[dict[str, list[int]]]]
"""Of each request its tokens, of each step its drafts."""


def answers(captured: bool, **config: Any) -> tuple[Answers, RepeatedWork, RepeatedWork]:
    """With the pools of forwards and of drafts."""
    pools = RepeatedWork(), RepeatedWork()
    llm = LLM(
        "tiny-llama", load_format="dummy", dtype="float32", skip_tokenizer_init=True, use_v2_model_runner=False,
        max_num_seqs=4, max_model_len=128, block_size=4, num_gpu_blocks_override=120, async_scheduling=False,
        **config,
    )  # fmt: skip
    try:
        runner = llm.core.runner
        if captured:  # a CPU has no sizes to capture
            sized = replace(runner.config, cudagraph_capture_sizes=SIZES, enforce_eager=False)
            runner.graphs = ForwardGraphs(sized, llm.core.device, runner.decoder.num_drafts if runner.decoder else 0)
            runner.graphs._pool, runner.graphs._drafts = pools
            runner.speculation = make_speculation(sized, runner.model, runner.decoder, llm.core.device, runner.graphs)
            runner.capture()
        drafts = note_drafts(llm)
        prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in LENGTHS]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        # With prefix hits: on blocks that the rows of requests which had ended must have left alone.
        again = [prompt + list(output.outputs[0].token_ids) for prompt, output in zip(PROMPTS, outputs, strict=True)]
        outputs += llm.generate([{"prompt_token_ids": ids} for ids in again], params, use_tqdm=False)
        return ([output.outputs[0].token_ids for output in outputs], drafts), *pools
    finally:
        llm.close()


@pytest.mark.parametrize("config", [{}, ngram(3)], ids=["plain", "ngram"])
def test_tokens_are_those_without_graphs(config: dict[str, Any]) -> None:
    expected, *_ = answers(False, **config)
    got, forwards, drafts = answers(True, **config)
    assert got == expected
    assert forwards.num_replays > 20 and drafts.num_replays == 0
    drafted = {size for size in forwards.replayed if size[1] > size[0]}
    assert drafted == ({(1, 4), (2, 8), (4, 16)} if config else set())


@pytest.mark.parametrize("drafter", [one_head, itself])
def test_drafts_are_those_without_graphs(drafter: Callable[[int], dict[str, Any]]) -> None:
    """Also for fewer requests than a size has, and where some of them have fewer drafts."""
    expected, *_ = answers(False, **drafter(3))
    got, forwards, drafts = answers(True, **drafter(3))
    assert got == expected
    # Every replayed forward has its drafter behind it, of all sizes.
    assert drafts.replayed == forwards.replayed
    assert {size[0] for size in drafts.replayed if size[1] > size[0]} == set(SIZES)
    assert sum(map(len, got[1])) > 50
