"""V1's captured forwards give what its forwards piece by piece give: decodes, and decodes with drafts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from engine import LLM, SamplingParams
from engine.runner_v1.forward_graphs import ForwardGraphs
from tests.engine.replays import RepeatedWork

SIZES = (1, 2, 4)
SPEC = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
PROMPTS = [[5, 6, 7, 5, 6, 7, 5, 6], [9, 8, 9, 8, 9, 8], [3, 4, 5, 3, 4, 5, 3, 4, 5, 3]]


def answers(captured: bool, **config: Any) -> tuple[list[tuple[int, ...]], RepeatedWork]:
    pool = RepeatedWork()
    llm = LLM(
        "tiny-qwen3", load_format="dummy", dtype="float32", skip_tokenizer_init=True, use_v2_model_runner=False,
        max_num_seqs=4, max_model_len=128, block_size=4, num_gpu_blocks_override=120, **config,
    )  # fmt: skip
    try:
        runner = llm.core.runner
        if captured:  # a CPU has no sizes to capture
            config = replace(runner.config, cudagraph_capture_sizes=SIZES, enforce_eager=False)
            runner.graphs = ForwardGraphs(config, llm.core.device, runner.decoder.num_drafts if runner.decoder else 0)
            runner.graphs._pool = pool
            runner.graphs.capture(runner._padding_forward)
        params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (30, 20, 40)]
        prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        outputs += llm.generate(prompts[:2], params[:2], use_tqdm=False)  # with prefix hits
        return [output.outputs[0].token_ids for output in outputs], pool
    finally:
        llm.close()


@pytest.mark.parametrize("speculative_config", [None, SPEC], ids=["plain", "ngram"])
def test_tokens_are_those_without_graphs(speculative_config: Any) -> None:
    config = {"async_scheduling": False, "speculative_config": speculative_config}
    expected, _ = answers(False, **config)
    got, pool = answers(True, **config)
    assert got == expected
    assert pool.num_replays > 20
    drafted = {size for size in pool.replayed if size[1] > size[0]}
    assert drafted == (set() if speculative_config is None else {(1, 4), (2, 8), (4, 16)})
