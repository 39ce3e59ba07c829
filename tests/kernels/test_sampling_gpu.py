"""On a GPU the compiled sampler's kernels give what the torch forms give, at the size of a real vocabulary too."""

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

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("vocab", [1, 33, 4097, 151_936])
@pytest.mark.parametrize("seed", range(4))
def test_compiled_kernels(seed: int, vocab: int) -> None:
    batch = sampling_batch(seed, vocab=vocab, num_reqs=6)
    bias, penalties = bias_tables(seed, vocab=vocab), penalty_tables(seed, vocab=vocab)
    words = bad_words_tables(seed, vocab=vocab)
    bitmask = torch.randint(-(2**31), 2**31, (2, -(-vocab // 32))).int()
    temperature = torch.tensor([0.0, 1.0, 0.3, 2.5, 1e-5, 7.0])

    def run(device: str, form: str) -> tuple[torch.Tensor, ...]:
        logits, rows, local, tokens, positions, history, prompt_len, prefill_len, idx = (
            x.to(device, copy=True)
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
        raw, tables = logits.clone(), kernels.PenaltyTables(*(x.to(device, copy=True) for x in penalties))
        grammar_rows = torch.tensor([1, 0], dtype=torch.int32, device=device)
        kernels.apply_grammar_bitmask(logits, grammar_rows, bitmask.to(device), form=form)
        kernels.apply_logit_bias(
            logits,
            rows,
            positions,
            kernels.LogitBiasTables(*(x.to(device) for x in bias)),
            max_lengths=longest(bias),
            form=form,
        )
        kernels.apply_penalties(logits, rows, local, tokens, tables, max_drafts=3, form=form)
        kernels.apply_bad_words(
            logits, rows, local, tokens, positions, history, prompt_len,
            kernels.BadWordsTables(*(x.to(device) for x in words)), max_words=MAX_WORDS, form=form,
        )  # fmt: skip
        kernels.apply_temperature(logits, rows, temperature.to(device), form=form)
        kernels.bincount(idx, history, prompt_len, prefill_len, *tables[3:], 40, form=form)
        chosen = torch.zeros(len(raw), dtype=torch.int64, device=device)
        _, logprobs, ranks = kernels.topk_logprobs(raw, chosen, 5, form=form)
        starts = torch.arange(7, dtype=torch.int32, device=device)
        targets = kernels.prompt_logprobs_token_ids(idx, starts, history, prompt_len, 6, form=form)
        return logits, *tables[3:], logprobs, ranks, targets

    for got, expected in zip(run("cuda", "triton"), run("cpu", "torch"), strict=True):
        torch.testing.assert_close(got.cpu(), expected, rtol=1e-5, atol=1e-4, equal_nan=True)
