"""Attention of a parallel drafter's blocks, against its loop form and against decodes of what is stored."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch

import kernels
from kernels.paged_attention import MAX_COUNTERS
from tests.kernels.attention_batches import AttentionBatch, attention_batch, same_where_finite
from tests.kernels.test_paged_attention import SHAPES

pytestmark = pytest.mark.slow  # interpreted kernels

REQUESTS = [(0, 3), (7, 3), (75, 3), (290, 3)]


def block(batch: AttentionBatch, form: str, start_early: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and cache after one call; the cache's poison stays where nothing was written."""
    batch = batch.clone()
    counters = torch.zeros(MAX_COUNTERS, dtype=torch.int32, device=batch.qkv.device)
    if start_early:
        torch.cuda.synchronize()  # nothing that is read early may be under way
    out = kernels.block_attention(
        batch.qkv,
        batch.kv_cache,
        batch.block_table,
        batch.seq_lens,
        batch.slot_mapping,
        batch.rotation,
        max_seq_len=int(batch.seq_lens.max()),
        counters=counters,
        start_early=start_early,
        form=form,
    )
    assert not counters.any(), "the kernel leaves the counters as it found them"
    return out, batch.kv_cache


def cut_short(batch: AttentionBatch, request: int, stored: int) -> None:
    """Take the slots from a request's last queries, as at the end of its blocks."""
    first, end = batch.query_start_loc[request : request + 2].tolist()
    batch.slot_mapping[first + stored : end] = -1
    batch.seq_lens[request] -= end - first - stored


def padded(requests: list[tuple[int, int]], **shape: object) -> AttentionBatch:
    """With one request that has no block: as many rows as the others have, and none stored."""
    batch = attention_batch(requests, pad=requests[0][1], **shape)  # type: ignore[arg-type]
    batch.seq_lens = batch.seq_lens[: len(requests) + 1]
    batch.block_table = batch.block_table[: len(requests) + 1]
    return batch


@pytest.fixture(params=[1, 2, 8])
def splits(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many programs share a context."""
    module = import_module("kernels.verify_attention")
    monkeypatch.setattr(module, "num_splits", lambda num_pairs, most: request.param)
    return request.param


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("form", ["torch", "interpret"])
def test_queries_that_see_the_same_keys(form: str, shape: str, splits: int) -> None:
    """A block of nothing but itself, some behind contexts, one cut short, one of which nothing is stored."""
    batch = padded([*REQUESTS, (33, 3)], **SHAPES[shape])
    cut_short(batch, 1, stored=1)
    cut_short(batch, 4, stored=0)
    (expected, expected_cache), (got, cache) = block(batch, "loop"), block(batch, form)
    same_where_finite(got, expected)
    same_where_finite(cache, expected_cache)
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
