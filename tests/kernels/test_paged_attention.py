"""Decode and prefill attention, and the KV store, against their loop forms."""

from __future__ import annotations

import pytest
import torch

import kernels
from kernels.paged_attention import MAX_COUNTERS, num_splits
from tests.kernels.attention_batches import attention_batch, same_where_finite
from tests.kernels.attention_calls import SHAPES, as_the_loop_gives, decode, prefill, splits_of

pytestmark = pytest.mark.slow  # interpreted kernels

FAST_FORMS = ("torch", "interpret")
splits = splits_of("kernels.paged_attention", (1, 4, 16))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("form", FAST_FORMS)
def test_decode(form: str, shape: str, splits: int) -> None:
    """With a first token, a full block, more than a tile a part, and two rows of padding."""
    batch = attention_batch([(0, 1), (7, 1), (75, 1), (290, 1)], pad=2, **SHAPES[shape])
    got = as_the_loop_gives(decode, batch, form)
    assert not got[4:].any() and torch.isfinite(got).all()


def test_what_is_rotated_is_stored() -> None:
    batch = attention_batch([(7, 1)])
    with pytest.raises(ValueError, match="a rotation without a slot_mapping: call store_kv first"):
        kernels.decode_attention(
            batch.qkv, batch.kv_cache, batch.block_table, batch.seq_lens, None, batch.rotation, max_seq_len=10
        )


def test_splits_follow_from_sizes_alone() -> None:
    assert [num_splits(pairs, 16) for pairs in (0, 8, 64, 192, 512, 1024, 2048)] == [16, 16, 16, 8, 4, 2, 1]
    assert num_splits(8, 5) == 4 and num_splits(64) == num_splits(8, 100) == 32
    # Every pair of a row and a KV head that is split has a counter.
    assert max(pairs for pairs in range(5000) if num_splits(pairs, 8) > 1) <= MAX_COUNTERS


@pytest.mark.parametrize("form", FAST_FORMS)
def test_decode_without_rotation_takes_heads_as_they_are(form: str, splits: int) -> None:
    batch = attention_batch([(5, 1), (33, 1)])
    same_where_finite(decode(batch, form, rotate=False)[0], decode(batch, "loop", rotate=False)[0])
    assert not torch.allclose(decode(batch, form, rotate=False)[0], decode(batch, form)[0])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("form", FAST_FORMS)
def test_prefill_chunks_and_decodes_in_one_launch(form: str, shape: str) -> None:
    batch = attention_batch([(0, 1), (9, 1), (0, 21), (70, 5), (3, 17)], pad=2, **SHAPES[shape])
    got = as_the_loop_gives(prefill, batch, form)
    assert (got[-2:] == -7).all(), "rows of no request are left alone"


@pytest.mark.parametrize("form", ["loop", *FAST_FORMS])
def test_prefill_of_the_requests_behind_the_decodes(form: str) -> None:
    batch = attention_batch([(9, 1), (4, 1), (0, 6), (2, 4)])
    expected, _ = prefill(batch, "loop")
    tail = batch.clone()
    tail.block_table, tail.seq_lens = batch.block_table[2:], batch.seq_lens[2:]
    tail.query_start_loc = batch.query_start_loc[2:]
    got, _ = prefill(tail, form)
    same_where_finite(got[2:], expected[2:])
    assert (got[:2] == -7).all()


def test_a_store_without_rotation_only_copies() -> None:
    batch = attention_batch([(2, 3), (0, 2)], pad=1)
    for form in FAST_FORMS:
        got = batch.clone()
        kernels.store_kv(got.qkv, got.kv_cache, got.slot_mapping, form=form)
        assert torch.equal(got.qkv[:5], batch.qkv[:5])
        kv = batch.qkv[:5, 4 * 16 :].view(5, 2, 2, 16).transpose(0, 1)
        assert torch.equal(got.kv_cache.view(2, -1, 2, 16)[:, got.slot_mapping[:5]], kv)
        written = torch.isfinite(got.kv_cache).sum() - torch.isfinite(batch.kv_cache).sum()
        assert written == 5 * 2 * 2 * 16


def test_slot_zero_is_a_slot_like_any_other() -> None:
    for form in ("loop", *FAST_FORMS):
        qkv, cache = torch.arange(3.0).view(3, 1).expand(3, 24).contiguous(), torch.full((2, 2, 2, 1, 8), 9.0)
        kernels.store_kv(qkv, cache, torch.tensor([-1, 0, -1]), form=form)
        assert (cache[:, 0, 0] == 1).all() and (cache[:, 0, 1] == 9).all() and (cache[:, 1] == 9).all(), form


def test_wrong_arguments_are_named() -> None:
    batch = attention_batch([(2, 1)])
    with pytest.raises(ValueError, match=r"qkv rows must be \(Hq \+ 2 \* 2\) \* 16 long"):
        kernels.store_kv(batch.qkv[:, :-16], batch.kv_cache, batch.slot_mapping)
    with pytest.raises(ValueError, match=r"kv_cache must be contiguous"):
        kernels.store_kv(batch.qkv, batch.kv_cache[:1], batch.slot_mapping)
    with pytest.raises(ValueError, match=r"qkv must have dtype torch.float32"):
        kernels.store_kv(batch.qkv.bfloat16(), batch.kv_cache, batch.slot_mapping)
    batch.rotation.positions.resize_(0)
    with pytest.raises(ValueError, match=r"positions needs at least 1 row"):
        kernels.store_kv(batch.qkv, batch.kv_cache, batch.slot_mapping, batch.rotation)
