"""Logprobs on runner V2: of the sampled tokens for those who asked, and of prompts, in chunks of bounded memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from engine import SamplingParams
from engine.runner_v2.sample import logprobs, prompt_logprobs
from engine.runner_v2.sample.logprobs import NO_LOGPROBS, row_to_dict
from engine.runner_v2.sample.prompt_logprobs import chunk_rows
from tests.engine.sampler_bench import SamplerBench, sampler_bench
from tests.kernels.live_bytes import LiveBytes

# The interpreter's NumPy says so where a GPU is silent: -inf minus -inf.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

VOCAB, HIDDEN = 60, 8


def check_entry(entry: dict[int, tuple[float, int | None]], right: torch.Tensor, token: int, k: int) -> None:
    """An entry is the token's own logprob first, then the k best; ranks count from 1."""
    order = right.argsort(descending=True, stable=True).tolist()
    assert next(iter(entry)) == token and set(entry) == {token, *order[:k]}
    for other, (logprob, rank) in entry.items():
        assert logprob == pytest.approx(right[other].item(), abs=1e-5)
        assert rank == order.index(other) + 1


# -- of sampled tokens -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asks", [(0, 5, None), (2, 50, None, 3, 60), (60, 60), (None, 40)])
def test_each_row_gets_what_it_asked_for(asks: tuple[int | None, ...]) -> None:
    """Few, many and all in one batch; of the model's own distribution, though a bias and a filter are at work."""
    with sampler_bench(vocab=VOCAB, max_reqs=8) as bench:
        rows = [
            bench.add([1, 2], SamplingParams(seed=i, temperature=0.8, top_k=9, logit_bias={3: 50.0}, logprobs=k))
            for i, k in enumerate(asks)
        ]
        bench.apply_staged_writes()
        plan, logits = bench.plan(rows), torch.randn(len(asks), VOCAB) * 2
        out = bench.sample(plan, logits, **bench.rows(rows, [0] * len(rows)))
    assert out.logprobs is not None
    host = {name: tensor.numpy() for name, tensor in out.logprobs.as_dict().items()}
    right = logits.double().log_softmax(-1)
    for i, k in enumerate(asks):
        if k is not None:
            check_entry(row_to_dict(plan.logprobs, host, i, k), right[i], int(out.sampled[i, 0]), k)


def test_one_row_that_wants_all_does_not_make_all_of_everybodys(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, int]] = []
    original = logprobs.topk_logprobs

    def logged(x: torch.Tensor, tokens: torch.Tensor, k: int, **kwargs: Any) -> Any:
        calls.append((x.shape[0], k))
        return original(x, tokens, k, **kwargs)

    monkeypatch.setattr(logprobs, "topk_logprobs", logged)
    with sampler_bench(vocab=VOCAB) as bench:
        asks = (5, None, VOCAB)
        rows = [bench.add([1], SamplingParams(temperature=0, logprobs=k)) for k in asks]
        bench.apply_staged_writes()
        bench.sample(bench.plan(rows), torch.randn(3, VOCAB), **bench.rows(rows, [0, 0, 0]))
        assert calls == [(3, 5), (1, VOCAB)]
        calls.clear()
        out = bench.sample(bench.plan(rows[1:2]), torch.randn(1, VOCAB), **bench.rows(rows[1:2], [0]))
        assert calls == [] and out.logprobs is None


def test_rows_behind_drafts_have_logprobs_of_their_own() -> None:
    with sampler_bench(vocab=VOCAB) as bench:
        rows = [bench.add([1, 2], SamplingParams(temperature=0, logprobs=k)) for k in (2, VOCAB)]
        bench.apply_staged_writes()
        drafts = [[4, 5], [6]]
        plan, logits = bench.plan(rows, drafts), torch.randn(5, VOCAB)
        out = bench.sample(plan, logits, **bench.rows(rows, [0, 0], drafts))
    assert out.logprobs is not None
    host = {name: tensor.numpy() for name, tensor in out.logprobs.as_dict().items()}
    for i, k in enumerate((2, 2, 2, VOCAB, VOCAB)):
        check_entry(
            row_to_dict(plan.logprobs, host, i, k), logits[i].double().log_softmax(-1), int(out.sampled[i, 0]), k
        )


