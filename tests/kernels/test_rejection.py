"""Kernels 23 to 28: the three forms agree with each other and with the rule; the edges of the rule."""

import pytest
import torch

from kernels import DraftedBatch, Purpose, RejectionOutput, gumbel_sample, rejection_sample
from tests.kernels.rejection_batches import Drafted, drafted_batch
from tests.kernels.sampling_batches import NEG_INF
from tests.kernels.test_no_host_wait import NoHostWait, forbid_waits

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.slow,
]  # the interpreter's NumPy: -inf - -inf, log(0)
FORMS = ("torch", "interpret")
ALL_FORMS = ("loop", *FORMS)
METHODS = ("standard", "block", "synthetic")
RATES = torch.tensor([0.9, 0.6, 0.5])


def run(drafted: Drafted, form: str, *, method: str = "standard", sampled_drafts: bool = True) -> RejectionOutput:
    return rejection_sample(
        drafted.target_logits,
        drafted.draft_logits if sampled_drafts else None,
        drafted.batch,
        drafted.temperature,
        drafted.seeds,
        method=method,
        acceptance_rates=drafted.acceptance_rates if method == "synthetic" else None,
        form=form,
    )


def assert_same(got: RejectionOutput, expected: RejectionOutput) -> None:
    assert got.num_sampled.tolist() == expected.num_sampled.tolist()
    assert got.sampled.tolist() == expected.sampled.tolist()
    for name in ("target_probs", "draft_probs", "uniforms"):
        torch.testing.assert_close(
            getattr(got, name).cpu(), getattr(expected, name).cpu(), rtol=1e-5, atol=1e-6, msg=name
        )


@pytest.mark.parametrize("sampled_drafts", [False, True])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("form", FORMS)
def test_forms_agree(form: str, method: str, sampled_drafts: bool) -> None:
    accepted = set()
    for seed in range(12):
        vocab = (1, 7, 100, 4097)[seed % 4] if seed < 4 else 40
        drafted = drafted_batch(seed, vocab=vocab, num_reqs=3 if vocab > 1000 else 5, closeness=(1, 3)[seed % 2])
        expected = run(drafted, "loop", method=method, sampled_drafts=sampled_drafts)
        assert_same(run(drafted, form, method=method, sampled_drafts=sampled_drafts), expected)
        accepted |= set(expected.num_sampled.tolist())
    assert accepted == {1, 2, 3, 4}, "the batches must have every length"


def one_request(
    logits: torch.Tensor, drafts: list[int], *, temperature: float = 1.0, seed: int = 0, form: str = "torch", **options
) -> RejectionOutput:
    """`logits` f32 [k + 1, V] of a request with k drafts at positions 5, 6, ..."""
    n = len(drafts)
    batch = DraftedBatch(
        torch.zeros(1, dtype=torch.int32),
        torch.tensor([0, n + 1], dtype=torch.int32),
        torch.tensor([0, *drafts], dtype=torch.int32),
        torch.arange(5, 6 + n),
        n,
    )
    draft_logits = options.pop("draft_logits", None)
    return rejection_sample(
        logits, draft_logits, batch, torch.tensor([temperature]), torch.tensor([seed]), form=form, **options
    )


def tokens_of(output: RejectionOutput) -> list[list[int]]:
    pairs = list(zip(output.sampled.tolist(), output.num_sampled.tolist(), strict=True))
    assert all(token == -1 for row, count in pairs for token in row[count:])
    return [row[:count] for row, count in pairs]


@pytest.mark.parametrize("all_greedy", [False, True])
@pytest.mark.parametrize("method", ["standard", "block"])
@pytest.mark.parametrize("form", ALL_FORMS)
def test_greedy_accepts_the_prefix_that_is_the_argmax(form: str, method: str, all_greedy: bool) -> None:
    for seed in range(8):
        drafted = drafted_batch(seed, vocab=300, num_reqs=5, closeness=3)
        drafted.temperature.zero_()
        best = drafted.target_logits.argmax(dim=1).tolist()
        for request, own in enumerate(drafted.drafts):  # some drafts are right
            begin = int(drafted.batch.cu_num_logits[request])
            for j in range(min(len(own), (seed + request) % 4)):
                own[j] = best[begin + j]
                drafted.batch.token_ids[begin + 1 + j] = own[j]
        output = rejection_sample(
            drafted.target_logits, drafted.draft_logits, drafted.batch, drafted.temperature, drafted.seeds,
            method=method, all_greedy=all_greedy, form=form,
        )  # fmt: skip
        for request, (own, got) in enumerate(zip(drafted.drafts, tokens_of(output), strict=True)):
            begin = int(drafted.batch.cu_num_logits[request])
            accepted = next((j for j, token in enumerate(own) if token != best[begin + j]), len(own))
            assert got == best[begin : begin + accepted + 1]


