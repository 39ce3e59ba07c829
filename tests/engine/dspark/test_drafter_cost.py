"""What a round of the paged form costs a GPU: no host wait, and few launches."""

import pytest
import torch

from tests.engine.dspark.golden import golden
from tests.engine.dspark.launches import count_launches
from tests.engine.dspark.paged import Request, loop_of, request_of
from tests.kernels.test_no_host_wait import NoHostWait, forbid_waits

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("few_splits")]


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
