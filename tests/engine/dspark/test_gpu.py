"""On a GPU: the golden rounds by the compiled kernels, without a synchronisation, and captured in a graph."""

import pytest
import torch
import torch.nn.functional as F

from tests.engine.dspark.golden import HEADS, golden
from tests.engine.dspark.paged import PagedLoop, Request

pytestmark = pytest.mark.gpu


def loop_of(head: str, method: str = "greedy") -> tuple[PagedLoop, Request]:
    given = golden(head, "cuda")
    loop = PagedLoop(given.target, given.config, given.weights, "auto", method=method)
    return loop, Request(given.values["prompt"].tolist(), list(range(18, 1, -1)), row=2)


@pytest.mark.parametrize("head", HEADS)
def test_golden_rounds(head: str) -> None:
    loop, request = loop_of(head)
    given = golden(head)
    for position, values in given.rounds():
        drafts = loop.step([request]).cpu()
        assert request.computed == position
        assert torch.equal(drafts[0], values["draft_tokens"])
        base = F.linear(loop.drafter.hidden[0].cpu(), given.weights["lm_head.weight"])
        torch.testing.assert_close(base, values["base_logits"], rtol=0.0, atol=1e-3)
    loop.step([request])
    assert request.tokens == given.sequence


@pytest.mark.parametrize("method", ["greedy", "probabilistic"])
def test_no_synchronisation_and_the_same_from_a_graph(method: str) -> None:
    loop, request = loop_of("rnn", method)
    request.temperature = 2.0
    expected = loop.step([request])
    step, logits = loop.last_step, loop.decoder.draft_logits
    assert step is not None
    kept = None if logits is None else logits.clone()
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        again = loop.decoder.propose(step)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(again, expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = loop.decoder.propose(step)
    with torch.inference_mode():  # what a decoder makes is made under it
        captured.fill_(-5)
        if logits is not None:
            logits.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured, expected)
    if logits is not None and kept is not None:
        torch.testing.assert_close(logits, kept)