# -- of prompts --------------------------------------------------------------------------------------------------------


class Prompts:
    """Prompts of a state table, computed in steps by a model of one matrix: hidden state of a token -> logits."""

    def __init__(self, bench: SamplerBench, vocab: int = VOCAB) -> None:
        generator = torch.Generator().manual_seed(1)
        self.bench = bench
        self.feature = bench.sampler.prompt_logprobs
        self.embedding = torch.randn(vocab, HIDDEN, generator=generator)
        self.head = torch.randn(HIDDEN, vocab, generator=generator)
        self.logits_rows: list[int] = []

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self.logits_rows.append(hidden.shape[0])
        return hidden @ self.head

    def add(self, prompt: list[int], k: int | None, output: list[int] | None = None) -> int:
        params = SamplingParams(prompt_logprobs=k)
        return self.bench.add(prompt, params, output or [])

    def step(self, rows: list[int], computed: list[int], counts: list[int]) -> dict[int, tuple[int, list[dict]]]:
        """One step; row -> first position and entries."""
        starts = np.array([0, *np.cumsum(counts)], dtype=np.int32)
        plan = self.feature.plan(
            tuple(map(str, rows)), np.array(rows, dtype=np.int32), starts, np.array(computed, dtype=np.int32)
        )
        if plan is None:
            return {}
        tokens = [
            self.bench.tokens.all_token_ids[row, c : c + n] for row, c, n in zip(rows, computed, counts, strict=True)
        ]
        on_device = torch.zeros(self.bench.states.num_rows, dtype=torch.int32)
        on_device[rows] = torch.tensor(computed, dtype=torch.int32)
        with torch.inference_mode():
            self.feature.compute(
                plan, self.embedding[torch.cat(tokens).long()], self.compute_logits,
                torch.tensor(rows, dtype=torch.int32), torch.from_numpy(starts), on_device,
            )  # fmt: skip
        return {int(row): (result.start, result.entries) for row, result in plan.result().items()}

    def check(self, prompt: list[int], k: int, entries: list[dict]) -> None:
        right = (self.embedding[prompt].double() @ self.head.double()).log_softmax(-1)
        assert len(entries) == len(prompt) - 1
        for i, entry in enumerate(entries):
            check_entry(entry, right[i], prompt[i + 1], k)


def prompt_of(length: int, seed: int) -> list[int]:
    return torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("chunk", [1, 7, 16, 40])
