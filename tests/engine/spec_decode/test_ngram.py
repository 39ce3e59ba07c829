"""The n-gram drafter: the host's form and the device's give the same, in rounds too."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.spec_decode import NgramDecoder
from kernels import propose_ngram
from tests.engine.spec_decode.rounds import MAX_LEN, Rounds, greedy_tokens, model

REQUESTS = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=30), min_size=1, max_size=4)


@given(requests=REQUESTS, low=st.integers(1, 4), more=st.integers(0, 3), k=st.integers(1, 5), room=st.integers(0, 9))
@settings(max_examples=150)
def test_the_host_and_the_device_agree(requests: list[list[int]], low: int, more: int, k: int, room: int) -> None:
    max_len = max(map(len, requests)) + room
    table = torch.zeros(len(requests), max_len, dtype=torch.int32)
    for row, tokens in enumerate(requests):
        table[row, : len(tokens)] = torch.tensor(tokens)
    rows, lengths = torch.arange(len(requests)).int(), torch.tensor(list(map(len, requests)), dtype=torch.int32)
    device = propose_ngram(
        rows, table, lengths, num_drafts=k, min_ngram=low, max_ngram=low + more, form="torch"
    ).tolist()
    decoder = NgramDecoder(k, low, low + more, max_len)
    host = decoder.propose_from_tokens([np.array(tokens, dtype=np.int32) for tokens in requests])
    assert [[token for token in own if token >= 0] for own in device] == host


@pytest.mark.parametrize(
    ("tokens", "high", "drafts"),
    [([3, 6, 2, 3, 8, 1, 2, 3, 7, 1, 2, 3], high, [draft]) for high, draft in ((1, 6), (2, 8), (3, 7))]
    + [([5, 6, 1, 5, 6, 2, 5, 6], 2, [1]), ([1], 2, []), ([], 2, [])],
)
def test_the_host(tokens: list[int], high: int, drafts: list[int]) -> None:
    decoder = NgramDecoder(1, 1, high, 40)
    assert decoder.propose_from_tokens([np.array(tokens, dtype=np.int32)]) == [drafts]


def test_no_room_is_no_draft() -> None:
    tokens = np.array([1, 2, 1, 2], dtype=np.int32)
    assert [NgramDecoder(3, 1, 2, n).propose_from_tokens([tokens])[0] for n in (4, 5, 6, 9)] == [
        [],
        [1],
        [1, 2],
        [1, 2],
    ]


@pytest.mark.parametrize("method", ["standard", "block"])
def test_rounds_say_what_the_target_says(method: str) -> None:
    """Prompts of a model's own repetitions, so that some drafts are right."""
    prompts = [[7, 7, 3] * 4, [1, 2, 3, 4, 5], greedy_tokens(model(), [9], 24)]
    rounds = Rounds(model(), NgramDecoder(3, 1, 3, MAX_LEN), method)
    requests = [rounds.add(prompt, row) for row, prompt in enumerate(prompts)]
    proposed = 0
    for _ in range(12):
        drafts = rounds.step(requests, chunk=7)
        for request, own in zip(requests, drafts.tolist(), strict=True):
            expected = []
            if request.num_accepted:
                expected = rounds.decoder.propose_from_tokens([np.array(request.tokens, dtype=np.int32)])[0]
            assert [token for token in own if token >= 0] == expected
            proposed += len(expected)
    assert proposed > 10
    for prompt, request in zip(prompts, requests, strict=True):
        output = request.tokens[len(prompt) :]
        assert len(output) >= 8 and output == greedy_tokens(model(), prompt, len(output))
