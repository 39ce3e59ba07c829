"""Tokens that stand in the running table until a request is asked for them."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.arrived_tokens import TOKENS_KEPT
from engine.request import Request
from engine.running_table import RunningTable
from tests.engine.scheduler_helpers import Driver, make_request, make_scheduler, reference


def come(table: RunningTable, at: np.ndarray | slice, tokens: np.ndarray, counts: np.ndarray) -> None:
    table.arrived.add(at, tokens)
    table.num_tokens[at] += counts


@given(st.data())
@settings(max_examples=30)
def test_each_request_gets_its_own_in_order_whoever_asks_leaves_or_comes(data: st.DataObject) -> None:
    table, expected, number = RunningTable(4), {}, itertools.count()
    waiting = [make_request(3) for _ in range(6)]
    widths = st.sampled_from([1, 1, 5, data.draw(st.sampled_from([1, TOKENS_KEPT // 3, 2 * TOKENS_KEPT]))])
    for _ in range(data.draw(st.integers(0, 12))):
        running = table.running()
        if running and data.draw(st.integers(0, 4)) == 0:
            waiting.insert(0, data.draw(st.sampled_from(running)))
            table.remove(waiting[0])
        if waiting and len(table) < 4:
            table.add(waiting.pop(), limit=9999, seed_index=0)
        rows = np.array(data.draw(st.permutations(table.order.tolist())))[: data.draw(st.integers(1, 4))]
        width = data.draw(widths)
        tokens = np.array([next(number) for _ in range(len(rows) * width)]).reshape(len(rows), width)
        counts = np.array([data.draw(st.integers(0, width)) for _ in rows])
        come(table, rows, tokens, counts)
        for row, own, count in zip(rows.tolist(), tokens.tolist(), counts.tolist(), strict=True):
            request = table.requests[row]
            expected.setdefault(request, []).extend(own[:count])
            if data.draw(st.integers(0, 4)) == 0:
                request.append_output(token := next(number), 0.0)
                expected[request].append(token)
        tokens[:] = -1  # a buffer that the next step's tokens come to
        if data.draw(st.integers(0, 3)) == 0:
            asked = data.draw(st.sampled_from(table.running()))
            assert asked.output_token_ids == expected.get(asked, [])
            check_bytes(table, expected)
    check_bytes(table, expected)
    for request in [*waiting, *table.running()]:
        own = expected.get(request, [])
        assert request.output_token_ids == own and request.num_tokens == 3 + len(own)


def check_bytes(table: RunningTable, expected: dict[Request, list[int]]) -> None:
    """Any four tokens, wherever they are: in the prompt, in the request's list or in the table."""
    for row in table.order.tolist():
        request = table.requests[row]
        known = [*request.prompt_token_ids, *expected.get(request, [])]
        n = len(known)
        for end in {4, 5, 8, n - TOKENS_KEPT, n - TOKENS_KEPT // 2, n - 1, n} & set(range(4, n + 1)):
            right = np.array(known[end - 4 : end]).tobytes()
            assert request.token_bytes(end - 4, end) == right
            kept = table.arrived.ending_at(np.array([row]), np.array([end]), 4)[0]
            assert kept in (right, None)


def test_more_tokens_than_are_kept_come_before_anybody_asks() -> None:
    table, requests = RunningTable(3), [make_request(n) for n in (2, 7, 1)]
    for request in requests:
        table.add(request, limit=9999, seed_index=0)
    steps = 3 * TOKENS_KEPT + 5
    for step in range(steps):
        come(table, slice(0, 2), np.array([[step], [-step]]), np.array([1, 1]))
        if step > 12:  # as for the block that has just become full
            rows, ends = np.array([1, 0]), np.array([8 + step, 3 + step])
            assert None not in table.arrived.ending_at(rows, ends, 9), "without a look at the requests"
    assert requests[0].output_token_ids == list(range(steps))
    assert requests[1].output_token_ids == [-step for step in range(steps)] and requests[2].output_token_ids == []


def test_a_prefix_is_found_by_tokens_that_nobody_has_asked_for() -> None:
    d = Driver(make_scheduler(max_model_len=256, async_scheduling=True), 1)
    first = make_request(6, max_tokens=90)
    d.add(first)
    while d.num_steps < 80:
        d.step()
    again = make_request(first.prompt_token_ids + reference(first, 256)[0][:74])
    d.add(again)
    d.step()
    assert again.num_cached_tokens >= 72
