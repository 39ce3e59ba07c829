"""A caller's own logits processors: what they are told, when they run, and what becomes of their mistakes."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from engine import SamplingParams
from engine.sample.logits_processors import LogitsProcessor, LogitsRows, rows_of_processors, run_processor
from engine.sample.order import ORDER
from tests.engine.engine_helpers import (
    EOS,
    TraceRequest,
    both_loops,
    both_runners,
    greedy,
    ids,
    prompt_of,
    reference,
    run_trace,
    tiny_llm,
    tokens_of,
)


class Witness(LogitsProcessor):
    """Notes what it is told: for each call the known tokens of each row, and how many of them are the prompt."""

    def __init__(self) -> None:
        self.calls: list[list[tuple[tuple[int, ...], int]]] = []

    def apply(self, logits: torch.Tensor, rows: LogitsRows) -> torch.Tensor:
        assert logits.shape[0] == rows.token_ids.shape[0] == rows.lens.shape[0] == rows.prompt_lens.shape[0]
        assert logits.dtype == torch.float32 and rows.token_ids.dtype == rows.lens.dtype == torch.int64
        known = [
            (tuple(tokens[:length]), prompt)
            for tokens, length, prompt in zip(
                rows.token_ids.tolist(), rows.lens.tolist(), rows.prompt_lens.tolist(), strict=True
            )
        ]
        self.calls.append(known)
        return logits


class Only(LogitsProcessor):
    """Leaves one token."""

    def __init__(self, token: int) -> None:
        self.token = token

    def apply(self, logits: torch.Tensor, rows: LogitsRows) -> torch.Tensor:
        only = torch.full_like(logits, float("-inf"))
        only[:, self.token] = 0
        return only


class Plus(LogitsProcessor):
    """Adds to one logit, in place."""

    def __init__(self, token: int, bonus: float) -> None:
        self.token, self.bonus = token, bonus

    def apply(self, logits: torch.Tensor, rows: LogitsRows) -> torch.Tensor:
        logits[:, self.token] += self.bonus
        return logits


class Times(LogitsProcessor):
    def __init__(self, token: int, factor: float) -> None:
        self.token, self.factor = token, factor

    def apply(self, logits: torch.Tensor, rows: LogitsRows) -> torch.Tensor:
        logits[:, self.token] *= self.factor
        return logits


# -- which rows, in which order ----------------------------------------------------------------------------------------


def test_rows_that_list_the_same_processor_share_a_call() -> None:
    a, b, c = Only(1), Only(2), Only(3)
    assert rows_of_processors([(a,), (), (a, b), (b,)]) == [(a, [0, 2]), (b, [2, 3])]
    assert rows_of_processors([(), ()]) == []
    assert rows_of_processors([(a, b), (b, a)]) == [(a, [0]), (b, [0, 1]), (a, [1])]
    assert rows_of_processors([(a, a)]) == [(a, [0]), (a, [0])]
    calls = rows_of_processors([(a, b, c), (c, a), (b, c), (a, c, b)])
    for row, listed in enumerate([(a, b, c), (c, a), (b, c), (a, c, b)]):
        assert tuple(processor for processor, rows in calls if row in rows) == listed


@both_runners
def test_a_requests_own_order_is_kept(runner: str) -> None:
    """(x + 100) * 0 and x * 0 + 100 differ."""
    first, second = (Plus(9, 100.0), Times(9, 0.0)), (Times(9, 0.0), Plus(9, 100.0))
    with tiny_llm(runner) as llm:
        params = [greedy(4, logits_processors=processors) for processors in (first, second)]
        free, forced = tokens_of(llm.generate([ids(*prompt_of(5))] * 2, params, use_tqdm=False))
    assert free == reference(prompt_of(5), greedy(4))
    assert forced == (9, 9, 9, 9)


def test_where_it_stands_in_the_order() -> None:
    at = ORDER.index("logits_processors")
    assert ORDER.index("bad_words") == at - 1 and ORDER.index("temperature") == at + 1
    assert ORDER.index("structured_outputs") < ORDER.index("logprobs") < ORDER.index("penalties") < at
    assert len(set(ORDER)) == len(ORDER)


# -- what it is told ---------------------------------------------------------------------------------------------------


@both_runners
@both_loops
def test_it_sees_every_token_before_the_one_to_be_sampled(runner: str, loop: str) -> None:
    """In the overlapped loop too, in which the last token is on the device only when the step is made."""
    witness = Witness()
    prompt = prompt_of(9)
    with tiny_llm(runner, loop) as llm:
        others = [TraceRequest(f"o{i}", tuple(prompt_of(4 + i, i)), greedy(3 + i)) for i in range(3)]
        trace = [*others, TraceRequest("it", tuple(prompt), greedy(7, logits_processors=[witness]), arrival=1)]
        answer = run_trace(llm, trace).tokens("it")
    assert answer == reference(prompt, greedy(7))
    assert witness.calls[:7] == [[((*prompt, *answer[:i]), 9)] for i in range(7)]


@both_runners
@both_loops
def test_one_call_a_step_for_all_its_requests(runner: str, loop: str) -> None:
    witness = Witness()
    params = SamplingParams(n=3, seed=1, max_tokens=6, ignore_eos=True, logits_processors=[witness])
    with tiny_llm(runner, loop) as llm:
        output = llm.generate([ids(*prompt_of(5)), ids(*prompt_of(9))], params, use_tqdm=False)
    assert all(len(call) == 6 for call in witness.calls[:6])
    for request in output:
        for completion in request.outputs:
            for position in range(6):
                known = (*request.prompt_token_ids, *completion.token_ids[:position])
                assert (known, len(request.prompt_token_ids)) in witness.calls[position]


@both_runners
@both_loops
def test_chunks_and_preemption_do_not_change_what_it_does(runner: str, loop: str) -> None:
    class Successor(LogitsProcessor):
        """Prefers the last token's successor in steps of 5, whoever asks."""

        def apply(self, logits: torch.Tensor, rows: LogitsRows) -> torch.Tensor:
            last = rows.token_ids.gather(1, rows.lens.unsqueeze(1) - 1)
            return logits.scatter_add(1, (last + 5) % logits.shape[1], torch.full_like(last, 99.0, dtype=logits.dtype))

    successor = Successor()
    trace = [
        TraceRequest(f"r{i}", tuple(prompt_of(5 + 3 * i, i)), greedy(14, logits_processors=[successor]), arrival=i)
        for i in range(6)
    ]
    with tiny_llm(runner, loop, max_num_batched_tokens=9, num_gpu_blocks_override=20) as llm:
        result = run_trace(llm, trace)
    assert result.num_preemptions > 0
    for one in trace:
        assert result.tokens(one.request_id) == tuple((one.prompt[-1] + 5 * (i + 1)) % 384 for i in range(14))


