"""Runner V1's sampler in a step with drafts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import SamplingParams
from engine.device import Device
from engine.hooks import Hooks
from engine.runner_v1.input_batch import CachedRequestState, InputBatch
from engine.runner_v1.rejection_sampler import (
    RejectionSamplerOutput,
    SpecDecodeMetadata,
    make_drafted_sampling,
    make_spec_decode_metadata,
    of_logits,
    rejection_sample,
)
from engine.runner_v1.sampler import process_logits
from engine.runner_v1.step_sampling import StepSampling
from engine.sample.logprobs import rows_to_dicts
from tests.engine.sampling_reference import processed
from tests.kernels.draws import chi_square_z

pytestmark = pytest.mark.slow

VOCAB = 23
FEATURES: dict[str, Any] = {
    "presence_penalty": 0.7,
    "frequency_penalty": -0.4,
    "repetition_penalty": 1.3,
    "logit_bias": {2: 3.5, 5: -1.25},
    "allowed_token_ids": tuple(range(1, 20)),
    "bad_words_token_ids": ((4,), (2, 3), (1, 2, 3)),
    "min_tokens": 3,
}
Request = tuple[list[int], list[int], SamplingParams]


@contextmanager
def batch_of(requests: Sequence[Request], vocab: int = VOCAB) -> Iterator[InputBatch]:
    """(prompt, output, parameters) of each request."""
    batch = InputBatch(Device(torch.device("cpu"), Hooks("v1")), len(requests), 32, 4, vocab_size=vocab)
    for index, (prompt, output, params) in enumerate(requests):
        generator = None
        if params.seed is not None and params.temperature > 0:
            generator = torch.Generator().manual_seed(params.seed)
        batch.add_request(
            CachedRequestState(
                req_id=f"r{index}", prompt_token_ids=prompt, output_token_ids=output, block_ids=[1],
                num_computed_tokens=0, sampling_params=params, stop_token_ids=frozenset({8, 9}), generator=generator,
            )
        )  # fmt: skip
    batch.refresh_metadata()
    batch.device.drain()
    try:
        yield batch
    finally:
        batch.device.close()


def metadata_of(batch: InputBatch, drafts: Sequence[Sequence[int]]) -> SpecDecodeMetadata:
    counts = [len(own) for own in drafts]
    return make_spec_decode_metadata(batch.device, np.cumsum([0, *(n + 1 for n in counts)], dtype=np.int32), counts)


def run(
    batch: InputBatch,
    drafts: Sequence[Sequence[int]],
    logits: torch.Tensor,
    discarded: frozenset[int] = frozenset(),
    seed: int = 0,
    **options: Any,
) -> RejectionSamplerOutput:
    spec = metadata_of(batch, drafts)
    metadata, step = make_drafted_sampling(batch, spec, drafts, discarded)
    batch.device.drain()
    tokens = torch.tensor([token for own in drafts for token in (0, *own)])
    return rejection_sample(logits, tokens, spec, metadata, step, torch.Generator().manual_seed(seed), **options)


def tokens_of(output: RejectionSamplerOutput) -> list[list[int]]:
    rows, counts = output.sampled.tolist(), output.num_sampled.tolist()
    assert all(token == -1 for row, n in zip(rows, counts, strict=True) for token in row[n:])
    return [row[:n] for row, n in zip(rows, counts, strict=True)]


def test_the_rows_of_a_step() -> None:
    with batch_of([([1], [], SamplingParams())]) as batch:
        starts = np.array([0, 4, 104, 107, 207, 209, 209], dtype=np.int32)
        spec = make_spec_decode_metadata(batch.device, starts, [3, 0, 2, 0, 1])
    assert spec.logits_indices.tolist() == [0, 1, 2, 3, 103, 104, 105, 106, 206, 207, 208]
    assert (spec.cu_num_logits[1:] - 1).tolist() == [3, 4, 7, 8, 10]
    assert spec.owner.tolist() == [0, 0, 0, 0, 1, 2, 2, 2, 3, 4, 4] and spec.max_drafts == 3


some_tokens = st.lists(st.integers(0, 5), max_size=4)
some_features = st.sets(st.sampled_from(sorted(FEATURES))).map(
    lambda names: SamplingParams(temperature=0, max_tokens=20, **{name: FEATURES[name] for name in names})
)


@given(
    requests=st.lists(
        st.tuples(some_tokens.map(lambda own: [1, *own]), some_tokens, some_features, some_tokens),
        min_size=1,
        max_size=4,
    ),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=60)
def test_a_row_behind_drafts_is_that_of_a_request_that_has_these_tokens(requests: list[Any], seed: int) -> None:
    drafts = [own for *_, own in requests]
    logits = torch.randn(sum(len(own) + 1 for own in drafts), VOCAB, generator=torch.Generator().manual_seed(seed)) * 5
    with batch_of([request[:3] for request in requests]) as batch:
        metadata, step = make_drafted_sampling(batch, metadata_of(batch, drafts), drafts, frozenset())
        batch.device.drain()
        got = process_logits(logits, of_logits(metadata, metadata_of(batch, drafts)), step)
        line, expected = 0, []
        for prompt, output, params, own in requests:
            rows = []
            for j in range(len(own) + 1):
                right = processed(logits[line].tolist(), params, prompt, [*output, *own[:j]], (8, 9))
                np.testing.assert_allclose(got[line].double().numpy(), right, rtol=2e-5, atol=2e-5)
                rows.append(int(got[line].argmax()))
                line += 1
            accepted = next((j for j, token in enumerate(own) if token != rows[j]), len(own))
            expected.append(rows[: accepted + 1])
        assert tokens_of(run(batch, drafts, logits)) == expected


def test_without_features_the_host_need_not_know_the_drafts() -> None:
    params = [SamplingParams(temperature=0.5, top_k=3), SamplingParams(temperature=0, top_p=0.5)]
    with batch_of([([1], [], own) for own in params]) as batch:
        spec = metadata_of(batch, [[1, 2], [3]])
        metadata, step = make_drafted_sampling(batch, spec, None, frozenset({1}))
        metadata = of_logits(metadata, spec)
        assert metadata.temperature.tolist() == [0.5, 0.5, 0.5, 0, 0] and step == StepSampling(discarded=frozenset({1}))
        assert metadata.top_k is not None and metadata.top_k.tolist() == [3, 3, 3, VOCAB, VOCAB]
    for name in ("logit_bias", "allowed_token_ids", "min_tokens"):
        one = SamplingParams(temperature=0, max_tokens=9, **{name: FEATURES[name]})
        with batch_of([([1], [], one)]) as batch:
            spec, logits = metadata_of(batch, [[1, 2]]), torch.randn(3, VOCAB)
            processed_rows = []
            for drafts in (None, [[1, 2]]):
                metadata, step = make_drafted_sampling(batch, spec, drafts, frozenset())
                batch.device.drain()
                metadata = of_logits(metadata, spec)
                processed_rows.append(process_logits(logits, metadata, step))
            assert torch.equal(*processed_rows)
    with batch_of([([1], [], SamplingParams(temperature=0, presence_penalty=1.0))]) as batch:
        spec = metadata_of(batch, [[1]])
        with pytest.raises(ValueError, match="look at the drafts: fetch them to the host first"):
            make_drafted_sampling(batch, spec, None, frozenset())


@pytest.mark.parametrize("sampled_drafts", [False, True])
@pytest.mark.parametrize("method", ["standard", "block"])
def test_the_law_is_the_targets(method: str, sampled_drafts: bool) -> None:
    """The first two tokens of 4,000 requests at a time, with a temperature and top_k; the target looks at the first
    token only through the row, so the tokens are independent."""
    num_reqs, vocab, rounds = 4_000, 5, 25
    generator = torch.Generator().manual_seed(3)
    target, draft = torch.randn(3, vocab, generator=generator), torch.randn(2, vocab, generator=generator)
    kept = (target / 0.8).clone()
    kept[target < target.topk(4).values[:, -1:]] = -np.inf
    law = kept.double().softmax(1)
    counts = torch.zeros(vocab * vocab, dtype=torch.int64)
    with batch_of([([1], [], SamplingParams(temperature=0.8, top_k=4))] * num_reqs, vocab) as batch:
        for start in range(rounds):
            own = draft.argmax(1).expand(num_reqs, 2)
            if sampled_drafts:
                own = draft.softmax(1).multinomial(num_reqs, replacement=True, generator=generator).t()
            output = run(
                batch, own.tolist(), target.repeat(num_reqs, 1), seed=start, method=method,
                draft_logits=draft.expand(num_reqs, -1, -1) if sampled_drafts else None,
            )  # fmt: skip
            first, second = output.sampled[:, 0], output.sampled[:, 1]
            # Where one token came of it the next round would draw the other.
            later = law[1].multinomial(num_reqs, replacement=True, generator=generator)
            second = torch.where(output.num_sampled > 1, second, later)
            counts += (first * vocab + second).bincount(minlength=vocab * vocab)
    joint = (law[0].unsqueeze(1) * law[1]).flatten()
    assert not counts[joint == 0].any()
    assert abs(chi_square_z(counts, joint * num_reqs * rounds)) < 3.3


def test_a_seeded_request_depends_on_nobody_else_and_a_discarded_one_draws_nothing() -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(1))
    seeded: Request = ([1], [], SamplingParams(temperature=1.0, seed=5))
    with batch_of([seeded]) as batch:
        alone = tokens_of(run(batch, [[4, 5]], logits.clone()))
    other: Request = ([1], [], SamplingParams(temperature=1.0))
    with batch_of([other, seeded]) as batch:
        both = torch.cat([torch.randn(4, VOCAB), logits])
        assert tokens_of(run(batch, [[1, 2, 3], [4, 5]], both, seed=9))[1:] == alone
    with batch_of([seeded]) as batch:
        run(batch, [[]], logits[:1].clone(), discarded=frozenset({0}))
        assert tokens_of(run(batch, [[4, 5]], logits.clone())) == alone


def test_synthetic_and_missing_drafts() -> None:
    with batch_of([([1], [], SamplingParams(temperature=t)) for t in (0, 1.0)]) as batch:
        logits = torch.randn(6, VOCAB)
        rates = torch.tensor([1.0, 0.0])
        output = run(batch, [[3, 4], [5, 6]], logits.clone(), method="synthetic", acceptance_rates=rates)
        assert output.num_sampled.tolist() == [2, 2] and output.sampled[:, 0].tolist() == [3, 5]
        got = tokens_of(run(batch, [[-1, 4], [-1, -1]], logits.clone()))
        assert [len(tokens) for tokens in got] == [1, 1] and got[0] == [int(logits[0].argmax())]


def test_logprobs_of_each_token() -> None:
    logits = torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(2))
    best = logits.argmax(1).tolist()
    params = [SamplingParams(temperature=0, logprobs=2), SamplingParams(temperature=0, logprobs=0)]
    with batch_of([([1], [], own) for own in params]) as batch:
        output = run(batch, [best[:2], [(best[3] + 1) % VOCAB]], logits.clone())
    assert tokens_of(output) == [best[:3], best[3:4]] and output.logprobs is not None
    right = logits.double().log_softmax(1)
    host = [x.numpy() for x in (output.logprobs.token_ids, output.logprobs.logprobs, output.logprobs.ranks)]
    for row in range(4):
        entry = rows_to_dicts(*host, row, 2 if row < 3 else 0)
        assert next(iter(entry)) == best[row] and entry[best[row]][1] == 1
        for token, (logprob, _) in entry.items():
            assert logprob == pytest.approx(float(right[row, token]), abs=1e-5)
