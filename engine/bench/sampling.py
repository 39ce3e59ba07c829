"""What each sampling feature costs: time and memory of both runners' samplers alone, on logits of a served size.

V2's sampler is timed as it runs in a captured step, V1's as its step calls it, host loops included.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from engine.device import Device
from engine.hooks import Hooks
from engine.models import LoadedModel
from engine.runner_v1.input_batch import CachedRequestState, InputBatch
from engine.runner_v1.sampler import sample
from engine.runner_v1.step_sampling import make_step_sampling
from engine.runner_v2.sample import Sampler
from engine.runner_v2.sample.prompt_logprobs import PromptLogprobsStates, chunk_rows
from engine.runner_v2.sample.states import SamplingStates
from engine.runner_v2.sample.tables import TokenTable
from engine.runner_v2.states import RequestState
from engine.sample.prompt_logprobs import LOGITS_ROWS, compute_prompt_logprobs
from engine.sampling_params import SamplingParams
from engine.sched_output import NewRequestData

CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "top-k, top-p": {"temperature": 0.8, "top_k": 50, "top_p": 0.95},
    "penalties": {"temperature": 0.8, "presence_penalty": 0.5, "frequency_penalty": 0.2, "repetition_penalty": 1.1},
    "logprobs 5": {"temperature": 0.8, "logprobs": 5},
}
PROMPT_LOGPROBS = 5
_PROMPT_LEN = _OUTPUT_LEN = 128
_CALLS = 10
"""In one timing, so that what a call costs is not the clock's own."""
_TIMINGS = 7

Call = Callable[[], object]


@dataclass(frozen=True)
class SamplingCost:
    """`seconds` of one call, the median of several timings; `peak_bytes` that it needs beside its inputs and what there
    was before, None where nobody counts (a CPU)."""

    case: str
    side: str
    seconds: float
    peak_bytes: int | None
    chunk_bytes: int = 0
    """Of `peak_bytes`, the logits of one chunk of a prompt."""


def measure_sampling(loaded: LoadedModel, num_reqs: int) -> list[SamplingCost]:
    """Every case of CASES on V2 and on V1, for a batch of `num_reqs` with the same random logits f32 [r, V]."""
    device, vocab = loaded.model.device, loaded.config.vocab_size
    logits = torch.randn(num_reqs, vocab, device=device, generator=torch.Generator(device).manual_seed(0)) * 3
    costs = []
    for case, keywords in CASES.items():
        params = SamplingParams(**keywords)
        for side, sampler in (("V2", _v2_sampler), ("V1", _v1_sampler)):
            with _device(side.lower(), device) as streams:
                call = sampler(streams, logits, params)
                costs.append(SamplingCost(case, side, _seconds(device, call, side == "V2"), _peak(device, call)))
    return costs


def measure_prompt_logprobs(loaded: LoadedModel, prompt_len: int) -> list[SamplingCost]:
    """Logprobs of one prompt's own tokens, all of whose hidden states are there, on V2 and on V1."""
    model, device = loaded.model, loaded.model.device
    generator = torch.Generator(device).manual_seed(0)
    hidden = torch.randn(prompt_len, loaded.config.hidden_size, device=device, generator=generator).to(model.dtype)
    tokens = list(range(prompt_len))
    vocab, k = loaded.config.vocab_size, PROMPT_LOGPROBS
    case = f"prompt logprobs {k}, {prompt_len:,} tokens"
    params = SamplingParams(prompt_logprobs=k)
    costs = []
    with _device("v2", device) as streams:
        states = RequestState(streams, 1, prompt_len + 1, 2, "auto")
        states.add_request(_new_request(0, [t % vocab for t in tokens], [], params))
        states.apply_staged_writes()
        streams.drain()
        table = TokenTable(states.all_token_ids.gpu, states.prompt_len.gpu, states.prefill_len.gpu)
        prompts = PromptLogprobsStates(streams, 2, "auto", table)
        prompts.add_request(0, params, prompt_len, prompt_len)
        idx_mapping, computed = (torch.zeros(n, dtype=torch.int32, device=device) for n in (1, 2))
        ends = np.array([0, prompt_len], dtype=np.int32)
        query_start_loc = torch.from_numpy(ends).to(device)

        def v2() -> object:
            plan = prompts.plan(("r",), np.zeros(1, dtype=np.int32), ends, np.zeros(1, dtype=np.int32))
            assert plan is not None
            prompts.compute(plan, hidden, model.compute_logits, idx_mapping, query_start_loc, computed)
            return plan

        costs.append(_prompt_cost(case, "V2", device, v2, chunk_rows(k), vocab))
    targets = torch.tensor([t % vocab for t in tokens[1:]], device=device)

    def v1() -> object:
        return compute_prompt_logprobs(hidden[:-1], targets, k, model.compute_logits)

    costs.append(_prompt_cost(case, "V1", device, v1, LOGITS_ROWS, vocab))
    return costs


