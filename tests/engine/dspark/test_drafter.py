"""The paged form: golden rounds, batches, chunked prompts, shared blocks, rejected tokens, no host wait."""

import random
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given as for_all
from hypothesis import settings
from hypothesis import strategies as st

from engine.dspark import DraftConfigError
from engine.dspark.calibration import Calibration
from engine.dspark.contiguous import draft_block, draft_hidden
from engine.dspark.decoder import LookupDecoder
from engine.dspark.drafter import DSparkDrafter
from engine.dspark.target import prefill_with_hidden
from engine.models import load_model
from engine.spec_decode import NO_DRAFT
from kernels import paged_attention
from tests.engine.dspark.golden import HEADS, ROOT, TOLERANCE, Golden, golden
from tests.engine.dspark.launches import count_launches
from tests.engine.dspark.paged import BLOCK_SIZE, MAX_LEN, PagedLoop, Request
from tests.kernels.test_no_host_wait import NoHostWait, forbid_waits

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def few_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 32 interpreted programs a context, nearly all would find nothing to read in contexts this short."""
    monkeypatch.setattr(paged_attention, "_MAX_SPLITS", 4)


def loop_of(given: Golden, form: str = "torch", **kwargs: object) -> PagedLoop:
    return PagedLoop(given.target, given.config, given.weights, form, **kwargs)  # type: ignore[arg-type]


def confidence_logits(loop: PagedLoop) -> torch.Tensor:
    """[r, k] of the last block."""
    logits = loop.drafter.drafts.confidence_logits
    assert logits is not None
    return logits


def request_of(given: Golden, first_block: int = 1) -> Request:
    # Not in order, and none of them shared.
    return Request(given.values["prompt"].tolist(), list(range(first_block + 17, first_block, -1)), row=2)


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("form", ["torch", "loop", "interpret"])
def test_golden_rounds(head: str, form: str) -> None:
    given = golden(head)
    loop, request = loop_of(given, form), request_of(given)
    rounds = given.rounds()[: 8 if form == "torch" else 3]
    for i, (position, values) in enumerate(rounds):
        drafts = loop.step([request])
        assert request.computed == position and request.tokens[position] == int(values["anchor"])
        if i:
            torch.testing.assert_close(loop.last_logits, rounds[i - 1][1]["target_logits"], **TOLERANCE)
        assert torch.equal(drafts[0], values["draft_tokens"])
        base = F.linear(loop.drafter.hidden[0], given.weights["lm_head.weight"])
        torch.testing.assert_close(base, values["base_logits"], **TOLERANCE)
        torch.testing.assert_close(confidence_logits(loop)[0], values["confidence_logits"], **TOLERANCE)
        assert loop.decoder.confidences is not None
        expected = torch.sigmoid(values["confidence_logits"])
        torch.testing.assert_close(loop.decoder.confidences[request.row], expected, **TOLERANCE)
    if form == "torch":
        loop.step([request])
        assert request.tokens == given.sequence


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize(("form", "chunk"), [("torch", 3), ("torch", 7), ("torch", 1000), ("interpret", 1000)])
def test_a_batch_drafts_like_each_request_alone(head: str, form: str, chunk: int) -> None:
    """Chunked prompts beside decodes; what every block is drafted from is the plain form's."""
    given = golden(head)
    loop = loop_of(given, form)
    prompts = (given.values["prompt"].tolist(), [5, 9, 200, 31, 7], given.sequence[3:24])
    if form == "interpret":  # blocks of more rows than small_linear takes
        prompts = (*prompts, [8, 4, 1, 1])
    blocks = [list(range(1 + 24 * i, 25 + 24 * i)) for i in range(len(prompts))]
    requests = [Request(list(p), blocks[i], row=4 - i) for i, p in enumerate(prompts)]
    for _ in range(10 if form == "torch" else 2):
        drafts = loop.step(requests, chunk)
        for i, request in enumerate(requests):
            if not request.drafts:
                continue
            tokens = request.tokens[: request.computed + 1]
            _, chosen = prefill_with_hidden(given.target, [tokens], given.config.target_layer_ids)
            anchor, position = torch.tensor([[tokens[-1]]]), torch.tensor([[request.computed]])
            hidden = draft_hidden(
                given.config,
                given.weights,
                given.weights["embed_tokens.weight"],
                chosen[0].unsqueeze(0),
                anchor,
                position,
            )[0]
            torch.testing.assert_close(loop.drafter.hidden[i], hidden[0], **TOLERANCE)
            base = F.linear(hidden, given.weights["lm_head.weight"])
            expected, _, confidences = draft_block(given.config, given.weights, hidden, base, anchor[0])
            assert torch.equal(drafts[i], expected[0])
            assert confidences is not None
            torch.testing.assert_close(confidence_logits(loop)[i], confidences[0], **TOLERANCE)
    assert all(len(request.tokens) > len(prompt) for request, prompt in zip(requests, prompts, strict=True))


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


