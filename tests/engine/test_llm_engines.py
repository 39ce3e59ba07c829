"""An LLM as an object: its keywords, its thread, its end, and others beside it."""

from __future__ import annotations

import dataclasses
import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from engine import LLM, EngineConfig, RequestOutput, SamplingParams
from tests.engine.engine_helpers import (
    assert_empty,
    greedy,
    ids,
    make_llm,
    prompt_of,
    reference,
    tiny_llm,
    tiny_model,
    tokens_of,
)

PROMPTS = [prompt_of(5, 1), prompt_of(12, 2), prompt_of(3, 3)]


@pytest.fixture(params=["v1", "v2"])
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    with make_llm(request.param) as llm:
        yield llm
        assert_empty(llm)


def test_the_keywords_have_vllms_names() -> None:
    expected = {
        "model", "tokenizer", "dtype", "device", "seed", "max_model_len", "max_num_seqs",
        "max_num_batched_tokens", "block_size",
        "num_gpu_blocks_override", "gpu_memory_utilization", "enable_prefix_caching",
        "enable_chunked_prefill", "scheduling_policy",
        "async_scheduling", "use_v2_model_runner", "speculative_config", "load_format",
        "enforce_eager", "skip_tokenizer_init",
        "kernel_backend",
    }  # fmt: skip
    assert expected <= {field.name for field in dataclasses.fields(EngineConfig)}
    sampling = {
        "temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "min_tokens", "stop",
        "stop_token_ids", "ignore_eos", "logprobs", "prompt_logprobs", "n", "skip_special_tokens", "detokenize",
        "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "allowed_token_ids", "bad_words",
        "structured_outputs", "bad_words_token_ids", "logits_processors",
    }  # fmt: skip
    assert sampling == {field.name for field in dataclasses.fields(SamplingParams)}
    assert list(inspect.signature(LLM.generate).parameters)[1:] == ["prompts", "sampling_params", "use_tqdm"]
    assert list(inspect.signature(LLM.chat).parameters)[1:4] == ["messages", "sampling_params", "use_tqdm"]
    assert list(inspect.signature(LLM.stream).parameters)[1:] == ["prompt", "sampling_params"]


def test_the_defaults_are_vllms() -> None:
    params = SamplingParams()
    assert (params.temperature, params.top_p, params.top_k, params.min_p, params.n, params.max_tokens) == (
        1.0,
        1.0,
        0,
        0.0,
        1,
        16,
    )
    config = EngineConfig()
    assert (config.enable_prefix_caching, config.enable_chunked_prefill, config.async_scheduling) == (True, True, True)
    assert (config.block_size, config.gpu_memory_utilization, config.scheduling_policy) == (16, 0.9, "fcfs")


def test_another_thread_is_refused_while_one_generates(llm: LLM) -> None:
    """Between two steps of the first: whatever the second one would take or end is the first one's."""
    errors: list[BaseException] = []

    def elsewhere(use: Callable[[], Any]) -> None:
        try:
            use()
        except RuntimeError as error:
            errors.append(error)

    step, uses = (
        llm.core.step,
        (llm.step, lambda: llm.add(ids(1)), lambda: llm.abort("0"), lambda: llm.generate(ids(1))),
    )

    def watched_step() -> list[RequestOutput]:
        for use in uses if not errors else ():
            other = threading.Thread(target=elsewhere, args=(use,))
            other.start()
            other.join(20)
        return step()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm.core, "step", watched_step)
        output = llm.generate(ids(*PROMPTS[0]), greedy(5), use_tqdm=False)
    assert tokens_of(output) == [reference(PROMPTS[0], greedy(5))]
    assert len(errors) == 4 and all("another thread is using this LLM" in str(error) for error in errors)
    done: list[Any] = []
    later = threading.Thread(target=lambda: done.extend(llm.generate(ids(*PROMPTS[0]), greedy(5), use_tqdm=False)))
    later.start()
    later.join(20)
    assert tokens_of(done) == tokens_of(output)


def test_an_engine_says_which_it_is(llm: LLM) -> None:
    runner = llm.core.runner.name.upper()
    assert repr(llm) == f"<LLM {llm.loaded.name}, {runner} on cpu>"


def test_an_engine_ends_with_its_with_block() -> None:
    with make_llm() as llm:
        assert len(tokens_of(llm.generate(ids(1, 2, 3), greedy(2), use_tqdm=False))[0]) == 2
    with pytest.raises(RuntimeError, match="this engine was closed"):
        llm.generate(ids(1, 2, 3), greedy(2), use_tqdm=False)


def test_shared_weights_and_several_engines() -> None:
    engines = [make_llm(runner, loaded=tiny_model()) for runner in ("v1", "v2", "v2")]
    streams = [llm.stream(ids(*PROMPTS[i]), greedy(8)) for i, llm in enumerate(engines)]
    last = {}
    for _ in range(8):
        for index, stream in enumerate(streams):
            last[index] = next(stream).outputs[0].token_ids
    assert [last[i] for i in range(3)] == [reference(PROMPTS[i], greedy(8)) for i in range(3)]
    for stream, llm in zip(streams, engines, strict=True):
        stream.close()
        llm.close()


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-qwen2", "tiny-qwen3"])
def test_dummy_models_read_their_whole_context(name: str) -> None:
    """Else the tests here would see no fault in it: an early token changes the answer, and rounding does not."""
    loaded = tiny_model(name)
    prompts = [prompt_of(12, seed) for seed in range(16)]
    changed = [[3 + (prompt[0] + 7) % 381, *prompt[1:]] for prompt in prompts]
    with tiny_llm("v2", loaded=loaded, max_num_seqs=32, max_num_batched_tokens=512, num_gpu_blocks_override=600) as llm:
        outputs = llm.generate([ids(*p) for p in [*prompts, *changed]], greedy(16, logprobs=2), use_tqdm=False)
    tokens = tokens_of(outputs)
    assert sum(a != b for a, b in zip(tokens[:16], tokens[16:], strict=True)) >= 15
    assert sum(len(set(answer)) for answer in tokens) / len(tokens) > 8
    gaps = sorted(
        a - b for o in outputs for e in o.outputs[0].logprobs for a, b in [[v.logprob for v in e.values()][:2]]
    )
    assert gaps[len(gaps) // 2] > 1e-2 and gaps[len(gaps) // 50] > 1e-3