@pytest.mark.parametrize("prefill", [1, 13, 40])
@pytest.mark.parametrize("form", ["torch", "interpret"])
def test_a_prompt_in_any_chunks(chunk: int, prefill: int, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """T23: whatever the chunk of the prefill and that of the logits; never more rows of logits than a chunk."""
    monkeypatch.setattr(prompt_logprobs, "CHUNK_ROWS", chunk)
    prompt, entries = prompt_of(40, 3), []
    with sampler_bench(vocab=VOCAB, form=form) as bench:
        prompts = Prompts(bench)
        row = prompts.add(prompt, 4)
        bench.apply_staged_writes()
        for computed in range(0, 40, prefill):
            step = prompts.step([row], [computed], [min(prefill, 40 - computed)])
            if step:
                start, found = step[row]
                assert start == len(entries) + 1
                entries += found
        prompts.check(prompt, 4, entries)
        assert max(prompts.logits_rows) <= chunk and sum(prompts.logits_rows) == 39


def test_prompts_side_by_side_with_decodes_and_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of the logits belong to their requests: few, many, none, a decode, a prompt that ends or begins here."""
    monkeypatch.setattr(prompt_logprobs, "CHUNK_ROWS", 5)
    asks = [(1, 3), (9, 2), (9, None), (12, 40), (7, 0), (11, VOCAB)]
    everything = [prompt_of(length, seed) for seed, (length, _) in enumerate(asks)]
    entries: dict[int, list[dict]] = {i: [] for i in range(len(asks))}
    with sampler_bench(vocab=VOCAB, max_reqs=8) as bench:
        prompts = Prompts(bench)
        rows = [prompts.add(prompt, k) for prompt, (_, k) in zip(everything, asks, strict=True)]
        done = prompts.add([1, 2, 3], 2, output=[4])
        bench.apply_staged_writes()
        bounds = [[0, 1, 1, 1], [0, 4, 5, 9], [0, 2, 9, 9], [0, 0, 12, 12], [0, 6, 7, 7], [0, 3, 10, 11]]
        for at in range(3):
            scheduled = [(i, b[at], b[at + 1] - b[at]) for i, b in enumerate(bounds) if b[at + 1] > b[at]]
            step = prompts.step(
                [done, *(rows[i] for i, *_ in scheduled)],
                [3, *(c for _, c, _ in scheduled)],
                [1, *(n for *_, n in scheduled)],
            )
            assert done not in step, "its prompt's logprobs have been delivered before the preemption"
            for i, computed, _ in scheduled:
                if rows[i] in step:
                    assert step[rows[i]][0] == computed + 1
                    entries[i] += step[rows[i]][1]
    for i, (length, k) in enumerate(asks):
        if k is None:
            assert entries[i] == []
        else:
            prompts.check(everything[i], k, entries[i])
            assert len(entries[i]) == length - 1
    assert all(n <= 5 for n in prompts.logits_rows)


def test_nothing_is_planned_for_who_did_not_ask() -> None:
    with sampler_bench(vocab=VOCAB) as bench:
        prompts = Prompts(bench)
        row, one = prompts.add(prompt_of(9, 1), None), prompts.add([5], 3)
        bench.apply_staged_writes()
        bench.log.clear()
        assert prompts.step([row, one], [0, 0], [9, 1]) == {}
        assert bench.log == [] and prompts.logits_rows == []


def test_a_row_used_again_forgets() -> None:
    with sampler_bench(vocab=VOCAB, max_reqs=1) as bench:
        prompts = Prompts(bench)
        bench.remove(prompts.add(prompt_of(9, 1), 3))
        row = prompts.add(prompt_of(9, 1), None)
        bench.apply_staged_writes()
        assert prompts.step([row], [0], [9]) == {}
        assert prompts.feature._num_logprobs[row] == NO_LOGPROBS


@pytest.mark.parametrize("k", [0, 5, 32, 1000, 151_936])
def test_a_chunk_of_a_real_vocabulary_fits(k: int) -> None:
    """By arithmetic: what is sorted for k of a chunk's rows stays within the room for it."""
    assert 1 <= chunk_rows(k) <= prompt_logprobs.CHUNK_ROWS
    assert chunk_rows(k) * k * prompt_logprobs._SORT_BYTES <= prompt_logprobs.SCRATCH_BYTES


@pytest.mark.parametrize(
    ("length", "vocab", "k"),
    [(300, 3000, 5), (300, 3000, 3000), pytest.param(8192, 151_936, 5, marks=pytest.mark.slow)],
)
def test_memory_beyond_a_chunks_logits(length: int, vocab: int, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """8,192 tokens of a vocabulary of 151,936 need less than 400 MB beyond the logits of one chunk, and smaller ones
    in proportion; what the host gets is not counted."""
    is_real = vocab > 100_000
    if not is_real:
        monkeypatch.setattr(prompt_logprobs, "CHUNK_ROWS", 50)
        monkeypatch.setattr(prompt_logprobs, "SCRATCH_BYTES", 50 * vocab * 8)
    with sampler_bench(vocab=vocab, max_reqs=1, max_len=length) as bench:
        prompts = Prompts(bench, vocab)
        row = prompts.add(torch.randint(0, vocab, (length,)).tolist(), k)
        bench.apply_staged_writes()
        with LiveBytes() as live:
            monkeypatch.setattr(prompt_logprobs.PromptLogprobsPlan, "result", lambda _: {})
            prompts.step([row], [0], [length])
    assert sum(prompts.logits_rows) == length - 1
    one_chunk, to_host = max(prompts.logits_rows) * vocab * 4, (length - 1) * (k + 1) * 8
    beyond = live.peak - one_chunk - to_host
    assert 0 < beyond < (400e6 if is_real else 1.5 * prompt_logprobs.SCRATCH_BYTES)