def _prompt_cost(case: str, side: str, device: torch.device, call: Call, rows: int, vocab: int) -> SamplingCost:
    return SamplingCost(case, side, _seconds(device, call, False, calls=1), _peak(device, call), 4 * rows * vocab)


def _v2_sampler(device: Device, logits: torch.Tensor, params: SamplingParams) -> Call:
    num_reqs, vocab = logits.shape
    requests = RequestState(device, num_reqs, _PROMPT_LEN + _OUTPUT_LEN + 1, 2, "auto")
    states = SamplingStates(device, num_reqs, vocab, 0, 2, "auto")
    table = TokenTable(requests.all_token_ids.gpu, requests.prompt_len.gpu, requests.prefill_len.gpu)
    sampler = Sampler(states, "auto", table)
    rows = []
    for i in range(num_reqs):
        new = _new_request(i, *_tokens(i, vocab), params)
        rows.append(requests.add_request(new))
        sampler.add_request(rows[-1], new)
    requests.apply_staged_writes()
    sampler.apply_staged_writes()
    plan = sampler.plan(np.array(rows, dtype=np.int32))
    device.drain()
    index = torch.tensor(rows, dtype=torch.int32, device=logits.device)
    positions = torch.full((num_reqs,), _PROMPT_LEN + _OUTPUT_LEN, device=logits.device)
    return lambda: sampler.sample(plan, logits, index, positions)


def _v1_sampler(device: Device, logits: torch.Tensor, params: SamplingParams) -> Call:
    num_reqs, vocab = logits.shape
    batch = InputBatch(device, num_reqs, _PROMPT_LEN + _OUTPUT_LEN + 1, 1, vocab)
    for i in range(num_reqs):
        prompt, output = _tokens(i, vocab)
        batch.add_request(CachedRequestState(f"r{i}", prompt, output, [], 0, params, frozenset(), None))
    batch.refresh_metadata()
    device.drain()
    generator = torch.Generator(logits.device).manual_seed(0)
    metadata = batch.sampling_metadata
    assert metadata is not None
    return lambda: sample(logits, metadata, make_step_sampling(batch, frozenset()), generator)


def _tokens(request: int, vocab: int) -> tuple[list[int], list[int]]:
    """Prompt and output of a request in the middle of its life."""
    ids = np.random.default_rng(request).integers(0, vocab, _PROMPT_LEN + _OUTPUT_LEN).tolist()
    return ids[:_PROMPT_LEN], ids[_PROMPT_LEN:]


def _new_request(index: int, prompt: list[int], output: list[int], params: SamplingParams) -> NewRequestData:
    return NewRequestData(
        req_id=f"r{index}", prompt_token_ids=prompt, prefill_token_ids=[*prompt, *output],
        num_prompt_tokens=len(prompt), sampling_params=params, block_ids=[], num_computed_tokens=0,
        request_seed_index=index, stop_token_ids=frozenset(),
    )  # fmt: skip


@contextmanager
def _device(runner: str, device: torch.device) -> Iterator[Device]:
    streams = Device(device, Hooks(runner))
    try:
        with torch.inference_mode():
            yield streams
    finally:
        streams.close()


def _seconds(device: torch.device, call: Call, captured: bool, calls: int = _CALLS) -> float:
    """Of one call. On a GPU it is the device's time between the first and the last of `calls`, with `captured` in a
    graph: then no host stands between the launches."""
    if device.type != "cuda":
        call()
        times = []
        for _ in range(_TIMINGS):
            begin = time.perf_counter()
            call()
            times.append(time.perf_counter() - begin)
        return statistics.median(times)
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        for _ in range(2):
            call()
        torch.cuda.synchronize(device)
        run = _capture(call, calls, stream) if captured else lambda: [call() for _ in range(calls)]
        times = []
        for _ in range(_TIMINGS):
            begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begun.record(stream)
            run()
            ended.record(stream)
            ended.synchronize()
            times.append(begun.elapsed_time(ended) / 1e3 / calls)
    return statistics.median(times)


def _capture(call: Call, calls: int, stream: torch.cuda.Stream) -> Call:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(calls):
            call()
    return graph.replay


def _peak(device: torch.device, call: Call) -> int | None:
    """Bytes that torch's allocator held at the most during one call, beyond what it held before."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    call()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before
