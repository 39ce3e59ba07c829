"""What speculative decoding gives over several rounds has the target's law, token by token and jointly.

Requests of many seeds run rounds of draft and verification until each has four tokens. Both laws depend on the last
token, so what is learned from a draft that was thrown away would show in the tokens behind it.
"""

import itertools

import pytest
import torch

from kernels import (
    DraftedBatch,
    Purpose,
    draft_noise_positions,
    gumbel_sample,
    mask_top_k_top_p,
    rejection_sample,
    rejection_torch,
)
from kernels import noise as noise_module
from tests.kernels.draws import chi_square_z

pytestmark = pytest.mark.slow

TRIALS, VOCAB, LENGTH, START = 100_000, 4, 4, 20
# Row t: the logits behind token t.
TARGET = torch.tensor([[0.0, 1.0, -1.0, 0.5], [2.0, 0.0, 0.3, -2.0], [-0.5, 0.4, 1.5, 0.0], [0.2, -3.0, 0.1, 0.3]])
DRAFT = torch.tensor([[1.2, 0.2, -1.0, 0.0], [0.0, 1.0, 0.3, -1.0], [0.5, -0.4, 1.0, 0.0], [0.2, 1.0, -1.1, 0.3]])


class Rounds:
    """`TRIALS` requests, one a seed, that begin behind token 0."""

    def __init__(self, method: str, drafter: str, num_drafts: int, temperature: float = 1.0, **filters: float) -> None:
        self.method, self.drafter, self.num_drafts, self.filters = method, drafter, num_drafts, filters
        self.rows = torch.arange(TRIALS)
        self.temperature = torch.full((TRIALS,), temperature)
        self.seeds = self.rows * 7919 - 3
        self.target = self.processed(TARGET)
        self.draft_purpose = Purpose.DRAFT
        self.varied = False
        """Let requests of odd length have one draft only."""
        self.num_rounds = 0

    def processed(self, logits: torch.Tensor) -> torch.Tensor:
        logits, rows = logits / self.temperature[0], torch.zeros(VOCAB, dtype=torch.int32)
        if self.filters:
            top_k, top_p = self.filters.get("top_k", VOCAB), self.filters.get("top_p", 1.0)
            tables = (torch.tensor([int(top_k)]).int(), torch.tensor([top_p]), torch.tensor([0.0]))
            mask_top_k_top_p(logits, rows, *tables, form="torch")
        return logits

    def drafts(self, last: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """i64 [TRIALS, num_drafts], the first behind `last`."""
        drafts = []
        for j in range(self.num_drafts):
            if self.drafter == "sampled":
                at = rejection_torch.draft_noise_positions(START + lengths, 0) + j
                last = gumbel_sample(
                    DRAFT[last], self.rows.int(), torch.ones(TRIALS), self.seeds,
                    rejection_torch.draft_noise_positions(at, j), purpose=self.draft_purpose, form="torch",
                )  # fmt: skip
            else:
                last = DRAFT[last].argmax(dim=1)
            drafts.append(last)
        result = torch.stack(drafts, dim=1)
        if self.varied:
            result[:, 1:] = torch.where((lengths % 2 == 1).unsqueeze(1), -1, result[:, 1:])
        return result

    def run(self) -> torch.Tensor:
        """The first `LENGTH` tokens of every request, i64 [TRIALS, LENGTH]."""
        tokens = torch.zeros(TRIALS, 1 + LENGTH + self.num_drafts + 1, dtype=torch.int64)
        lengths = torch.zeros(TRIALS, dtype=torch.int64)
        width = self.num_drafts + 1
        while int(lengths.min()) < LENGTH:
            self.num_rounds += 1
            last = tokens.gather(1, lengths.unsqueeze(1))
            inputs = torch.cat([last, self.drafts(last[:, 0], lengths)], dim=1)
            batch = DraftedBatch(
                self.rows.int(),
                torch.arange(TRIALS + 1).int() * width,
                inputs.flatten(),
                (START + lengths.unsqueeze(1) + torch.arange(width)).flatten(),
                self.num_drafts,
            )
            behind = inputs.clamp(min=0)
            draft_logits = DRAFT[behind[:, :-1]] if self.drafter == "sampled" else None
            output = rejection_sample(
                self.target[behind.flatten()], draft_logits, batch, self.temperature, self.seeds,
                method=self.method, form="torch",
                acceptance_rates=torch.full((self.num_drafts,), 0.9) if self.method == "synthetic" else None,
            )  # fmt: skip
            place = torch.minimum(lengths.unsqueeze(1) + 1 + torch.arange(width), torch.tensor(tokens.shape[1] - 1))
            new = torch.where(torch.arange(width) < output.num_sampled.unsqueeze(1), output.sampled, 0)
            tokens.scatter_(1, place, new)
            # A request that has its tokens stands still: its draws are its last round's again.
            lengths = torch.where(lengths < LENGTH, lengths + output.num_sampled, lengths)
        return tokens[:, 1 : LENGTH + 1]

    def deviation(self) -> float:
        """How far the joint law of the tokens is from the target's, in standard deviations; -100 if it can't be."""
        law = self.target.double().softmax(1)
        exact = torch.zeros((VOCAB,) * LENGTH, dtype=torch.float64)
        for path in itertools.product(range(VOCAB), repeat=LENGTH):
            exact[path] = torch.stack([law[a, b] for a, b in itertools.pairwise((0, *path))]).prod()
        index = (self.run() * VOCAB ** torch.arange(LENGTH - 1, -1, -1)).sum(dim=1)
        counts = index.bincount(minlength=VOCAB**LENGTH)
        assert not counts[exact.flatten() == 0].any()
        return chi_square_z(counts, exact.flatten() * TRIALS)


@pytest.fixture(autouse=True)
def few_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise_module, "LANES", 1)  # four tokens need no tile of 1,024


