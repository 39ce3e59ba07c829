"""What can never run is refused at once, says why, and leaves nothing behind."""

from __future__ import annotations

import pytest

from engine.config import EngineConfig
from engine.hooks import Hooks
from engine.scheduler import Scheduler
from tests.engine.scheduler_helpers import Driver, make_request, make_scheduler, reference


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "says"),
    [
        ([], 4, ["the prompt is empty", "at least one token"]),
        (64, 1, ["the prompt has 64 tokens", "max_model_len=64", "at most 63", "raise max_model_len"]),
        (30, 12, ["can never fit", "30 prompt tokens and max_tokens=12", "need 11 KV blocks of block_size=4",
                  "10 usable", "lower max_tokens to at most 11", "num_gpu_blocks_override to at least 12", "or raise"]),
        (45, 4, ["can never fit", "need 12 KV blocks", "shorten the prompt", "num_gpu_blocks_override to at least 13"]),
    ],
)  # fmt: skip
def test_what_can_never_run_is_refused_with_numbers_and_a_remedy(prompt, max_tokens, says):
    scheduler = make_scheduler(num_usable_blocks=10)
    with pytest.raises(ValueError) as error:
        scheduler.add_request(make_request(prompt, max_tokens, "mine"))
    for part in ["'mine'", *says]:
        assert part in str(error.value)
    assert not scheduler.has_requests() and scheduler.waiting == []
    scheduler.check_integrity()


def test_an_id_is_unique_among_the_unfinished():
    d = Driver(make_scheduler())
    d.add(first := make_request(3, request_id="x"))
    with pytest.raises(ValueError, match="'x' belongs to an unfinished request"):
        d.add(make_request(3, request_id="x"))
    assert d.scheduler.requests == {"x": first}
    d.run()
    d.add(again := make_request(4, request_id="x"))
    d.run()
    assert again.output_token_ids == reference(again, 64)[0]


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("num_prompt", [1, 12, 39, 40])
def test_the_largest_request_that_is_let_in_runs_to_its_end(num_prompt, delay):
    d = Driver(make_scheduler(num_usable_blocks=10), delay)
    most = d.scheduler.max_new_tokens(num_prompt)
    assert num_prompt + most == 41, "the last token needs no slot"
    with pytest.raises(ValueError, match="can never fit"):
        d.add(make_request(num_prompt, most + 1))
    d.add(request := make_request(num_prompt, most))
    d.run()
    assert request.num_output_tokens == most and request.num_preemptions == 0


def test_more_tokens_than_max_model_len_are_not_refused():
    d = Driver(make_scheduler(num_usable_blocks=16))
    d.add(request := make_request(60, 1000))
    d.run()
    assert request.finish_reason == "length" and request.num_tokens == 64
    assert d.scheduler.max_new_tokens(60) == 4


def test_the_scheduler_wants_a_resolved_config():
    with pytest.raises(ValueError, match="resolved"):
        Scheduler(EngineConfig(), Hooks("v1"), False)
