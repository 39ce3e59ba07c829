"""Bad sampling parameters and configurations: the error names what was asked and what is possible."""

from __future__ import annotations

from typing import Any

import pytest

from engine import LLM, ConfigError, SamplingParams, SpeculativeConfig
from tests.engine.engine_helpers import (
    both_runners,
    close,
    greedy,
    ids,
    make_llm,
    prompt_of,
    tiny_model,
)

GOOD = prompt_of(7, 5)

# -- sampling parameters ---------------------------------------------------------------------------------------------

NAN, INF = float("nan"), float("inf")
BAD_PARAMS: list[tuple[dict[str, Any], str]] = [
    *[({"temperature": value}, "temperature=") for value in (-0.1, NAN, INF, -INF, 1e39, "hot", None, True)],
    *[({"top_p": value}, "top_p=") for value in (0, -0.5, 1.01, NAN, 1e-320, "x", None)],
    *[({"repetition_penalty": value}, "repetition_penalty=") for value in (0, 1e39, 1e-320, NAN)],
    *[({"top_k": value}, "top_k=") for value in (-2, 1.5, "x", True, None)],
    *[({"min_p": value}, "min_p=") for value in (-0.1, 1.1, NAN, "x", None)],
    *[({"n": value}, "n=") for value in (0, -1, 1.5, True, None)],
    ({"n": 2, "temperature": 0}, "n=2 with temperature=0"),
    ({"n": 2, "temperature": 1e-9}, "n=2 with temperature=0"),
    *[({"max_tokens": value}, "max_tokens=") for value in (0, -1, 1.5, "x", True)],
    *[({"min_tokens": value}, "min_tokens=") for value in (-1, 1.5, True, None)],
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens=9 is more than max_tokens=8"),
    *[({"seed": value}, "seed=") for value in (2**63, -(2**63) - 1, 1.5, "x", True)],
    *[({"logprobs": value}, "logprobs=") for value in (-2, 1.5, True)],
    *[({"stop": value}, "stop=") for value in ("", ["a", ""], [1], 5, 0)],
    *[({"stop_token_ids": value}, "stop_token_ids=") for value in ([-1], [1.5], [True], 5, 0, "12", ["x"])],
    ({"stop": "x", "detokenize": False}, "use stop_token_ids"),
    *[
        ({name: value}, f"{name}=")
        for name in ("ignore_eos", "skip_special_tokens", "detokenize")
        for value in (1, "no", None)
    ],
    ({"temprature": 0}, "'temprature', did you mean 'temperature'"),
    ({"max_new_tokens": 5}, "'max_new_tokens', did you mean 'max_tokens'"),
    ({"zzz": 5}, "unknown sampling parameter 'zzz'.*Known: n, temperature"),
]