@pytest.mark.parametrize("k", [1, 3])
def test_fewer_drafts_are_the_first_of_the_block(k: int) -> None:
    """T13."""
    given = golden("rnn")
    short, whole = loop_of(given, k=k), loop_of(given)
    some, all_of_them = short.step([request_of(given)]), whole.step([request_of(given)])
    assert some.shape == (1, k) and torch.equal(some, all_of_them[:, :k])
    torch.testing.assert_close(confidence_logits(short), confidence_logits(whole)[:, :k])
    assert short.decoder.num_lookahead_tokens == 5
    for k in (0, 6):
        with pytest.raises(DraftConfigError, match="possible are 1 to 5"):
            loop_of(given, k=k or -1)


def test_calibrated_confidences() -> None:
    given = golden("rnn")
    found = Calibration((2.0, 0.5, 1.0, 4.0, 1.0), 1, (), ())
    loop = loop_of(given, calibration=found)
    loop.step([request_of(given)])
    assert loop.decoder.confidences is not None
    torch.testing.assert_close(loop.decoder.confidences[2:3], found.probabilities(confidence_logits(loop)))


def test_drawn_drafts_keep_what_they_were_drawn_from() -> None:
    """By row, behind the temperature; a greedy request's are the most likely ones."""
    given = golden("vanilla")
    loop = loop_of(given, method="probabilistic")
    warm, greedy = request_of(given), Request(given.values["prompt"].tolist(), list(range(40, 60)), row=5)
    warm.temperature = 3.0
    drafts = loop.step([warm, greedy])
    logits, values = loop.decoder.draft_logits, given.rounds()[0][1]
    assert logits is not None
    torch.testing.assert_close(logits[2, 0], values["draft_logits"][0] / 3.0, **TOLERANCE)
    torch.testing.assert_close(logits[5], values["draft_logits"], **TOLERANCE)
    assert torch.equal(drafts[1], values["draft_tokens"])
    # Each draft got the bias of the one that was drawn before it.
    w1, w2 = (given.weights[f"markov_head.markov_w{i}.weight"] for i in (1, 2))
    base = loop.drafter.hidden[0] @ given.weights["lm_head.weight"].T
    for i in range(1, 5):
        torch.testing.assert_close(logits[2, i], (base[i] + w2 @ w1[drafts[0, i - 1]]) / 3.0, **TOLERANCE)
    again = loop_of(given, method="probabilistic")
    assert torch.equal(again.step([greedy_copy(warm)])[0], drafts[0])


def greedy_copy(request: Request) -> Request:
    """The request before its first step, alone in its batch."""
    return Request(request.tokens[:17], request.blocks, row=request.row, temperature=request.temperature)


def test_embedding_and_head_of_the_target_serve_a_draft_without() -> None:
    given = golden("vanilla")
    own = {name: w for name, w in given.weights.items() if name not in ("embed_tokens.weight", "lm_head.weight")}
    drafter = DSparkDrafter(given.config, own, given.target)
    assert drafter.embed_tokens is given.target.embed_tokens
    hidden = torch.randn(2, 64)
    torch.testing.assert_close(drafter.compute_logits(hidden), given.target.compute_logits(hidden))
    changed = given.weights | {"lm_head.weight": given.weights["lm_head.weight"] * 2}
    doubled = DSparkDrafter(given.config, changed, given.target)
    torch.testing.assert_close(doubled.compute_logits(hidden), 2 * given.target.compute_logits(hidden))


