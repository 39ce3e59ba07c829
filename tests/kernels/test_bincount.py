"""Kernel 14: the prompt's bitmap and the counts of what came after it, for new requests alone."""

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kernels

ALL_FORMS = ("loop", "torch", "interpret")
STALE = 5


@given(
    seed=st.integers(0, 2**31),
    vocab=st.sampled_from([1, 31, 32, 33, 100, 2000]),
    num_new=st.integers(0, 4),
    max_len=st.sampled_from([2, 40, 1500]),
)
@settings(max_examples=15)
def test_bincount(seed: int, vocab: int, num_new: int, max_len: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randperm(6, generator=generator)[:num_new].int()
    tokens = torch.randint(0, vocab, (6, max_len), generator=generator).int()
    prefill_len = torch.randint(1, max_len + 1, (6,), generator=generator).int()
    prompt_len = (torch.rand(6, generator=generator) * prefill_len).int().clamp(min=1)
    longest = int(prefill_len[rows.long()].max()) if num_new else 0
    for form in ALL_FORMS:
        mask = torch.full((6, -(-vocab // 32)), STALE, dtype=torch.int32)
        counts = torch.full((6, vocab), STALE, dtype=torch.int32)
        kernels.bincount(rows, tokens, prompt_len, prefill_len, mask, counts, longest, form=form)
        for row in range(6):
            if row not in rows.tolist():
                assert (mask[row] == STALE).all() and (counts[row] == STALE).all(), f"{form}: another row was written"
                continue
            prompt = tokens[row, : prompt_len[row]].tolist()
            output = Counter(tokens[row, prompt_len[row] : prefill_len[row]].tolist())
            assert [int(mask[row, t // 32]) >> t % 32 & 1 for t in range(vocab)] == [t in prompt for t in range(vocab)]
            assert counts[row].tolist() == [output[t] for t in range(vocab)]


@pytest.mark.parametrize("form", ALL_FORMS)
def test_the_sign_bit_is_a_token_too(form: str) -> None:
    mask, counts = torch.zeros(1, 2, dtype=torch.int32), torch.zeros(1, 40, dtype=torch.int32)
    tokens = torch.tensor([[31, 31, 0, 39, 31, 39]], dtype=torch.int32)
    length = torch.tensor([4], dtype=torch.int32)
    kernels.bincount(torch.zeros(1, dtype=torch.int32), tokens, length, length + 2, mask, counts, 6, form=form)
    assert mask.tolist() == [[-(2**31) + 1, 1 << 7]]
    assert counts.nonzero().tolist() == [[0, 31], [0, 39]]
