"""What stands around a block of drafts: its context's keys and values, and where no draft can be."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.keep_drafts import keep_drafts
from kernels.mask_drafts import NO_DRAFT, Confidences, mask_drafts
from kernels.store_context import store_context

FAST_FORMS = ("torch", "interpret")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", FAST_FORMS)
@pytest.mark.parametrize("shape", [(2, 3, 8), (1, 1, 12), (3, 2, 16)])
def test_store_context(form: str, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Every layer has its own norm; what has no slot is stored nowhere, and slot 0 is a slot like any other."""
    layers, heads, size = shape
    g = torch.Generator().manual_seed(1)
    kv = torch.randn(6, 2 * layers * heads * size, generator=g).to(dtype)
    slots = torch.tensor([7, -1, 0, 12, -1, 3, 99])
    positions = torch.tensor([4, 10**6, 5, 6, 10**6, 9, 10**6])
    k_norm, cos_sin = torch.rand(layers, size, generator=g) + 0.5, torch.randn(10, size, generator=g)
    caches = []
    for one in ("loop", form):
        cache = torch.full((layers, 2, 4, 4, heads, size), torch.nan, dtype=dtype)
        store_context(kv, cache, slots, positions, cos_sin, k_norm.to(dtype), 1e-5, form=one)
        caches.append(cache)
    tolerance = {"atol": 2e-6, "rtol": 2e-6} if dtype == torch.float32 else {"atol": 1e-2, "rtol": 1e-2}
    torch.testing.assert_close(caches[1], caches[0], equal_nan=True, **tolerance)
    written = torch.isfinite(caches[1]).all((0, 1, 4, 5)).flatten().nonzero()[:, 0]
    assert written.tolist() == [0, 3, 7, 12]


def test_store_context_names_wrong_arguments() -> None:
    cache, i = torch.zeros(2, 2, 4, 4, 1, 8), torch.zeros(3, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"2 \* 2 layers \* 1 heads \* 8 long: got 24"):
        store_context(torch.zeros(3, 24), cache, i, i, torch.zeros(9, 8), torch.ones(2, 8), 1e-5)
    with pytest.raises(ValueError, match="slot_mapping needs at least 3 row"):
        store_context(torch.zeros(3, 32), cache, i[:2], i, torch.zeros(9, 8), torch.ones(2, 8), 1e-5)


@given(
    seed=st.integers(0, 2**31), num_reqs=st.integers(0, 4), num_drafts=st.integers(1, 7), more=st.integers(0, 2),
    confident=st.booleans(), calibrated=st.booleans(),
)  # fmt: skip
@settings(max_examples=25, deadline=None)
def test_mask_drafts(seed: int, num_reqs: int, num_drafts: int, more: int, confident: bool, calibrated: bool) -> None:
    g = torch.Generator().manual_seed(seed)
    cells, rows = num_reqs * (num_drafts + more), 6
    tokens = torch.randint(0, 99, (num_reqs, num_drafts), generator=g)
    slots = torch.randint(-2, 9, (cells,), generator=g).clamp(min=-1)
    positions = torch.randint(0, 12, (cells,), generator=g)
    idx_mapping = torch.randperm(rows, generator=g)[:num_reqs].int()
    logits = torch.randn(num_reqs, num_drafts, generator=g) * 30
    divisors = torch.rand(num_drafts, generator=g) + 0.5 if calibrated else None
    results = []
    for form in ("loop", *FAST_FORMS):
        own, kept = tokens.clone(), torch.full((rows, num_drafts), -7.0)
        confidences = Confidences(logits, divisors, kept) if confident else None
        kept_tokens = torch.full((rows, num_drafts), -7) if calibrated else None
        mask_drafts(own, idx_mapping, slots, positions, 11, confidences, kept_tokens, form=form)
        results.append((own, kept))
        if kept_tokens is not None:
            assert torch.equal(kept_tokens[idx_mapping.long()], own)
            assert int((kept_tokens == -7).sum()) == (rows - num_reqs) * num_drafts
    for own, kept in results[1:]:
        assert torch.equal(own, results[0][0])
        torch.testing.assert_close(kept, results[0][1])
    if confident and num_reqs:
        absent = results[0][0] == NO_DRAFT
        chances = torch.sigmoid(logits if divisors is None else logits / divisors)
        assert torch.equal(results[0][1][idx_mapping.long()] == 0, absent | (chances == 0))


@pytest.mark.parametrize("form", ("loop", *FAST_FORMS))
def test_keep_drafts(form: str) -> None:
    """A request in its prompt, one whose second draft is beyond the model's length, and two of padding."""
    tokens, kept = torch.tensor([[5, 6], [7, 8], [9, 9], [9, 9]]), torch.full((4, 2), -7)
    idx_mapping, num_sampled = torch.tensor([2, 0, 3, 3]).int(), torch.tensor([0, 3, 0, 0]).int()
    for keeps in (None, kept):
        own = tokens.clone()
        keep_drafts(own, idx_mapping, num_sampled, torch.tensor([3, 9, 0, 0]), 10, keeps, form=form)
        assert own.tolist() == [[-1, -1], [7, -1], [-1, -1], [-1, -1]]
    assert kept.tolist() == [[7, -1], [-7, -7], [-1, -1], [-1, -1]]
    keep_drafts(own := tokens.clone(), idx_mapping, num_sampled, None, 10, kept, form=form)
    assert own.tolist() == [[-1, -1], [7, 8], [-1, -1], [-1, -1]] and kept[0].tolist() == [7, 8]
    with pytest.raises(ValueError, match=r"kept \[R, 2\]"):
        keep_drafts(tokens, idx_mapping, num_sampled, torch.zeros(4).long(), 10, kept[:, :1], form=form)


def test_mask_drafts_names_wrong_arguments() -> None:
    i = torch.zeros(6, dtype=torch.int64)
    tokens, rows = torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"kept as \[R, 3\]"):
        mask_drafts(tokens, rows, i, i, 9, Confidences(torch.zeros(2, 3), None, torch.zeros(4, 2)))
    with pytest.raises(ValueError, match="positions needs at least 6 row"):
        mask_drafts(tokens, rows, i, i[:5], 9)


@pytest.mark.gpu
def test_compiled() -> None:
    g = torch.Generator().manual_seed(3)
    kv, k_norm = torch.randn(40, 2 * 2 * 3 * 64, generator=g), torch.rand(2, 64, generator=g)
    cos_sin, slots = torch.randn(50, 64, generator=g), torch.randperm(64, generator=g)[:40]
    slots[::7] = -1
    tokens, logits = torch.randint(0, 99, (5, 7), generator=g), torch.randn(5, 7, generator=g)
    places, rows = torch.arange(40) % 13, torch.tensor([4, 1, 0, 3, 2], dtype=torch.int32)
    results = []
    for device, form in (("cpu", "loop"), ("cuda", "triton")):
        on = [x.to(device) for x in (kv, slots, torch.arange(40), cos_sin, k_norm, tokens, logits, places, rows)]
        cache, kept = torch.zeros(2, 2, 4, 16, 3, 64, device=device), torch.zeros(5, 7, device=device)
        store_context(on[0], cache, on[1], on[2], on[3], on[4], 1e-5, form=form)
        mask_drafts(on[5], on[8], on[1], on[7], 12, Confidences(on[6], None, kept), form=form)
        results.append((cache.cpu(), on[5].cpu(), kept.cpu()))
    for own, expected in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(own, expected, atol=1e-5, rtol=1e-5)
