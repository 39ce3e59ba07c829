"""Bad input is a clear error, and nothing is lost: the next request gets the right tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from engine import LLM, ConfigError, SamplingParams, SpeculativeConfig
from tests.engine.engine_helpers import (
    assert_empty,
    both_runners,
    close,
    greedy,
    ids,
    make_llm,
    prompt_of,
    reference,
    tiny_model,
    tokens_of,
)

GOOD = prompt_of(7, 5)


@pytest.fixture(scope="module", params=["v1", "v2"])
def shared(request: pytest.FixtureRequest) -> Iterator[LLM]:
    llm = make_llm(request.param, num_gpu_blocks_override=13)
    yield llm
    llm.close()


@pytest.fixture
def llm(shared: LLM) -> Iterator[LLM]:
    """After each test: nothing stayed behind, and the engine still answers rightly."""
    yield shared
    assert_empty(shared)
    assert tokens_of(shared.generate(ids(*GOOD), greedy(5), use_tqdm=False)) == [reference(GOOD, greedy(5))]


# -- prompts ---------------------------------------------------------------------------------------------------------

BAD_PROMPTS = {
    "no ids": (ids(), ValueError, "empty"),
    "too long": (ids(*prompt_of(64)), ValueError, "64 tokens.*max_model_len=64"),
    "far too long": (ids(*prompt_of(500)), ValueError, "500 tokens"),
    "id above the vocabulary": (
        ids(5, 384),
        ValueError,
        r"prompt_token_ids\[1\] = 384: must be a token id from 0 to 383",
    ),
    "negative id": (ids(-1, 5), ValueError, r"prompt_token_ids\[0\] = -1"),
    "a bool for an id": (ids(5, True), ValueError, r"prompt_token_ids\[1\] = True"),
    "a float for an id": (ids(5, 2.0), ValueError, r"prompt_token_ids\[1\] = 2.0"),
    "None for an id": (ids(5, None), ValueError, r"prompt_token_ids\[1\] = None"),
    "ids in a string": ({"prompt_token_ids": "12"}, TypeError, "must be a list of token ids, got str"),
    "one number": ({"prompt_token_ids": 12}, TypeError, "must be a list of token ids, got int"),
    "no known key": ({"text": "hello"}, ValueError, "needs 'prompt' or 'prompt_token_ids', got the keys.*text"),
    "no prompt at all": (None, TypeError, "prompts must be"),
    "a number": (17, TypeError, "prompts must be"),
    "a list of numbers": ([17, 18], TypeError, "a prompt is a string or"),
    "text without a tokenizer": ("hello", ConfigError, "without a tokenizer"),
}


@pytest.mark.parametrize("name", BAD_PROMPTS)
def test_a_bad_prompt(name: str, llm: LLM) -> None:
    prompt, error, message = BAD_PROMPTS[name]
    with pytest.raises(error, match=message):
        llm.generate(prompt, greedy(4), use_tqdm=False)
    if name not in ("no prompt at all", "a number", "a list of numbers"):
        with pytest.raises(error, match=message):
            next(llm.stream(prompt, greedy(4)))
        # All or nothing: the good prompts of the same call don't run either.
        with pytest.raises(error, match=message):
            llm.generate([ids(*GOOD), prompt, ids(*GOOD)], greedy(4), use_tqdm=False)


def test_a_request_that_can_never_fit_says_why_and_what_to_do(llm: LLM) -> None:
    with pytest.raises(ValueError, match="can never fit.*15 KV blocks.*12 usable.*max_tokens to at most 29"):
        llm.generate(ids(*prompt_of(20)), greedy(40), use_tqdm=False)
    with pytest.raises(ValueError, match="can never fit.*shorten the prompt"):
        llm.generate(ids(*prompt_of(60)), greedy(1), use_tqdm=False)
    output = llm.generate(ids(*prompt_of(20)), greedy(29), use_tqdm=False)[0].outputs[0]
    assert output.token_ids == reference(prompt_of(20), greedy(29))


def test_prompts_and_params_must_pair_up(llm: LLM) -> None:
    with pytest.raises(ValueError, match="2 prompts and 3 sampling_params"):
        llm.generate([ids(*GOOD)] * 2, [greedy(2)] * 3, use_tqdm=False)
    with pytest.raises(TypeError, match="must be a SamplingParams, got dict"):
        llm.generate([ids(*GOOD)], [{"temperature": 0}], use_tqdm=False)
    with pytest.raises(TypeError, match="SamplingParams or a list of them, got int"):
        llm.generate([ids(*GOOD)], 3, use_tqdm=False)
    assert llm.generate([], greedy(2), use_tqdm=False) == []


def test_ids_in_use_are_refused(llm: LLM) -> None:
    llm.add(ids(*GOOD), greedy(5), request_id="a")
    with pytest.raises(ValueError, match="'a' is in use"):
        llm.add(ids(*GOOD), greedy(5), request_id="a")
    tokens = [output for _ in range(8) for output in llm.step()][-1].outputs[0].token_ids
    assert tokens == reference(GOOD, greedy(5))
    llm.add(ids(*GOOD), greedy(5), request_id="a")
    llm.abort(["a", "a", "unknown"])


def test_an_id_of_a_completion_is_refused_while_its_parent_runs(llm: LLM) -> None:
    """With n=2, `1_a` ends first; a caller's own request of that name would be taken for it."""
    stop = range_list(40)[3:]
    llm.add(
        ids(*GOOD), SamplingParams(n=2, temperature=1.0, seed=1, max_tokens=12, stop_token_ids=stop), request_id="a"
    )
    with pytest.raises(ValueError, match="'1_a' belongs to an unfinished request"):
        llm.add(ids(*GOOD), greedy(3), request_id="1_a")
    llm.add(ids(*prompt_of(5)), greedy(30), request_id="0_b")
    with pytest.raises(ValueError, match="'0_b' belongs to an unfinished request"):
        llm.add(ids(*GOOD), SamplingParams(n=2), request_id="b")
    llm.step()
    llm.abort(["a", "0_b"])


