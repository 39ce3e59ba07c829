"""The sequential part of a block of drafts: every form says what the loop says."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.markov_drafts import ConfidenceHead, MarkovHead, markov_drafts
from kernels.markov_logits import KeptLogits, markov_logits

pytestmark = pytest.mark.slow  # interpreted kernels

KINDS = ("vanilla", "gated", "rnn")
FAST_FORMS = ("torch", "interpret")
Case = tuple[torch.Tensor, torch.Tensor, torch.Tensor, MarkovHead, ConfidenceHead | None]


def case(
    seed: int, kind: str, num_reqs: int, rank: int, vocab: int, num_drafts: int = 3, *, size: int = 24,
    sees_token: bool = True, ties: bool = False, dtype: torch.dtype = torch.float32, device: str = "cpu",
) -> Case:  # fmt: skip
    """With ties every number is small and whole, so that sums are exact in any order."""
    g = torch.Generator().manual_seed(seed)

    def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
        if ties:
            return torch.randint(-1, 2, shape, generator=g).to(device, dtype)
        return (torch.randn(shape, generator=g) * scale).to(device, dtype)

    gates = {"vanilla": 0, "gated": 1, "rnn": 3}[kind]
    w1, w2 = random(vocab, rank), random(vocab, rank, scale=rank**-0.5)
    head = MarkovHead(kind, w1, w2)
    if gates:
        width = rank * (2 if kind == "rnn" else 1)
        weight = random(gates * rank, width, scale=width**-0.5)
        head = MarkovHead(kind, w1, w2, random(gates * rank, size, scale=size**-0.5), random(gates * rank), weight)
    confidence = ConfidenceHead(random(size, scale=0.2), random(1), random(rank, scale=0.2) if sees_token else None)
    base = random(num_reqs, num_drafts, vocab).float()
    hidden = random(num_reqs, num_drafts + 1, size)
    # As they stand in a block's input, one of several columns.
    anchors = torch.randint(0, vocab, (num_reqs, 4), generator=g).to(device)[:, 1]
    return base, hidden, anchors, head, confidence


def assert_forms_agree(args: Case) -> torch.Tensor:
    expected, expected_confidences = markov_drafts(*args, form="loop")
    for form in FAST_FORMS:
        tokens, confidences = markov_drafts(*args, form=form)
        assert torch.equal(tokens, expected), form
        if expected_confidences is None:
            assert confidences is None
        else:
            torch.testing.assert_close(confidences, expected_confidences, atol=2e-5, rtol=2e-5)
    return expected


@given(
    seed=st.integers(0, 2**31),
    kind=st.sampled_from(KINDS),
    num_reqs=st.sampled_from((1, 2, 3, 18)),
    rank=st.sampled_from((1, 8, 16, 33)),
    vocab=st.sampled_from((5, 255, 256, 600)),
    sees_token=st.booleans(),
    ties=st.booleans(),
)
@settings(max_examples=12, deadline=None)
def test_the_forms_agree(
    seed: int, kind: str, num_reqs: int, rank: int, vocab: int, sees_token: bool, ties: bool
) -> None:
    if num_reqs > 16:
        vocab = min(vocab, 256)
    exact = ties and kind == "vanilla"
    assert_forms_agree(case(seed, kind, num_reqs, rank, vocab, sees_token=sees_token, ties=exact))


@pytest.mark.parametrize("num_reqs", [1, 5])
def test_nan_never_wins_and_the_lowest_of_equals_does(num_reqs: int) -> None:
    base, hidden, anchors, head, confidence = case(4, "vanilla", num_reqs, 16, 700, 4, ties=True)
    head = head._replace(w2=torch.zeros_like(head.w2))
    base[:, 0, 300:] = base[:, 0, 0] = torch.nan
    base[:, 1] = torch.nan
    base[:, 2] = -torch.inf
    base[:, 3] = -torch.inf
    base[:, 3, [699, 650, 512]] = 3.0
    tokens = assert_forms_agree((base, hidden, anchors, head, confidence))
    assert (tokens[:, 1:] == torch.tensor([0, 0, 512])).all()
    assert ((tokens[:, 0] > 0) & (tokens[:, 0] < 300)).all()


def test_a_nan_in_the_bias_never_wins() -> None:
    base, hidden, anchors, head, _ = case(5, "vanilla", 2, 16, 300)
    head.w2[7] = torch.nan
    base[:, :, 7] = 1e9
    assert not (assert_forms_agree((base, hidden, anchors, head, None)) == 7).any()


def test_more_tiles_than_a_read() -> None:
    """The token before is found among more tiles than are read at once, for few requests and for many."""
    base, hidden, anchors, head, confidence = case(6, "vanilla", 2, 1, 20_000, 2)
    base[0, 0, 19_990] = base[1, 0, 70] = 100.0
    for n in (1, 2):
        args = (base[:n], hidden[:n], anchors[:n], head, confidence)
        torch_tokens, _ = markov_drafts(*args, form="torch")
        tokens, _ = markov_drafts(*args, form="interpret")
        assert torch.equal(tokens, torch_tokens) and tokens[:, 0].tolist() == [19_990, 70][:n]


@pytest.mark.parametrize("kind", KINDS)
def test_half_precision_sums_in_float32(kind: str) -> None:
    """What a form picks is as good as the best, up to the rounding of the torch form's bias."""
    args = case(7, kind, 3, 32, 400, 1, dtype=torch.bfloat16)
    base, hidden, anchors, head, _ = args
    expected, confidences = markov_drafts(*args, form="loop")
    for form in FAST_FORMS:
        tokens, got = markov_drafts(*args, form=form)
        if kind == "vanilla":
            scores = base[:, 0] + head.w1[anchors].float() @ head.w2.float().T
            best, own = scores.gather(1, expected)[:, 0], scores.gather(1, tokens)[:, 0]
            assert (own >= best - (0.0 if form == "interpret" else 0.05)).all()
        assert got is not None and confidences is not None and got.dtype == torch.float32
        torch.testing.assert_close(got, confidences, atol=0.02, rtol=0.02)


