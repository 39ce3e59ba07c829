"""Attention of a parallel drafter's blocks, against its loop form and against decodes of what is stored."""

from __future__ import annotations

import pytest
import torch

import kernels
from tests.kernels.attention_batches import attention_batch, cut_short, padded_blocks, same_where_finite
from tests.kernels.attention_calls import SHAPES, as_the_loop_gives, block, splits_of

pytestmark = pytest.mark.slow  # interpreted kernels

REQUESTS = [(0, 3), (7, 3), (75, 3), (290, 3)]
splits = splits_of("kernels.verify_attention", (1, 2, 8))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("form", ["torch", "interpret"])
def test_queries_that_see_the_same_keys(form: str, shape: str, splits: int) -> None:
    """A block of nothing but itself, some behind contexts, one cut short, one of which nothing is stored."""
    batch = padded_blocks([*REQUESTS, (33, 3)], **SHAPES[shape])
    cut_short(batch, 1, stored=1)
    cut_short(batch, 4, stored=0)
    got = as_the_loop_gives(block, batch, form)
    assert not got[15:].any() and torch.isfinite(got).all()


@pytest.mark.parametrize("form", ["loop", "torch", "interpret"])
def test_a_query_is_a_decode_of_what_is_stored(form: str) -> None:
    batch = attention_batch(REQUESTS)
    got, cache = block(batch, form)
    rotated = batch.clone()
    kernels.store_kv(rotated.qkv, rotated.kv_cache, rotated.slot_mapping, rotated.rotation, form="loop")
    for query in (3, 5):
        alone = kernels.decode_attention(
            rotated.qkv[query : query + 1], cache, batch.block_table[1:], batch.seq_lens[1:], None, max_seq_len=10,
            form="loop",
        )  # fmt: skip
        same_where_finite(alone[0], got[query])


def test_many_queries_are_shared_out_among_programs() -> None:
    """Of a long block; and of one with more heads than a program of a larger batch serves."""
    for requests in ([(9, 40)], [(9, 43)] * 17):
        batch = attention_batch(requests, **SHAPES["three-a-head"])
        same_where_finite(block(batch, "interpret")[0], block(batch, "torch")[0])


def test_wrong_arguments_are_named() -> None:
    batch = attention_batch([(7, 3), (2, 2)])
    with pytest.raises(ValueError, match="qkv must have 1 to 64 rows for each of 2 requests, got 5 rows"):
        block(batch, "torch")
    batch.slot_mapping = batch.slot_mapping.int()
    with pytest.raises(ValueError, match="slot_mapping must have dtype torch.int64"):
        block(batch, "torch")