@pytest.mark.parametrize("method", ["standard", "block"])
@pytest.mark.parametrize("form", ALL_FORMS)
def test_behind_accepted_drafts_comes_the_token_of_a_step_without_drafts(form: str, method: str) -> None:
    logits = torch.randn(4, 200, generator=torch.Generator().manual_seed(1))
    for row, draft in enumerate((7, 9, 11)):
        logits[row] = NEG_INF
        logits[row, draft] = 0.0
    for seed in range(3):
        output = one_request(logits, [7, 9, 11], seed=seed, method=method, form=form)
        plain = gumbel_sample(
            logits[3:], torch.zeros(1).int(), torch.ones(1), torch.tensor([seed]), torch.tensor([8]),
            purpose=Purpose.SAMPLE, form="torch",
        )  # fmt: skip
        assert tokens_of(output) == [[7, 9, 11, int(plain)]]
        without = one_request(logits[3:], [], seed=seed, method=method, form=form)
        own = gumbel_sample(
            logits[3:], torch.zeros(1).int(), torch.ones(1), torch.tensor([seed]), torch.tensor([5]),
            purpose=Purpose.SAMPLE, form="torch",
        )  # fmt: skip
        assert tokens_of(without) == [[int(own)]]


@pytest.mark.parametrize("sampled_drafts", [False, True])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("form", ALL_FORMS)
def test_a_draft_that_is_none_ends_the_drafts(form: str, method: str, sampled_drafts: bool) -> None:
    """And those behind it don't matter, nor does the target's opinion of them."""
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(3))
    options = {"method": method, "form": form}
    if method == "synthetic":
        options["acceptance_rates"] = torch.ones(3)
    if sampled_drafts:
        options["draft_logits"] = torch.randn(1, 3, 50)
    got = [tokens_of(one_request(logits, [4, -1, third], seed=5, **options)) for third in (-1, 0, 49)]
    assert got[0] == got[1] == got[2]
    if sampled_drafts:
        options["draft_logits"] = options["draft_logits"][:, :1]
    if method == "synthetic":
        options["acceptance_rates"] = torch.ones(1)
    assert got[0] == tokens_of(one_request(logits[:2], [4], seed=5, **options))
    assert tokens_of(one_request(logits, [-1, 4, 4], seed=5, method="standard", form=form)) == tokens_of(
        one_request(logits[:1], [], seed=5, form=form)
    )


@pytest.mark.parametrize("sampled_drafts", [False, True])
@pytest.mark.parametrize("method", ["standard", "block", "synthetic"])
@pytest.mark.parametrize("form", ALL_FORMS)
def test_what_the_target_forbids_never_comes(form: str, method: str, sampled_drafts: bool) -> None:
    """Not even where the laws agree so well that rounding leaves no residual, or a rate rejects the only token."""
    vocab = 20
    logits = torch.full((3, vocab), NEG_INF)
    logits[:, [3, 8]] = torch.tensor([0.3, 0.1])
    logits[1, 8] = NEG_INF
    options = {"method": method, "form": form}
    if method == "synthetic":
        options["acceptance_rates"] = torch.zeros(2)
    if sampled_drafts:
        draft_logits = logits[:2].unsqueeze(0).clone()
        draft_logits[0, :, 5] = -1.0  # what the target forbids
        options["draft_logits"] = draft_logits
    for seed in range(20 if form == "torch" else 5):
        for drafts in ([3, 3], [5, 3], [8, 5], [5, 5]):
            [tokens] = tokens_of(one_request(logits, drafts, seed=seed, **options))
            assert all(float(logits[j, token]) > NEG_INF for j, token in enumerate(tokens)), (seed, drafts, tokens)
            if method != "synthetic" and drafts[0] == 5:
                assert len(tokens) == 1


@pytest.mark.parametrize("method", ["standard", "block"])
@pytest.mark.parametrize("form", FORMS)
def test_tokens_depend_on_no_row_and_no_batch(form: str, method: str) -> None:
    drafted = drafted_batch(21, vocab=60, num_reqs=5, closeness=2)
    together = tokens_of(run(drafted, form, method=method))
    moved = torch.randperm(6, generator=torch.Generator().manual_seed(1))
    for request in range(5):
        rows = slice(*drafted.batch.cu_num_logits[request : request + 2].tolist())
        state = drafted.batch.idx_mapping[request : request + 1]
        alone = Drafted(
            drafted.target_logits[rows],
            drafted.draft_logits[moved],
            DraftedBatch(
                moved.argsort()[state].int(), torch.tensor([0, rows.stop - rows.start]).int(),
                drafted.batch.token_ids[rows], drafted.batch.positions[rows], 3,
            ),
            drafted.temperature[moved],
            drafted.seeds[moved],
            drafted.drafts[request : request + 1],
        )  # fmt: skip
        assert tokens_of(run(alone, form, method=method)) == together[request : request + 1]


