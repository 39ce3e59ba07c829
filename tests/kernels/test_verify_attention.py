"""Attention of drafts and the token before them, against its loop form and against decodes one by one."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch

from kernels import verify_attention
from kernels.paged_attention import MAX_COUNTERS
from tests.kernels.attention_batches import AttentionBatch, attention_batch, same_where_finite
from tests.kernels.test_paged_attention import SHAPES, decode, prefill

pytestmark = pytest.mark.slow  # interpreted kernels

REQUESTS = [(0, 3), (7, 1), (75, 4), (290, 2), (40, 4)]


def verify(
    batch: AttentionBatch, form: str, max_query_len: int = 4, start_early: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and cache after one call; the cache's poison stays where nothing was written."""
    batch = batch.clone()
    counters = torch.zeros(MAX_COUNTERS, dtype=torch.int32, device=batch.qkv.device)
    if start_early:
        torch.cuda.synchronize()  # nothing that is read early may be under way
    # A request of no query pads the batch, as in a captured step.
    ends = batch.query_start_loc[-1:].expand(len(batch.seq_lens) + 1 - len(batch.query_start_loc))
    out = verify_attention(
        batch.qkv,
        batch.kv_cache,
        batch.block_table,
        batch.seq_lens,
        torch.cat((batch.query_start_loc, ends)),
        batch.slot_mapping,
        batch.rotation,
        max_query_len=max_query_len,
        max_seq_len=int(batch.seq_lens.max()),
        counters=counters,
        start_early=start_early,
        form=form,
    )
    assert not counters.any(), "the kernel leaves the counters as it found them"
    return out, batch.kv_cache


@pytest.fixture(params=[1, 2, 8])
def splits(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many programs share a context: one, or several of which some find nothing to do; of many one has
    this step's tokens alone."""
    module = import_module("kernels.verify_attention")
    monkeypatch.setattr(module, "num_splits", lambda num_pairs, most: request.param)
    return request.param


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("form", ["torch", "interpret"])
def test_ragged_queries(form: str, shape: str, splits: int) -> None:
    batch = attention_batch(REQUESTS, pad=7, **SHAPES[shape])
    expected, expected_cache = verify(batch, "loop")
    got, cache = verify(batch, form)
    same_where_finite(got, expected)
    same_where_finite(cache, expected_cache)
    assert not got[-7:].any() and torch.isfinite(got).all()


def test_many_queries_are_shared_out_among_programs() -> None:
    batch = attention_batch([(9, 11), (70, 16), (3, 2)], pad=2, **SHAPES["three-a-head"])
    expected, expected_cache = verify(batch, "loop", 16)
    got, cache = verify(batch, "interpret", 16)
    same_where_finite(got, expected)
    same_where_finite(cache, expected_cache)
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