def test_no_requests() -> None:
    base, hidden, anchors, head, confidence = case(8, "gated", 1, 16, 30)
    for form in ("loop", *FAST_FORMS):
        tokens, confidences = markov_drafts(base[:0], hidden[:0], anchors[:0], head, confidence, form=form)
        assert tokens.shape == (0, 3) and confidences is not None and confidences.shape == (0, 3)


def test_wrong_arguments_are_named() -> None:
    base, hidden, anchors, head, confidence = case(9, "gated", 2, 16, 30)
    with pytest.raises(ValueError, match=r"head.token_weight of a gated head must be contiguous \[16, 16\], got None"):
        markov_drafts(base, hidden, anchors, head._replace(token_weight=None), confidence)
    with pytest.raises(ValueError, match="'gru' is unknown: choose vanilla, gated or rnn"):
        markov_drafts(base, hidden, anchors, head._replace(kind="gru"), confidence)
    with pytest.raises(ValueError, match="base_logits must have dtype torch.float32"):
        markov_drafts(base.half(), hidden, anchors, head, confidence)
    with pytest.raises(ValueError, match="hidden has 2 positions a request, base_logits 3"):
        markov_drafts(base, hidden[:, :2].contiguous(), anchors, head, confidence)
    with pytest.raises(ValueError, match=r"anchors must be \[2\] i32 or i64"):
        markov_drafts(base, hidden, anchors[:1], head, confidence)
    with pytest.raises(ValueError, match="must be contiguous: draft n of request i"):
        markov_drafts(base.transpose(0, 1).contiguous().transpose(0, 1), hidden, anchors, head, confidence)