def test_synthetic_rates_are_what_is_accepted() -> None:
    trials = 20_000
    batch = DraftedBatch(
        torch.arange(trials).int(), torch.arange(trials + 1).int() * 4, torch.zeros(trials * 4).int(),
        torch.arange(4).repeat(trials), 3,
    )  # fmt: skip
    logits = torch.zeros(trials * 4, 2)
    temperature = (torch.arange(trials) % 2).float()  # greedy or not, rates decide
    output = rejection_sample(
        logits, None, batch, temperature, torch.arange(trials), method="synthetic", acceptance_rates=RATES, form="torch"
    )
    for parity in (0, 1):
        lengths = output.num_sampled[parity::2] - 1
        for j, rate in enumerate(RATES.tolist()):
            reached = lengths[lengths >= j]
            share, error = float((reached > j).float().mean()), (rate * (1 - rate) / len(reached)) ** 0.5
            assert abs(share - rate) < 4 * error


@pytest.mark.parametrize("form", ALL_FORMS)
def test_no_requests(form: str) -> None:
    empty = torch.zeros(0, dtype=torch.int32)
    batch = DraftedBatch(empty, torch.zeros(1, dtype=torch.int32), empty, empty.long(), 2)
    output = rejection_sample(torch.zeros(0, 9), None, batch, torch.ones(1), torch.ones(1).long(), form=form)
    assert output.sampled.shape == (0, 3) and output.num_sampled.shape == (0,)


@pytest.mark.parametrize("form", ALL_FORMS)
def test_nan_and_padding_give_some_token_of_the_vocabulary(form: str) -> None:
    logits = torch.full((2, 30), float("nan")) if form != "loop" else torch.full((2, 30), NEG_INF)
    logits[0, 2] = 1.0
    batch = DraftedBatch(
        torch.tensor([-1], dtype=torch.int32), torch.tensor([0, 2]).int(), torch.tensor([0, 2]).int(),
        torch.tensor([1, 2]), 1,
    )  # fmt: skip
    if form == "loop":
        logits[1, 4] = 0.0
    output = rejection_sample(logits, None, batch, torch.ones(1), torch.ones(1).long(), form=form)
    assert all(0 <= token < 30 for token in tokens_of(output)[0])


BAD: list[tuple[dict, str]] = [
    ({"method": "strict"}, "unknown rejection method 'strict': choose one of standard, block, synthetic"),
    ({"method": "synthetic"}, "acceptance_rates belong to the method 'synthetic', and it needs them"),
    ({"acceptance_rates": RATES}, "acceptance_rates belong to the method 'synthetic'"),
    ({"draft_logits": torch.zeros(1, 1, 8)}, r"draft_logits of shape \(1, 1, 8\) must have at least 2 drafts and the"),
    ({"draft_logits": torch.zeros(1, 2, 7)}, "the target's vocabulary of 8 tokens"),
    ({"draft_logits": torch.zeros(1, 2, 8).double()}, "draft_logits must have dtype torch.float32"),
    ({"method": "synthetic", "acceptance_rates": RATES[:1]}, r"acceptance_rates needs at least 2 row\(s\)"),
]


@pytest.mark.parametrize(("options", "message"), BAD, ids=lambda value: str(value)[:40])
def test_bad_arguments_are_named(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        one_request(torch.zeros(3, 8), [1, 2], **options)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("sampled_drafts", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_the_torch_form_never_waits(
    method: str, sampled_drafts: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafted = drafted_batch(2, vocab=50).on(device)
    with monkeypatch.context() as patch, NoHostWait(device):
        forbid_waits(patch)
        run(drafted, "torch", method=method, sampled_drafts=sampled_drafts)


@pytest.mark.parametrize("form", ALL_FORMS)
def test_of_tied_logits_the_lowest_id_is_the_argmax(form: str) -> None:
    """In one tile and over several, with a whole number of tiles and without."""
    for vocab, ties in [(256, (5, 9)), (256, (130, 250)), (256, (127, 128)), (300, (7, 299))]:
        logits = torch.zeros(2, vocab)
        logits[:, list(ties)] = 1.0
        right, wrong = (one_request(logits, [draft], temperature=0.0, form=form) for draft in ties)
        assert tokens_of(right) == [[ties[0], ties[0]]] and tokens_of(wrong) == [[ties[0]]]
