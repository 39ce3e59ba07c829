"""The plain form gives the reference implementation's values, and its blocks don't see what they must not."""

import pytest
import torch
import torch.nn.functional as F

from engine.dspark.contiguous import block_ids, draft_block, draft_hidden
from engine.dspark.heads import block_latents, markov_bias, markov_embedding
from engine.dspark.target import prefill_with_hidden
from tests.engine.dspark.golden import HEADS, TOLERANCE, Golden, golden


def hidden_of(given: Golden) -> torch.Tensor:
    """[1, s, n * d] of the whole sequence."""
    _, chosen = prefill_with_hidden(given.target, [given.sequence], given.config.target_layer_ids)
    return chosen[0].unsqueeze(0)


@pytest.mark.parametrize("head", HEADS)
def test_every_golden_round_at_once(head: str) -> None:
    given = golden(head)
    positions = torch.tensor([[position for position, _ in given.rounds()]])
    anchors = torch.tensor([given.sequence])[0, positions]
    assert anchors.flatten().tolist() == [int(values["anchor"]) for _, values in given.rounds()]
    hidden = draft_hidden(
        given.config, given.weights, given.weights["embed_tokens.weight"], hidden_of(given), anchors, positions
    )[0]
    base = F.linear(hidden, given.weights["lm_head.weight"])
    tokens, logits, confidences = draft_block(given.config, given.weights, hidden, base, anchors[0])
    assert confidences is not None
    for i, (_, values) in enumerate(given.rounds()):
        assert torch.equal(tokens[i], values["draft_tokens"])
        torch.testing.assert_close(base[i], values["base_logits"], **TOLERANCE)
        torch.testing.assert_close(logits[i], values["draft_logits"], **TOLERANCE)
        torch.testing.assert_close(confidences[i], values["confidence_logits"], **TOLERANCE)


@pytest.mark.parametrize("head", HEADS)
def test_the_target_gives_the_golden_verification(head: str) -> None:
    given = golden(head)
    position, values = given.rounds()[0]
    tokens = given.sequence[: position + 1] + values["draft_tokens"].tolist()
    last, _ = prefill_with_hidden(given.target, [tokens], given.config.target_layer_ids)
    logits = given.target.compute_logits(last[0][position:])
    torch.testing.assert_close(logits, values["target_logits"], **TOLERANCE)


def test_a_block_sees_neither_later_context_nor_other_blocks() -> None:
    given = golden("vanilla")
    hidden, embedding = hidden_of(given), given.weights["embed_tokens.weight"]
    alone = draft_hidden(given.config, given.weights, embedding, hidden, torch.tensor([[3]]), torch.tensor([[9]]))
    changed = hidden.clone()
    changed[:, 9:] = 100.0
    beside = draft_hidden(
        given.config, given.weights, embedding, changed, torch.tensor([[3, 7]]), torch.tensor([[9, 5]])
    )
    torch.testing.assert_close(beside[:, 0], alone[:, 0])
    changed[:, 8] += 1.0
    other = draft_hidden(given.config, given.weights, embedding, changed, torch.tensor([[3]]), torch.tensor([[9]]))
    assert (other - alone).abs().max() > 1e-3


def test_positions_of_a_block_see_later_ones_of_it() -> None:
    given = golden("vanilla")
    hidden, embedding = hidden_of(given), given.weights["embed_tokens.weight"].clone()
    args = (hidden, torch.tensor([[3]]), torch.tensor([[9]]))
    before = draft_hidden(given.config, given.weights, embedding, *args)
    embedding[given.config.mask_token_id] += 1.0
    after = draft_hidden(given.config, given.weights, embedding, *args)
    assert (after - before)[0, 0, 0].abs().max() > 1e-3, "the anchor doesn't attend to the masks behind it"


def test_the_anchor_comes_first() -> None:
    given = golden("vanilla")
    assert block_ids(given.config, torch.tensor([[7, 9]])).tolist() == [[[7, 255, 255, 255, 255], [9, *[255] * 4]]]


@pytest.mark.parametrize("head", HEADS)
def test_whole_blocks_get_the_loops_bias(head: str) -> None:
    given = golden(head)
    _, values = given.rounds()[1]
    hidden = torch.randn(1, 5, 64, generator=torch.Generator().manual_seed(0))
    base = torch.zeros(1, 5, 256)
    tokens, logits, _ = draft_block(given.config, given.weights, hidden, base, values["anchor"])
    before = torch.cat((values["anchor"].view(1, 1), tokens[:, :-1]), 1)
    latents = block_latents(given.config, given.weights, markov_embedding(given.weights, before), hidden)
    torch.testing.assert_close(markov_bias(given.weights, latents), logits)


def test_gradients_reach_every_weight() -> None:
    given = golden("rnn")
    shared = ("embed_tokens.weight", "lm_head.weight")
    weights = {name: w.clone().requires_grad_(name not in shared) for name, w in given.weights.items()}
    anchors = torch.tensor([[3, 7]])
    hidden = draft_hidden(
        given.config, weights, weights["embed_tokens.weight"], hidden_of(given).clone(), anchors, torch.tensor([[9, 5]])
    )[0]
    _, logits, confidences = draft_block(
        given.config, weights, hidden, hidden @ weights["lm_head.weight"].T, anchors[0]
    )
    assert confidences is not None
    (logits.logsumexp(-1).sum() + confidences.sum()).backward()
    for name, weight in weights.items():
        if name not in shared:
            assert weight.grad is not None and weight.grad.abs().sum() > 0, name