@pytest.mark.parametrize(("fields", "message"), BAD_PARAMS, ids=lambda value: str(value)[:50])
def test_a_bad_sampling_parameter(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(**fields)


def test_good_sampling_parameters_at_the_edge() -> None:
    params = SamplingParams(temperature=1, top_p=1, top_k=-1, min_p=1, min_tokens=16, stop=None, stop_token_ids=None)
    assert params.stop == () and params.stop_token_ids == ()
    assert SamplingParams(stop="x").stop == ("x",) and SamplingParams(stop_token_ids={4}).stop_token_ids == (4,)
    assert SamplingParams(temperature=1e-6, top_p=0.5) == SamplingParams(temperature=0)
    assert SamplingParams(max_tokens=None).max_tokens is None


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "much"])
def test_a_bad_size_of_the_cpu_cache(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNNERSCOPE_CPU_KVCACHE_SPACE", value)
    with pytest.raises(ValueError, match=f"RUNNERSCOPE_CPU_KVCACHE_SPACE='{value}': possible is GiB, a number above 0"):
        make_llm(num_gpu_blocks_override=None)


# -- configuration ---------------------------------------------------------------------------------------------------

BAD_CONFIG: list[tuple[dict[str, Any], str]] = [
    ({"max_num_sequences": 4}, "unknown keyword 'max_num_sequences', did you mean 'max_num_seqs'"),
    ({"tensor_parallel_size": 2}, "unknown keyword 'tensor_parallel_size'.*The keywords are: model"),
    ({"kernel_backend": "trition"}, "kernel_backend='trition'.*did you mean 'triton'"),
    ({"dtype": "float33"}, "dtype='float33'.*did you mean 'float32'"),
    ({"device": "tpu"}, "device='tpu': possible are"),
    ({"scheduling_policy": "lifo"}, "scheduling_policy='lifo'"),
    ({"load_format": "pickle"}, "load_format='pickle': possible are 'auto', 'dummy'"),
    ({"max_num_batched_tokens": 0}, "max_num_batched_tokens=0"),
    ({"block_size": -4}, "block_size=-4"),
    ({"block_size": True}, "block_size=True"),
    ({"max_num_seqs": 0}, "max_num_seqs=0"),
    ({"max_num_seqs": 64, "max_num_batched_tokens": 8}, "is below max_num_seqs=64"),
    ({"max_model_len": 100_000}, "more than the 512 positions"),
    ({"num_gpu_blocks_override": 1}, "at least 2"),
    *[({"gpu_memory_utilization": value}, "gpu_memory_utilization=") for value in (0.0, 1.1, NAN, "half", True, None)],
    *[({"device": value}, "device=") for value in (0, None, "", "cuda:", "cuda:x")],
    *[({"model": value}, "model=") for value in ("", 5)],
    *[({"tokenizer": value}, "tokenizer=") for value in ("", 5)],
    *[({"cudagraph_capture_sizes": value}, "cudagraph_capture_sizes=") for value in (None, 4, "4", [1, "2"])],
    ({"seed": 2**63}, "seed="),
    ({"async_scheduling": "yes"}, "async_scheduling='yes'"),
    ({"enable_chunked_prefill": False, "max_num_batched_tokens": 16}, "chunked prefill is off"),
    ({"cudagraph_capture_sizes": (0,)}, "cudagraph_capture_sizes"),
    ({"speculative_config": {"method": "dspark"}}, "speculative method 'dspark'"),
    ({"speculative_config": {"methd": "ngram"}}, "methd"),
]


@pytest.mark.parametrize(("fields", "message"), BAD_CONFIG, ids=lambda value: str(value)[:50])
def test_a_bad_configuration(fields: dict[str, Any], message: str) -> None:
    defaults = {"model": "tiny-llama", "load_format": "dummy", "max_model_len": 64, "num_gpu_blocks_override": 20}
    with pytest.raises(ConfigError, match=message):
        LLM(**(defaults | fields))


def test_v1_with_dspark_is_refused() -> None:
    with pytest.raises(ConfigError, match="dspark"):
        LLM("tiny-llama", load_format="dummy", use_v2_model_runner=False, speculative_config={"method": "dspark"})
    with pytest.raises(ConfigError, match="num_speculative_tokens=0: must be"):
        SpeculativeConfig(method="dspark", num_speculative_tokens=0)


def test_v1_with_graph_sizes_is_refused() -> None:
    with pytest.raises(ConfigError, match="runner V1 can't run this config.*Use the other runner"):
        make_llm("v1", cudagraph_capture_sizes=(4,))


def test_a_device_that_is_not_there() -> None:
    import torch

    if torch.cuda.is_available():
        message = "loaded="
    else:
        message = "this torch sees no CUDA device"
    with pytest.raises(ConfigError, match=message):
        make_llm(device="cuda")


def test_an_unknown_model_says_where_was_looked() -> None:
    with pytest.raises(ValueError, match="nowhere-17b"):
        LLM("nowhere-17b", load_format="dummy")


@pytest.mark.parametrize("fields", [{"model": "tiny-qwen3"}, {"tokenizer": "x"}, {"load_format": "dummy"}])
def test_shared_weights_bring_their_own_model(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="can't be given together with loaded="):
        LLM(loaded=tiny_model(), **fields)


def test_shared_weights_decide_the_dtype() -> None:
    import torch

    half = tiny_model(dtype=torch.bfloat16)
    with pytest.raises(ConfigError, match=r"dtype='float32'.*the weights of 'tiny-llama' are bfloat16"):
        make_llm(loaded=half, dtype="float32")
    llm = make_llm(loaded=half)
    try:
        assert llm.config.torch_dtype == torch.bfloat16
        assert len(llm.generate(ids(*GOOD), greedy(4), use_tqdm=False)[0].outputs[0].token_ids) == 4
    finally:
        llm.close()


@pytest.mark.parametrize(
    ("value", "message"), [("2", "VLLM_USE_V2_MODEL_RUNNER='2': possible is 0 or 1"), ("v2", "='v2'")]
)
def test_a_bad_environment_switch(value: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", value)
    with pytest.raises(ValueError, match=message):
        LLM(loaded=tiny_model(), max_model_len=64, num_gpu_blocks_override=20)


@pytest.mark.parametrize(("value", "runner"), [("0", "v1"), ("1", "v2"), ("", "v2"), ("false", "v1")])
def test_the_environment_chooses_the_runner_unless_the_config_does(
    value: str, runner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", value)
    for asked, expected in ((None, runner), (True, "v2"), (False, "v1")):
        llm = LLM(loaded=tiny_model(), max_model_len=64, num_gpu_blocks_override=20, use_v2_model_runner=asked)
        assert llm.core.runner.name == expected
        close(llm)


@both_runners
def test_a_closed_engine_says_so(runner: str) -> None:
    llm = make_llm(runner)
    llm.close()
    llm.close()
    with pytest.raises(RuntimeError, match="was closed"):
        llm.generate(ids(*GOOD), greedy(3), use_tqdm=False)


def test_lengths_of_looked_up_ngrams() -> None:
    def lengths(**values: Any) -> tuple[int, int]:
        return SpeculativeConfig(num_speculative_tokens=3, **values).prompt_lookup

    assert lengths(method="ngram") == (5, 5)
    assert lengths(method="ngram", prompt_lookup_max=3) == (3, 3)
    assert lengths(method="dspark", draft="lookup") == (1, 3)
    assert lengths(method="dspark", draft="lookup", prompt_lookup_min=2, prompt_lookup_max=4) == (2, 4)
