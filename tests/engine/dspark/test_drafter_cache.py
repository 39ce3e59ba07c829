"""The paged form's cache: what a block sees of it, and what is written to it, whatever becomes of requests."""

import random

import pytest
import torch
from hypothesis import given as for_all
from hypothesis import settings
from hypothesis import strategies as st

from engine.dspark.contiguous import draft_hidden
from engine.dspark.target import prefill_with_hidden
from engine.spec_decode import NO_DRAFT
from tests.engine.dspark.golden import TOLERANCE, Golden, golden
from tests.engine.dspark.paged import BLOCK_SIZE, MAX_LEN, Request, loop_of, request_of

pytestmark = pytest.mark.slow


@for_all(seed=st.integers(0, 2**31))
@settings(max_examples=12, deadline=None)
def test_random_lives(seed: int) -> None:
    """Requests come in chunks, go, are preempted and come back in other blocks, and find what others have computed:
    every block is drafted from what the plain form is."""
    given, rng = golden("vanilla"), random.Random(seed)
    loop = loop_of(given)
    free, known, running = list(range(119, 0, -1)), {}, []
    rows = list(range(6))

    def admit(tokens: list[int]) -> None:
        """With every leading block that is known already; the last token is always computed."""
        request, num_shared = Request(tokens, [], row=rows.pop()), 0
        while (num_shared + 1) * BLOCK_SIZE < len(tokens) and tuple(tokens[: (num_shared + 1) * BLOCK_SIZE]) in known:
            request.blocks.append(known[tuple(tokens[: (num_shared + 1) * BLOCK_SIZE])])
            num_shared += 1
        request.computed = num_shared * BLOCK_SIZE
        request.blocks += [free.pop() for _ in range(MAX_LEN // BLOCK_SIZE - num_shared - rng.randrange(6))]
        running.append(request)

    def publish(request: Request) -> None:
        for end in range(BLOCK_SIZE, request.computed + 1, BLOCK_SIZE):
            known.setdefault(tuple(request.tokens[:end]), request.blocks[end // BLOCK_SIZE - 1])

    for _ in range(7):
        while len(running) < 2 and len(free) > 24:
            start = given_prompt[: rng.randrange(3, 17)] if rng.random() < 0.7 else []
            admit([*start, *(rng.randrange(255) for _ in range(rng.randrange(1, 9)))])
        if not running:
            break
        loop.step(running, chunk=rng.choice((2, 5, 100)))
        for i, request in enumerate(running):
            publish(request)
            if request.drafts:
                tokens = request.tokens[: request.computed + 1]
                torch.testing.assert_close(loop.drafter.hidden[i], plain_hidden(given, tokens), **TOLERANCE)
        if rng.random() < 0.4:
            request = running.pop(rng.randrange(len(running)))
            rows.append(request.row)
            if rng.random() < 0.6 and len(free) > 24:
                admit(request.tokens)


given_prompt = golden("vanilla").values["prompt"].tolist()


def plain_hidden(given: Golden, tokens: list[int]) -> torch.Tensor:
    """[block, d] of the block whose anchor is the last of ``tokens``."""
    _, chosen = prefill_with_hidden(given.target, [tokens], given.config.target_layer_ids)
    anchor, position = torch.tensor([[tokens[-1]]]), torch.tensor([[len(tokens) - 1]])
    embedding = given.weights["embed_tokens.weight"]
    return draft_hidden(given.config, given.weights, embedding, chosen[0].unsqueeze(0), anchor, position)[0, 0]


def test_a_prefix_hit_reads_the_shared_context_and_never_writes_it() -> None:
    """T11: two full blocks are shared; the second request computes only what lies behind them."""
    given = golden("gated")
    loop = loop_of(given)
    prompt = given.values["prompt"].tolist()
    first = Request(list(prompt), list(range(1, 20)))
    loop.step([first])
    shared = first.blocks[:2]
    other = [*prompt[: 2 * BLOCK_SIZE], 77, 12, 90]
    second = Request(list(other), [*shared, *range(40, 60)], computed=2 * BLOCK_SIZE)
    before = loop.draft_cache[:, :, shared].clone(), loop.target_cache[:, :, shared].clone()
    drafts = loop.step([second])
    assert torch.equal(loop.draft_cache[:, :, shared], before[0])
    assert torch.equal(loop.target_cache[:, :, shared], before[1])
    fresh = loop_of(given)
    alone = Request(list(other), list(range(1, 24)))
    expected = fresh.step([alone])
    assert alone.tokens == second.tokens and torch.equal(drafts, expected)
    torch.testing.assert_close(loop.drafter.hidden, fresh.drafter.hidden, **TOLERANCE)


def test_writes_stay_in_the_requests_own_blocks() -> None:
    """Too few look-ahead blocks: the block is cut, and nothing else is touched (nor is slot 0)."""
    given = golden("vanilla")
    loop = loop_of(given)
    loop.draft_cache.fill_(0.5)
    prompt = given.values["prompt"].tolist()[:15]
    request = Request(prompt, [3, 4, 5, 6])
    drafts = loop.step([request])
    assert loop.drafter.inputs.seq_lens.tolist() == [16]
    untouched = torch.ones(loop.draft_cache.shape[2], dtype=torch.bool)
    untouched[[3, 4, 5, 6]] = False
    assert (loop.draft_cache[:, :, untouched] == 0.5).all()
    # Only the anchor has a slot: one draft, and no confidence in others.
    assert torch.isfinite(loop.drafter.hidden).all()
    assert drafts[0, 0] >= 0 and drafts[0, 1:].tolist() == [NO_DRAFT] * 4
    assert loop.decoder.confidences is not None
    assert loop.decoder.confidences[0, 0] > 0 and not loop.decoder.confidences[0, 1:].any()


def test_what_was_rejected_leaves_no_trace() -> None:
    """Behind a rejection the next block is that of a request that never had the rejected tokens."""
    given = golden("rnn")
    loop, request = loop_of(given), request_of(given)
    loop.step([request])
    request.drafts = [1, 2, 3, 4, 5]
    loop.step([request])
    fresh = loop_of(given)
    again = Request(list(request.tokens[:-1]), list(range(1, 20)))
    fresh.step([again])
    assert again.tokens == request.tokens
    torch.testing.assert_close(loop.drafter.hidden, fresh.drafter.hidden, **TOLERANCE)


def test_no_draft_stands_past_the_models_length() -> None:
    given = golden("vanilla")
    loop = loop_of(given)
    drafts = loop.step([Request([i % 200 for i in range(MAX_LEN - 4)], list(range(1, 25)))])
    assert loop.drafter.inputs.seq_lens.tolist() == [MAX_LEN]
    assert (drafts[0, :3] >= 0).all() and drafts[0, 3:].tolist() == [NO_DRAFT] * 2


def test_a_prompt_that_goes_on_has_no_drafts() -> None:
    given = golden("vanilla")
    loop = loop_of(given)
    drafts = loop.step([request_of(given), Request([5, 9, 200], [60, 61, 62], row=1)], chunk=4)
    assert drafts[0].tolist() == [NO_DRAFT] * 5 and (drafts[1] >= 0).all()
    assert loop.decoder.confidences is not None
    assert not loop.decoder.confidences[2].any() and loop.decoder.confidences[1].all()