@pytest.mark.gpu
@pytest.mark.parametrize("num_reqs", [1, 2, 16, 40])
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_and_captured(kind: str, num_reqs: int) -> None:
    """In float32 the tokens of the torch form; in bfloat16 a graph's are those of a call."""
    args = case(10, kind, num_reqs, 32, 49152, 7, size=576, device="cuda")
    expected, expected_confidences = markov_drafts(*args, form="torch")
    tokens, confidences = markov_drafts(*args, form="triton")
    assert (tokens == expected).float().mean() > 0.99
    if torch.equal(tokens, expected):
        torch.testing.assert_close(confidences, expected_confidences, atol=1e-3, rtol=1e-3)
    args = case(11, kind, num_reqs, 32, 49152, 7, size=576, dtype=torch.bfloat16, device="cuda")
    expected, expected_confidences = markov_drafts(*args, form="triton")
    if kind == "vanilla":
        base, _, anchors, head, _ = args
        before = torch.cat((anchors.unsqueeze(1), expected[:, :-1]), 1)
        scores = base + head.w1[before].float() @ head.w2.float().T
        torch.testing.assert_close(scores.gather(2, expected.unsqueeze(2))[..., 0], scores.max(-1).values)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured, captured_confidences = markov_drafts(*args, form="triton")
    assert captured_confidences is not None and expected_confidences is not None
    for _ in range(3):
        captured.fill_(-5)
        captured_confidences.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(captured, expected) and torch.equal(captured_confidences, expected_confidences)


def logits_and_kept(case_of: Case, index: int, form: str) -> tuple[torch.Tensor, torch.Tensor]:
    base, _, anchors, head, _ = case_of
    r, n, vocab = base.shape
    temperature = torch.tensor([0.0, 0.7, 1.0, 2.5], device=base.device).repeat(12)
    kept = torch.full((48, n, vocab), -7.0, device=base.device)
    rows = torch.randperm(48, generator=torch.Generator().manual_seed(r))[:r].int().to(base.device)
    latents = head.w1[anchors]
    out = markov_logits(base, latents, head.w2, index, KeptLogits(rows, temperature, kept), form=form)
    assert torch.equal(kept[rows.long(), index], out), "what is drawn from is what is kept"
    assert (kept == -7).sum() == kept.numel() - r * vocab, "and nothing else is written"
    return out, kept


@pytest.mark.parametrize("num_reqs", [1, 3, 20])
@pytest.mark.parametrize(("rank", "vocab"), [(1, 5), (33, 600), (16, 256)])
def test_logits_to_draw_from(num_reqs: int, rank: int, vocab: int) -> None:
    args = case(12, "vanilla", num_reqs, rank, vocab)
    expected = logits_and_kept(args, 1, "loop")
    for form in FAST_FORMS:
        for own, wanted in zip(logits_and_kept(args, 1, form), expected, strict=True):
            torch.testing.assert_close(own, wanted, atol=2e-5, rtol=2e-5)


def test_logits_name_wrong_arguments() -> None:
    base, _, anchors, head, _ = case(13, "vanilla", 2, 16, 30)
    kept = KeptLogits(torch.arange(2).int(), torch.ones(2), torch.zeros(2, 3, 30))
    with pytest.raises(ValueError, match="index 3 and kept.logits .* don't fit 3 drafts of 30 logits"):
        markov_logits(base, head.w1[anchors], head.w2, 3, kept)
    with pytest.raises(ValueError, match=r"w2 must be contiguous \[30, 16\]"):
        markov_logits(base, head.w1[anchors], head.w2[:29], 0, kept)


@pytest.mark.gpu
@pytest.mark.parametrize("num_reqs", [1, 16, 40])
def test_logits_compiled(num_reqs: int) -> None:
    args = case(14, "vanilla", num_reqs, 32, 49152, 2, device="cuda")
    expected, got = logits_and_kept(args, 1, "torch"), logits_and_kept(args, 1, "triton")
    torch.testing.assert_close(got[0], expected[0], atol=1e-4, rtol=1e-4)