@both_runners
def test_it_may_end_a_request_and_leaves_logprobs_alone(runner: str) -> None:
    """Logprobs are the model's own."""
    params = SamplingParams(temperature=0, max_tokens=9, logprobs=3)
    with tiny_llm(runner) as llm:
        free = llm.generate(ids(*prompt_of(5)), params, use_tqdm=False)[0].outputs[0]
        forced = dataclasses.replace(params, logits_processors=(Only(EOS),))
        ended = llm.generate(ids(*prompt_of(5)), forced, use_tqdm=False)[0].outputs[0]
    assert ended.token_ids == (EOS,) and ended.finish_reason == "stop"
    assert free.logprobs is not None and ended.logprobs is not None
    for token, entry in free.logprobs[0].items():
        assert ended.logprobs[0][token].logprob == pytest.approx(entry.logprob, abs=1e-5)


# -- mistakes ----------------------------------------------------------------------------------------------------------


class Wrong(LogitsProcessor):
    def __init__(self, result: Any) -> None:
        self.result = result

    def apply(self, logits: torch.Tensor, rows: LogitsRows) -> Any:
        if isinstance(self.result, Exception):
            raise self.result
        return self.result(logits)


WRONG: dict[str, tuple[Any, type[Exception], str]] = {
    "nothing": (lambda logits: None, TypeError, "Wrong.apply must return logits, torch.float32 .1, 384.; it gave None"),
    "a part": (lambda logits: logits[:, :9], TypeError, r"it gave torch.float32 \[1, 9\]"),
    "another dtype": (lambda logits: logits.double(), TypeError, r"it gave torch.float64 \[1, 384\]"),
    "an error": (KeyError("mine"), KeyError, "mine"),
}


@both_runners
@both_loops
@pytest.mark.parametrize("name", WRONG)
def test_a_mistake_is_raised_and_the_engine_goes_on(runner: str, loop: str, name: str) -> None:
    result, error, message = WRONG[name]
    with tiny_llm(runner, loop) as llm:
        with pytest.raises(error, match=message):
            llm.generate(ids(*prompt_of(5)), greedy(4, logits_processors=[Wrong(result)]), use_tqdm=False)
        assert not llm.core.has_unfinished()
        good = llm.generate(ids(*prompt_of(7)), greedy(4), use_tqdm=False)
    assert tokens_of(good) == [reference(prompt_of(7), greedy(4))]


def test_it_works_on_a_copy() -> None:
    logits = torch.zeros(2, 5)
    rows = LogitsRows(torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, dtype=torch.int64), torch.ones(2))
    assert run_processor(Plus(3, 1.0), logits, rows)[:, 3].tolist() == [1, 1]
    assert not logits.any()
