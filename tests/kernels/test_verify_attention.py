"""Attention of drafts and the token before them, against its loop form and against decodes one by one."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch

from kernels.paged_attention import MAX_COUNTERS
from tests.kernels.attention_batches import attention_batch, same_where_finite
from tests.kernels.attention_calls import SHAPES, as_the_loop_gives, decode, prefill, splits_of, verify

pytestmark = pytest.mark.slow  # interpreted kernels

REQUESTS = [(0, 3), (7, 1), (75, 4), (290, 2), (40, 4)]
# Of many programs one has this step's tokens alone.
splits = splits_of("kernels.verify_attention", (1, 2, 8))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("form", ["torch", "interpret"])
def test_ragged_queries(form: str, shape: str, splits: int) -> None:
    batch = attention_batch(REQUESTS, pad=7, **SHAPES[shape])
    got = as_the_loop_gives(verify, batch, form)
    assert not got[-7:].any() and torch.isfinite(got).all()


def test_many_queries_are_shared_out_among_programs() -> None:
    batch = attention_batch([(9, 11), (70, 16), (3, 2)], pad=2, **SHAPES["three-a-head"])
    got = as_the_loop_gives(verify, batch, "interpret", 16)
    assert not got[-2:].any()


def test_tiles() -> None:
    """Every pair of a group and a KV head whose context is split has a counter, and every query a program."""
    module = import_module("kernels.verify_attention")
    for num_reqs in (1, 2, 8, 16, 17, 64, 100, 256, 600):
        for kv_heads, per_query, block_d in ((8, 2, 128), (3, 3, 64), (32, 1, 128), (1, 8, 64), (2, 32, 16)):
            for queries in (1, 2, 5, 8, 16, 64):
                tiles = module._tiles(num_reqs, kv_heads, per_query, queries, block_d)
                assert tiles.queries * tiles.groups >= queries and tiles.queries * per_query <= tiles.block_m
                assert tiles.splits == 1 or num_reqs * tiles.groups * kv_heads <= MAX_COUNTERS
                rows = 1 << (tiles.queries * per_query - 1).bit_length()
                held = tiles.splits * rows * block_d / (32 * tiles.num_warps)
                assert tiles.splits == 1 or held <= 128, "what a thread combines lies in registers"


@pytest.mark.parametrize("form", ["loop", "torch", "interpret"])
def test_equals_prefill_and_decode(form: str) -> None:
    batch = attention_batch(REQUESTS)
    same_where_finite(verify(batch, form, max_query_len=16)[0], prefill(batch, "loop")[0])
    ones = attention_batch([(5, 1), (33, 1)])
    same_where_finite(verify(ones, form, max_query_len=1)[0], decode(ones, "loop")[0])


def test_wrong_arguments_are_named() -> None:
    batch = attention_batch(REQUESTS)
    with pytest.raises(ValueError, match="max_query_len=65: 1 to 64 queries a request are possible"):
        verify(batch, "torch", max_query_len=65)
    batch.query_start_loc = batch.query_start_loc.long()
    with pytest.raises(ValueError, match="query_start_loc must have dtype torch.int32"):
        verify(batch, "torch")
