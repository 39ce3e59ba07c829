"""The sampler's kernels never make the host wait for the device, in the torch form or, on a GPU, in any."""

from collections.abc import Callable
from functools import partial

import pytest
import torch

import kernels
from tests.kernels.sampling_batches import (
    MAX_WORDS,
    bad_words_tables,
    bias_tables,
    longest,
    penalty_tables,
    sampling_batch,
)
from tests.kernels.test_no_host_wait import NoHostWait, forbid_waits

VOCAB = 100


def calls(device: str, form: str, num_reqs: int) -> list[Callable[[], object]]:
    batch = sampling_batch(1, vocab=VOCAB, num_reqs=num_reqs)
    logits, rows, local, tokens, positions, history, prompt_len, prefill_len, idx = (
        x.to(device)
        for x in (
            batch.logits,
            batch.expanded_idx_mapping,
            batch.expanded_local_pos,
            batch.token_ids,
            batch.positions,
            batch.all_token_ids,
            batch.prompt_len,
            batch.prefill_len,
            batch.idx_mapping,
        )
    )
    lengths = longest(bias_tables(1, vocab=VOCAB))
    bias = kernels.LogitBiasTables(*(x.to(device) for x in bias_tables(1, vocab=VOCAB)))
    penalties = kernels.PenaltyTables(*(x.to(device) for x in penalty_tables(1, vocab=VOCAB)))
    words = kernels.BadWordsTables(*(x.to(device) for x in bad_words_tables(1, vocab=VOCAB)))
    temperature, targets = torch.ones(6, device=device), torch.zeros(len(logits), dtype=torch.int64, device=device)
    starts = torch.arange(7, dtype=torch.int32, device=device)
    bitmask = torch.ones(2, 4, dtype=torch.int32, device=device)
    return [
        partial(kernels.apply_logit_bias, logits, rows, positions, bias, max_lengths=lengths, form=form),
        partial(kernels.apply_penalties, logits, rows, local, tokens, penalties, max_drafts=3, form=form),
        partial(
            kernels.apply_bad_words, logits, rows, local, tokens, positions, history, prompt_len, words,
            max_words=MAX_WORDS, form=form,
        ),
        partial(kernels.bincount, idx, history, prompt_len, prefill_len, *penalties[3:], 39, form=form),
        partial(kernels.apply_temperature, logits, rows, temperature, form=form),
        partial(kernels.topk_logprobs, logits, targets, 3, form=form),
        partial(kernels.prompt_logprobs_token_ids, idx, starts, history, prompt_len, num_reqs, form=form),
        partial(kernels.apply_grammar_bitmask, logits, rows[:0], bitmask, form=form),
        partial(kernels.apply_grammar_bitmask, logits, starts[:1], bitmask, form=form),
    ]  # fmt: skip


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("num_reqs", [0, 1, 5])
def test_torch_forms(num_reqs: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    todo = calls(device, "torch", num_reqs)
    with monkeypatch.context() as patch, NoHostWait(device):
        forbid_waits(patch)
        for call in todo:
            call()


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["torch", "triton"])
def test_no_synchronisation_on_a_gpu(form: str) -> None:
    todo = calls("cuda", form, 5)
    for call in todo:
        call()  # compiles, fills the allocator's cache
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        for call in todo:
            call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
