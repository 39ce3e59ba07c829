"""T1: V1's dense batch, whose rows move: every column goes with its row, and nothing of a former request stays."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine import SamplingParams
from engine.device import Device
from engine.hooks import Hooks, RowMoved
from engine.runner_v1.input_batch import CachedRequestState, InputBatch
from engine.sample.logits_processors import LogitsProcessor, LogitsRows
from tests.engine.engine_helpers import (
    TraceRequest,
    both_loops,
    greedy,
    prompt_of,
    reference,
    run_trace,
    tiny_llm,
)

SETS = (
    "greedy_reqs", "random_reqs", "top_p_reqs", "top_k_reqs", "min_p_reqs",
    "penalties_reqs", "bad_words_reqs", "processors_reqs",
)  # fmt: skip


class _Nothing(LogitsProcessor):
    def apply(self, logits: torch.Tensor, rows: LogitsRows) -> torch.Tensor:
        return logits


NOTHING = _Nothing()


def _batch(num_rows: int) -> InputBatch:
    batch = InputBatch(Device(torch.device("cpu"), Hooks("v1")), 6, 16, 4, vocab_size=32)
    for row in range(num_rows):
        batch.add_request(_state(row))
    return batch


def _state(index: int) -> CachedRequestState:
    """A request that differs from every other in each column; odd ones are greedy and have no generator."""
    params = SamplingParams(
        temperature=0 if index % 2 else 0.5 + index, top_p=0.9 - index / 10, top_k=index + 1,
        min_p=0.1 + index / 100, seed=index,
        min_tokens=index, max_tokens=9, logprobs=index,
        presence_penalty=0.1 + index / 10, frequency_penalty=-index / 10, repetition_penalty=1.0 + index % 3,
        bad_words_token_ids=[[index, 2]] * (index % 2), logits_processors=[NOTHING] * (index == 2),
    )  # fmt: skip
    return CachedRequestState(
        req_id=f"r{index}", prompt_token_ids=[10 + index] * (3 + index), output_token_ids=[20 + index] * index,
        block_ids=[index + 1] * (1 + index % 4), num_computed_tokens=2 + index, sampling_params=params,
        stop_token_ids=frozenset({index}), generator=None if index % 2 else torch.Generator().manual_seed(index),
    )  # fmt: skip


def _row(batch: InputBatch, row: int) -> dict[str, object]:
    """All that a batch says of a row, in every column that it has."""
    req_id = batch.req_ids[row]
    used = batch.num_tokens[row]
    columns = {f"column {i}": column[row].tolist() for i, column in enumerate(batch._row_columns()[1:])}
    dicts = {f"dict {i}": mapping.get(row) for i, mapping in enumerate(batch._row_dicts())}
    members = {name: req_id in getattr(batch, name) for name in SETS}
    index = batch.req_id_to_index[req_id]  # type: ignore[index]
    return {
        "req_id": req_id,
        "tokens": batch.token_ids_cpu[row, :used].tolist(),
        "row": index - row,
        **columns,
        **dicts,
        **members,
    }


def test_every_array_with_an_entry_a_row_is_a_row_column() -> None:
    """A column added later and forgotten in `_row_columns` or `_row_dicts` would stay behind when its row moves."""
    batch = _batch(3)
    arrays = {
        name: value if isinstance(value, np.ndarray) else getattr(value, "np", None)
        for name, value in vars(batch).items()
    }
    named = {id(column) for column in batch._row_columns()}
    missing = [
        name for name, array in arrays.items()
        if array is not None and array.shape[:1] == (batch.max_num_reqs,) and id(array) not in named
    ]  # fmt: skip
    assert not missing
    dicts = {name for name, value in vars(batch).items() if isinstance(value, dict) and name != "req_id_to_index"}
    assert dicts == {name for name in vars(batch) for mapping in batch._row_dicts() if getattr(batch, name) is mapping}
    assert {name for name, value in vars(batch).items() if isinstance(value, set)} == set(SETS)


@pytest.mark.parametrize(("a", "b"), [(0, 1), (1, 0), (0, 2), (1, 3), (2, 3)])
def test_t1_a_swap_exchanges_every_column_exactly(a: int, b: int) -> None:
    batch = _batch(4)
    before = [_row(batch, row) for row in range(4)]
    batch.swap_states(a, b)
    after = [_row(batch, row) for row in range(4)]
    assert after[a] == before[b] and after[b] == before[a]
    assert [after[row] for row in range(4) if row not in (a, b)] == [
        before[row] for row in range(4) if row not in (a, b)
    ]
    batch.swap_states(a, b)
    assert [_row(batch, row) for row in range(4)] == before


@pytest.mark.parametrize("mask_of", [lambda row: row == 0, lambda row: row == 1])
def test_t1_masks_that_are_each_others_complement(mask_of: object) -> None:
    """The case as published, for wide rows: with views on both sides both rows would end up as the second."""
    batch = _batch(2)
    batch.token_ids_cpu[0, :8], batch.token_ids_cpu[1, :8] = [1, 1, 1, 0, 0, 0, 0, 0], [0, 0, 0, 1, 1, 1, 1, 1]
    batch.swap_states(0, 1)
    assert batch.token_ids_cpu[:2, :8].tolist() == [[0, 0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0, 0, 0]]


@pytest.mark.parametrize("gone", [(0,), (1,), (3,), (0, 1), (0, 3), (1, 2), (0, 1, 2), (0, 1, 2, 3), ()])
def test_t1_condense_moves_every_column_and_leaves_no_hole(gone: tuple[int, ...]) -> None:
    batch = _batch(4)
    before = {f"r{row}": _row(batch, row) for row in range(4)}
    for row in gone:
        batch.remove_request(f"r{row}")
    moves = batch.condense()
    left = [req_id for req_id in before if req_id not in {f"r{row}" for row in gone}]
    assert sorted(batch.req_ids) == left and batch.num_reqs == len(left)  # type: ignore[type-var]
    for row, req_id in enumerate(batch.req_ids):
        assert _row(batch, row) == before[req_id]  # type: ignore[index]
    assert len(moves) <= len(gone)
    for mapping in batch._row_dicts():
        assert set(mapping) <= set(range(len(left)))


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 1, 0, 2), (2, 0, 3, 1)])
def test_t1_a_row_is_as_new_after_others_lived_in_it(order: tuple[int, ...]) -> None:
    """A row is reused: nothing of its former request may show in a shorter successor."""
    used, fresh = _batch(4), _batch(0)
    for index in (3, 2, 1, 0):
        used.remove_request(f"r{index}")
    used.condense()
    for index in order:
        used.add_request(_state(index))
        fresh.add_request(_state(index))
    for row in range(4):
        blocks = int(used.num_blocks[row])
        a, b = _row(used, row), _row(fresh, row)
        assert a.pop("column 0")[:blocks] == b.pop("column 0")[:blocks]  # type: ignore[index]
        generator_a, generator_b = a.pop("dict 0"), b.pop("dict 0")
        assert (generator_a is None) == (generator_b is None)
        assert a == b


@both_loops
def test_t1_in_a_running_engine(loop: str) -> None:
    """Long prompts beside decodes make V1 swap, finished requests make it condense; each still gets its own answer."""
    moved: list[RowMoved] = []
    trace = [
        TraceRequest(f"r{i}", tuple(prompt_of(6 + 7 * (i % 3), i)), greedy(3 + 2 * i), arrival=2 * i) for i in range(6)
    ]
    with tiny_llm("v1", loop, max_num_batched_tokens=12) as llm, llm.hooks.subscribe(RowMoved, moved.append):
        result = run_trace(llm, trace)
    assert {event.how for event in moved} == {"condense", "swap"}
    assert {r.request_id: result.tokens(r.request_id) for r in trace} == {
        r.request_id: reference(r.prompt, r.params) for r in trace
    }
