"""One call of each attention kernel on a batch of its own, and its comparison with the loop form."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch

import kernels
from kernels.paged_attention import MAX_COUNTERS
from tests.kernels.attention_batches import AttentionBatch, same_where_finite

SHAPES = {
    "gqa": {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16},
    "three-a-head": {"num_heads": 3, "num_kv_heads": 1, "head_dim": 24},
    "mha-no-norm": {"num_heads": 2, "num_kv_heads": 2, "head_dim": 8, "norms": False},
}
Answer = tuple[torch.Tensor, torch.Tensor]
"""Output and cache after one call; the cache's poison stays where nothing was written."""


def _attend(kernel: Callable[..., torch.Tensor], batch: AttentionBatch, start_early: bool, **particular: Any) -> Answer:
    batch = batch.clone()
    counters = torch.zeros(MAX_COUNTERS, dtype=torch.int32, device=batch.qkv.device)
    if start_early:
        torch.cuda.synchronize()  # nothing that is read early may be under way
    given: dict[str, Any] = {
        "slot_mapping": batch.slot_mapping, "rotation": batch.rotation, "max_seq_len": int(batch.seq_lens.max()),
        "counters": counters, "start_early": start_early,
    }  # fmt: skip
    out = kernel(batch.qkv, batch.kv_cache, batch.block_table, batch.seq_lens, **given | particular)
    assert not counters.any(), "the kernel leaves the counters as it found them"
    return out, batch.kv_cache


def decode(batch: AttentionBatch, form: str, rotate: bool = True, start_early: bool = False) -> Answer:
    rotation = batch.rotation if rotate else None
    return _attend(kernels.decode_attention, batch, start_early, rotation=rotation, form=form)


def verify(batch: AttentionBatch, form: str, max_query_len: int = 4, start_early: bool = False) -> Answer:
    # A request of no query pads the batch, as in a captured step.
    ends = batch.query_start_loc[-1:].expand(len(batch.seq_lens) + 1 - len(batch.query_start_loc))
    starts = torch.cat((batch.query_start_loc, ends))
    return _attend(
        kernels.verify_attention, batch, start_early, query_start_loc=starts, max_query_len=max_query_len, form=form
    )


def block(batch: AttentionBatch, form: str, start_early: bool = False) -> Answer:
    return _attend(kernels.block_attention, batch, start_early, form=form)


def prefill(batch: AttentionBatch, form: str) -> Answer:
    """The store, then prefill into an output of -7."""
    batch = batch.clone()
    kernels.store_kv(batch.qkv, batch.kv_cache, batch.slot_mapping, batch.rotation, form=form)
    num_heads = batch.qkv.shape[1] // batch.kv_cache.shape[4] - 2 * batch.kv_cache.shape[3]
    out = torch.full_like(batch.qkv[:, : num_heads * batch.kv_cache.shape[4]], -7.0)
    kernels.prefill_attention(
        batch.qkv,
        batch.kv_cache,
        batch.block_table,
        batch.seq_lens,
        batch.query_start_loc,
        out,
        num_tokens=batch.qkv.shape[0],
        max_seq_len=int(batch.seq_lens.max()),
        form=form,
    )
    return out, batch.kv_cache


def as_the_loop_gives(call: Callable[..., Answer], batch: AttentionBatch, form: str, *particular: Any) -> torch.Tensor:
    """The output, which is the loop form's, as the cache is."""
    (expected, expected_cache), (got, cache) = call(batch, "loop", *particular), call(batch, form, *particular)
    same_where_finite(got, expected)
    same_where_finite(cache, expected_cache)
    return got


def splits_of(module: str, choices: tuple[int, ...]) -> Any:
    """A fixture: how many programs share a context, one, or several of which some find nothing to do."""

    @pytest.fixture(params=choices)
    def splits(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
        monkeypatch.setattr(import_module(module), "num_splits", lambda *sizes: request.param)
        return request.param

    return splits
