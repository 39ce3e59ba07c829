"""A smaller model as the drafter: its drafts are what it would say, whatever was cached, and never harm the output."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from engine import ConfigError
from engine.spec_decode import NO_DRAFT, DraftModelDecoder, DraftSampler, FinishedStep, check_draft_model
from tests.engine.spec_decode.rounds import BLOCK_SIZE, MAX_LEN, NUM_BLOCKS, Rounds, as_on_a_gpu, greedy_tokens, model
from tests.kernels.draws import chi_square_z
from tests.kernels.test_no_host_wait import NoHostWait, forbid_waits

pytestmark = pytest.mark.slow

PROMPTS = [[5, 9, 11, 3, 8, 8, 1], [7], [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]]
CPU = torch.device("cpu")


def decoder(name: str, seed: int, k: int, method: str = "greedy", rows: int = 8) -> DraftModelDecoder:
    draft = model(name, seed)
    sampler = DraftSampler(method, rows, k, draft.config.vocab_size, CPU, "torch")
    return DraftModelDecoder(draft, k, sampler, MAX_LEN)


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("chunk", [1000, 3])
@pytest.mark.parametrize(("name", "seed"), [("tiny-llama", 1), ("tiny-qwen3", 2)])
def test_drafts_are_what_the_draft_model_says_and_the_output_what_the_target_says(
    name: str, seed: int, chunk: int, k: int
) -> None:
    target, rounds = model(), Rounds(model(), decoder(name, seed, k))
    requests = [rounds.add(prompt, row) for prompt, row in zip(PROMPTS, (2, 0, 5), strict=True)]
    for _ in range(9):
        drafts = rounds.step(requests, chunk)
        for request, own in zip(requests, drafts.tolist(), strict=True):
            if not request.num_accepted:
                assert own == [NO_DRAFT] * k, "inside the prompt"
            else:
                assert own == greedy_tokens(model(name, seed), request.tokens, k)
    for prompt, request in zip(PROMPTS, requests, strict=True):
        output = request.tokens[len(prompt) :]
        assert len(output) >= 5 and output == greedy_tokens(target, prompt, len(output))


def test_drafts_over_a_gpus_backend() -> None:
    draft = model("tiny-qwen3", 2)
    rounds = Rounds(model(), decoder("tiny-qwen3", 2, 3))
    requests = [rounds.add(prompt, row) for row, prompt in enumerate(PROMPTS)]
    for _ in range(6):
        with as_on_a_gpu(draft):
            drafts = rounds.step(requests, chunk=4)
        for request, own in zip(requests, drafts.tolist(), strict=True):
            if request.num_accepted:
                assert own == greedy_tokens(draft, request.tokens, 3)


def test_a_drafter_that_is_the_target_is_always_right() -> None:
    rounds = Rounds(model(), decoder("tiny-llama", 0, 3))
    requests = [rounds.add(prompt, row) for row, prompt in enumerate(PROMPTS)]
    for _ in range(5):
        rounds.step(requests)
    assert all(request.num_accepted == [0, 3, 3, 3, 3] for request in requests)


def test_some_drafts_are_accepted_and_some_rejected() -> None:
    """Rejected tokens leave keys behind in the drafter's cache, which the next round writes over."""
    wrong = decoder("tiny-llama", 0, 3)
    spoilt, draw = iter(range(1000)), wrong._sampler.draw

    def sometimes_wrong(step, index, logits, positions):  # type: ignore[no-untyped-def]
        token = draw(step, index, logits, positions)
        return torch.where(torch.tensor(next(spoilt) % 5 == 3), (token + 1) % 384, token)

    wrong._sampler.draw = sometimes_wrong  # type: ignore[method-assign]
    rounds = Rounds(model(), wrong)
    requests = [rounds.add(prompt, row) for row, prompt in enumerate(PROMPTS)]
    for _ in range(10):
        rounds.step(requests)
    accepted = [number for request in requests for number in request.num_accepted]
    assert set(accepted) == {0, 1, 2, 3}
    for prompt, request in zip(PROMPTS, requests, strict=True):
        output = request.tokens[len(prompt) :]
        assert output == greedy_tokens(model(), prompt, len(output))