def test_bad_stop_ids_and_logprobs_for_this_model(llm: LLM) -> None:
    for params, message in (
        (greedy(3, stop_token_ids=[384]), "stop_token_ids has 384: the model's ids go from 0 to 383"),
        (greedy(3, stop=["x"]), "stop strings need a tokenizer"),
        (greedy(3, logprobs=385), "logprobs=385: the vocabulary has 384"),
        (greedy(200, min_tokens=2, stop_token_ids=range_list(130)), "at most 128 can be held back"),
    ):
        with pytest.raises(ValueError, match=message):
            llm.generate(ids(*GOOD), params, use_tqdm=False)


def range_list(n: int) -> list[int]:
    return list(range(n))


# -- sampling parameters ---------------------------------------------------------------------------------------------

NAN, INF = float("nan"), float("inf")
BAD_PARAMS: list[tuple[dict[str, Any], str]] = [
    *[({"temperature": value}, "temperature=") for value in (-0.1, NAN, INF, -INF, "hot", None, True)],
    *[({"top_p": value}, "top_p=") for value in (0, -0.5, 1.01, NAN, "x", None)],
    *[({"top_k": value}, "top_k=") for value in (-2, 1.5, "x", True, None)],
    *[({"min_p": value}, "min_p=") for value in (-0.1, 1.1, NAN, "x", None)],
    *[({"n": value}, "n=") for value in (0, -1, 1.5, True, None)],
    ({"n": 2, "temperature": 0}, "n=2 with temperature=0"),
    ({"n": 2, "temperature": 1e-9}, "n=2 with temperature=0"),
    *[({"max_tokens": value}, "max_tokens=") for value in (0, -1, 1.5, "x", True)],
    *[({"min_tokens": value}, "min_tokens=") for value in (-1, 1.5, True, None)],
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens=9 is more than max_tokens=8"),
    *[({"seed": value}, "seed=") for value in (2**63, -(2**63) - 1, 1.5, "x", True)],
    *[({"logprobs": value}, "logprobs=") for value in (-1, 1.5, True)],
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
    ({"gpu_memory_utilization": 0.0}, "gpu_memory_utilization"),
    ({"seed": 2**63}, "seed="),
    ({"async_scheduling": "yes"}, "async_scheduling='yes'"),
    ({"enable_chunked_prefill": False, "max_num_batched_tokens": 16}, "chunked prefill is off"),
    ({"cudagraph_capture_sizes": (0,)}, "cudagraph_capture_sizes"),
    ({"speculative_config": {"method": "dspark"}}, "speculative method 'dspark'"),
    ({"speculative_config": {"methd": "ngram"}}, "methd"),
]


@pytest.mark.parametrize(("fields", "message"), BAD_CONFIG, ids=lambda value: str(value)[:50])
def test_a_bad_configuration(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM("tiny-llama", **({"load_format": "dummy", "max_model_len": 64, "num_gpu_blocks_override": 20} | fields))


def test_v1_with_dspark_is_refused() -> None:
    with pytest.raises(ConfigError, match="dspark"):
        LLM("tiny-llama", load_format="dummy", use_v2_model_runner=False, speculative_config={"method": "dspark"})
    with pytest.raises(ConfigError, match="dspark"):
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
