"""The paged form: golden rounds, batches, fewer drafts, calibrated, drawn, in half precision."""

import pytest
import torch
import torch.nn.functional as F

from engine.dspark import DraftConfigError
from engine.dspark.calibration import Calibration
from engine.dspark.contiguous import draft_block, draft_hidden
from engine.dspark.drafter import DSparkDrafter
from engine.dspark.target import prefill_with_hidden
from engine.models import load_model
from tests.engine.dspark.golden import HEADS, ROOT, TOLERANCE, golden
from tests.engine.dspark.paged import BLOCK_SIZE, Request, confidence_logits, loop_of, request_of

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("few_splits")]


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