def test_a_shared_prefix_is_one_for_both_and_is_not_written_again() -> None:
    """The second request finds the first's blocks: the draft's keys are there, and its drafts are right."""
    draft = decoder("tiny-llama", 1, 3)
    rounds = Rounds(model(), draft)
    prompt = [*PROMPTS[2][:8], 4, 4]
    first = rounds.add(prompt, 0)
    rounds.step([first])
    shared = first.blocks[: 8 // BLOCK_SIZE]
    assert draft._kv_cache is not None
    before = draft._kv_cache[:, :, shared].clone()
    second = rounds.add([*prompt[:8], 6], 1)
    second.blocks, second.computed = list(shared), 8
    for _ in range(3):
        drafts = rounds.step([second])
        assert drafts[0].tolist() == greedy_tokens(model("tiny-llama", 1), second.tokens, 3)
    assert torch.equal(draft._kv_cache[:, :, shared], before)


def test_nothing_is_written_outside_a_requests_blocks_up_to_the_last_position() -> None:
    draft = decoder("tiny-llama", 0, 3)
    rounds = Rounds(model(), draft)
    request = rounds.add(range(3, MAX_LEN - 4), 1)
    for _ in range(3):
        drafts = rounds.step([request])
        room = MAX_LEN - len(request.tokens)
        assert (drafts[0] >= 0).tolist() == [j < room for j in range(3)]
    assert draft._kv_cache is not None
    # Where the table has no block stands one that is nobody's.
    assert not draft._kv_cache[:, :, NUM_BLOCKS - 1].any() and not draft._kv_cache[:, :, 0].any()
    assert len(request.tokens) > MAX_LEN


@pytest.mark.parametrize("method", ["standard", "block"])
def test_sampled_drafts_keep_the_law_of_the_target(method: str) -> None:
    """One model call for 400 requests a step; the second token's law given the first, pooled into 8 groups."""
    num_reqs, num_rounds = 400, 6
    counts, expected = torch.zeros(8), torch.zeros(8, dtype=torch.float64)
    target = model()
    for start in range(num_rounds):
        small = Rounds(target, decoder("tiny-llama", 1, 2, "probabilistic", rows=num_reqs + 2), method)
        small.kv_cache = small.kv_cache.repeat(1, 1, 20, 1, 1, 1)
        small.decoder.allocate_kv_cache(NUM_BLOCKS * 20, BLOCK_SIZE)
        small.free = list(range(NUM_BLOCKS * 20 - 1, 0, -1))
        requests = [small.add([5, 9], row, temperature=1.5, seed=start * num_reqs + row) for row in range(num_reqs)]
        small.step(requests)
        first = [request.tokens[2] for request in requests]
        small.step(requests)
        for token, request in zip(first, requests, strict=True):
            counts[request.tokens[3] % 8] += 1
            expected += law_behind(token)
    assert expected.sum() == pytest.approx(num_reqs * num_rounds)
    assert abs(chi_square_z(counts, expected)) < 3.3


_LAWS: dict[int, torch.Tensor] = {}


def law_behind(token: int) -> torch.Tensor:
    """f64 [8]: the target's law behind [5, 9, token] at temperature 1.5, its tokens pooled by their id modulo 8."""
    if token not in _LAWS:
        captured: list[torch.Tensor] = []
        target = model()
        compute = target.model.compute_logits

        def keep(hidden: torch.Tensor) -> torch.Tensor:
            captured.append(compute(hidden))
            return captured[-1]

        target.model.compute_logits = keep  # type: ignore[method-assign]
        try:
            greedy_tokens(target, [5, 9, token], 1)
        finally:
            target.model.compute_logits = compute  # type: ignore[method-assign]
        law = (captured[-1][0].double() / 1.5).softmax(0)
        _LAWS[token] = torch.zeros(8, dtype=torch.float64).index_add_(0, torch.arange(len(law)) % 8, law)
    return _LAWS[token]


def test_another_vocabulary_is_refused() -> None:
    draft, target = model("tiny-llama", 1), model()
    other = dataclasses.replace(draft, config=dataclasses.replace(draft.config, vocab_size=100))
    with pytest.raises(
        ConfigError, match="its vocabulary has 100 tokens, the target's 384, so that a draft's id would"
    ):
        check_draft_model(other, target, MAX_LEN)
    with pytest.raises(
        ConfigError, match="knows 512 positions, fewer than max_model_len=600; ask for max_model_len=512"
    ):
        check_draft_model(draft, target, 600)
    check_draft_model(draft, target, 512)


@pytest.mark.parametrize("method", ["greedy", "probabilistic"])
def test_drafting_never_waits(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    draft = decoder("tiny-llama", 1, 3, method)
    rounds = Rounds(model(), draft)
    requests = [rounds.add(prompt, row, temperature=0.5) for row, prompt in enumerate(PROMPTS)]
    rounds.step(requests)
    propose = draft.propose

    def watched(step: FinishedStep) -> torch.Tensor:
        with monkeypatch.context() as patch, NoHostWait("cpu"):
            forbid_waits(patch)
            return propose(step)

    draft.propose = watched  # type: ignore[method-assign]
    assert (rounds.step(requests) >= 0).all()