@pytest.mark.parametrize("method", ["greedy", "probabilistic"])
def test_no_host_wait(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = golden("rnn")
    loop = loop_of(given, method=method)
    expected = loop.step([request_of(given), Request([5, 9, 200], [60, 61, 62], row=1)])
    assert loop.last_step is not None
    with monkeypatch.context() as patch, NoHostWait("cpu"):
        forbid_waits(patch)
        drafts = loop.decoder.propose(loop.last_step)
    assert torch.equal(drafts, expected)


@pytest.mark.parametrize(
    ("head", "method", "most"), [("vanilla", "greedy", 27), ("rnn", "greedy", 33), ("vanilla", "probabilistic", 55)]
)
def test_a_round_is_few_launches(head: str, method: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one request: a step at batch 1 is bound by its launches."""
    loop, request = loop_of(golden(head), "interpret", method=method), request_of(golden(head))
    loop.step([request])
    loop.step([request])
    step = loop.last_step
    assert step is not None
    assert 0 < count_launches(lambda: loop.decoder.propose(step), monkeypatch) <= most


def test_the_draft_without_weights() -> None:
    """Rows by idx_mapping; nothing in a prompt, nothing past the model's length."""
    tokens = torch.zeros(4, 12, dtype=torch.int32)
    tokens[2, :7] = torch.tensor([1, 2, 3, 9, 1, 2, 3])
    tokens[0, :6] = torch.tensor([4, 5, 4, 5, 4, 5])
    tokens[3, :11] = torch.tensor([6, 7, 8, 6, 7, 8, 6, 7, 8, 6, 7])
    step = SimpleNamespace(
        idx_mapping=torch.tensor([2, 0, 3], dtype=torch.int32),
        num_sampled=torch.tensor([1, 0, 2], dtype=torch.int32),
        rows=SimpleNamespace(all_token_ids=tokens, total_len=torch.tensor([6, 0, 7, 11], dtype=torch.int32)),
    )
    decoder = LookupDecoder(3, max_model_len=12)
    assert decoder.propose(step).tolist() == [[9, 1, 2], [-1, -1, -1], [8, -1, -1]]  # type: ignore[arg-type]
    assert decoder.draft_logits is None and decoder.kv_bytes_per_token() == 0
    with pytest.raises(ValueError, match="at least 1, got 0"):
        LookupDecoder(0, 12)


def test_half_precision() -> None:
    """The same block in bfloat16: close, in the target's dtype, with logits and confidences in float32."""
    given = golden("rnn")
    half = load_model(
        ROOT / "rnn" / "target", dtype=torch.bfloat16, device=torch.device("cpu"), skip_tokenizer_init=True
    ).model
    whole, request = loop_of(given), request_of(given)
    whole.step([request])
    prompt, inputs = given.values["prompt"].tolist(), whole.drafter.inputs
    _, chosen = prefill_with_hidden(given.target, [prompt], given.config.target_layer_ids)
    drafter = DSparkDrafter(given.config, given.weights, half)
    cache, table = drafter.allocate_kv_cache(120, BLOCK_SIZE), torch.tensor([request.blocks], dtype=torch.int32)
    positions = torch.arange(len(prompt))
    drafter.inject_context(chosen[0].bfloat16(), positions, inputs.context_slot_mapping, cache)
    hidden = drafter.backbone(inputs, table, cache, 40)
    drafts = drafter.propose(hidden, inputs.input_ids[:1].long(), inputs.positions.view(1, 5), 5)
    assert cache.dtype == hidden.dtype == torch.bfloat16
    error = (hidden.float() - whole.drafter.hidden).norm(dim=-1)
    assert (error < 0.1 * whole.drafter.hidden.norm(dim=-1)).all()
    assert drafts.confidence_logits is not None and drafts.confidence_logits.dtype == torch.float32
    assert (drafts.confidence_logits - confidence_logits(whole))[0, 0].abs() < 0.5