@pytest.mark.parametrize("num_drafts", [1, 3])
@pytest.mark.parametrize("drafter", ["greedy", "sampled"])
@pytest.mark.parametrize("method", ["standard", "block"])
def test_the_law_is_the_targets(method: str, drafter: str, num_drafts: int) -> None:
    rounds = Rounds(method, drafter, num_drafts)
    assert abs(rounds.deviation()) < 3.3
    assert rounds.num_rounds > 1


@pytest.mark.parametrize("drafter", ["greedy", "sampled"])
@pytest.mark.parametrize("method", ["standard", "block"])
@pytest.mark.parametrize("processing", [{"temperature": 0.6}, {"top_k": 2}, {"temperature": 1.7, "top_p": 0.7}])
def test_the_law_is_that_of_the_processed_target(processing: dict, method: str, drafter: str) -> None:
    assert abs(Rounds(method, drafter, 2, **processing).deviation()) < 3.3


@pytest.mark.parametrize("drafter", ["greedy", "sampled"])
@pytest.mark.parametrize("method", ["standard", "block"])
def test_requests_may_have_fewer_drafts_than_others(method: str, drafter: str) -> None:
    rounds = Rounds(method, drafter, 3)
    rounds.varied = True
    assert abs(rounds.deviation()) < 3.3


def test_synthetic_acceptance_is_not_lossless_and_the_experiment_says_so() -> None:
    rounds = Rounds("synthetic", "greedy", 2)
    assert rounds.deviation() > 10


def test_a_drafter_that_draws_with_the_key_of_the_residual_biases_the_output() -> None:
    rounds = Rounds("standard", "sampled", 2)
    rounds.draft_purpose = Purpose.RESAMPLE
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rejection_torch, "draft_noise_positions", lambda positions, index: positions)
        assert rounds.deviation() > 10


def test_noise_named_by_the_position_alone_biases_block_verification(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block that ends early has looked at the noise of later positions, which come again in the next round."""
    monkeypatch.setattr(rejection_torch, "draft_noise_positions", lambda positions, index: positions)
    assert Rounds("block", "sampled", 3).deviation() > 10
    assert abs(Rounds("standard", "sampled", 3).deviation()) < 3.3, "draft by draft, they were not looked at"


def test_the_experiment_sees_a_wrong_target() -> None:
    rounds = Rounds("standard", "greedy", 2)
    rounds.target[1, 2] += 0.2
    counts = rounds.run()
    rounds.target[1, 2] -= 0.2
    rounds.run = lambda: counts  # type: ignore[method-assign]
    assert rounds.deviation() > 3.3


def test_the_positions_of_drafts_are_names_of_their_own() -> None:
    positions = torch.arange(5)
    names = torch.cat([draft_noise_positions(positions, j) for j in range(4)])
    assert len(names.unique()) == 20 and torch.equal(names[:5], positions)
