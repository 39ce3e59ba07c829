"""The prefix cache: what is found, what must never be found, what is forgotten first."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.kv_cache import KVCacheManager, hash_block
from tests.engine.scheduler_helpers import admit, make_request, manager


@pytest.mark.parametrize(
    ("num_tokens", "hit"), [(1, 0), (16, 0), (17, 16), (31, 16), (32, 16), (33, 32), (48, 32), (49, 48)]
)
def test_a_hit_leaves_a_token_to_compute(num_tokens, hit):
    kv = manager(20, block_size=16)
    prompt = list(range(num_tokens))
    admit(kv, make_request(prompt))
    assert admit(kv, make_request(prompt))[1] == hit


def test_the_hash_is_chained():
    first = hash_block(b"", b"1234")
    assert hash_block(first, b"5678") != hash_block(b"", b"5678")
    assert first == hash_block(b"", b"1234") and len(first) == 16
    kv = manager()
    admit(kv, make_request([1, 2, 3, 4, 5, 6, 7, 8, 9]))
    assert admit(kv, make_request([5, 6, 7, 8, 9]))[1] == 0
    assert admit(kv, make_request([1, 2, 3, 4, 9, 9, 9, 9, 9]))[1] == 4


def test_caching_off_finds_and_publishes_nothing():
    kv = manager(caching=False)
    prompt = list(range(9))
    admit(kv, make_request(prompt))
    assert admit(kv, make_request(prompt))[1] == 0
    view = kv.pool_view()
    assert all(b.block_hash is None for b in view.blocks) and (view.prefix_queries, view.prefix_hits) == (0, 0)


@pytest.mark.parametrize(
    "hash_function",
    [
        lambda parent, tokens: b"same",
        lambda parent, tokens: bytes([sum(tokens) % 2]),
        lambda parent, tokens: parent + b"x",
    ],
)
def test_a_hash_collision_never_gives_wrong_blocks(hash_function):
    """Same hash, other tokens: a miss. Same hash and tokens under another parent: a miss too."""
    kv = KVCacheManager(41, 4, True, hash_function=hash_function)
    tail = [7, 7, 7, 7]
    a, b = make_request([1, 1, 1, 1, *tail, 0]), make_request([3, 3, 3, 3, *tail, 0])
    assert admit(kv, a)[1] == 0
    # Without the parent in the comparison b would find a's second block once its own first one is published.
    assert admit(kv, b, 4)[1] == 0
    assert kv.get_computed_blocks(make_request([3, 3, 3, 3, *tail, 0])) == ([kv.block_ids(b.request_id)[0]], 4)
    kv.allocate_slots(b, 5)
    kv.check_integrity()
    for request in (a, b):
        again = make_request(request.prompt_token_ids)
        assert kv.get_computed_blocks(again) == (kv.block_ids(request.request_id)[:2], 8)


def test_a_published_block_survives_its_owner_until_it_is_given_out():
    kv = manager(4)
    a = make_request(9)
    assert admit(kv, a) == ([1, 2, 3], 0)
    kv.free(a.request_id)
    assert kv.pool.free_block_ids() == (4, 3, 2, 1)
    assert admit(kv, make_request(8))[0] == [4, 3]
    assert kv.get_computed_blocks(make_request(a.prompt_token_ids)) == ([1, 2], 8)
    # The next block in line is a's last full one: a prefix is forgotten from its end.
    assert admit(kv, make_request(4))[0] == [2]
    assert kv.get_computed_blocks(make_request(a.prompt_token_ids)) == ([1], 4)


def test_a_hit_moves_its_blocks_to_the_back_of_the_queue():
    kv = manager(6)
    old, young = make_request(5), make_request(5)
    for request in (old, young):
        admit(kv, request)
        kv.free(request.request_id)
    assert kv.pool.free_block_ids() == (5, 6, 2, 1, 4, 3)
    again = make_request(old.prompt_token_ids)
    assert admit(kv, again) == ([1, 5], 4)
    kv.free(again.request_id)
    assert kv.pool.free_block_ids() == (6, 2, 4, 3, 5, 1)
    assert admit(kv, make_request(16))[0] == [6, 2, 4, 3]
    assert kv.get_computed_blocks(make_request(young.prompt_token_ids)) == ([], 0)
    assert kv.get_computed_blocks(make_request(old.prompt_token_ids)) == ([1], 4)


def test_the_same_content_computed_twice_is_two_copies():
    kv = manager(8)
    prompt = list(range(8))
    a, b = make_request(prompt), make_request(prompt)
    assert admit(kv, a) == ([1, 2], 0)
    assert admit(kv, b) == ([1, 3], 4)
    assert kv.pool.blocks[2].prefix is kv.pool.blocks[3].prefix
    for request in (a, b):
        request.output_token_ids.extend([50, 51, 52, 53, 54])
        kv.allocate_slots(request, 5)
        request.num_computed_tokens = 13
    kv.check_integrity()
    assert kv.pool.blocks[kv.block_ids(a.request_id)[2]].prefix is kv.pool.blocks[kv.block_ids(b.request_id)[2]].prefix
    kv.free(a.request_id)
    longer = make_request([*prompt, 50, 51, 52, 53, 54])
    assert kv.get_computed_blocks(longer)[1] == 12
    # Evicting one copy leaves the other to be found.
    filler = make_request(4 * kv.num_free_blocks)
    admit(kv, filler)
    assert kv.get_computed_blocks(longer) == (kv.block_ids(b.request_id)[:3], 12)
    kv.free(b.request_id)
    kv.free(filler.request_id)
    kv.check_integrity()


def test_a_block_with_a_token_in_flight_is_published_once_the_token_is_known():
    kv = manager()
    a = make_request(6)
    admit(kv, a)
    second = kv.pool.blocks[2]
    # Two sampled tokens are computed, one of them still on its way: 8 slots written, 7 tokens known.
    a.output_token_ids.append(70)
    assert kv.allocate_slots(a, 1) == []
    a.num_computed_tokens, a.num_output_placeholders = 7, 1
    assert kv.allocate_slots(a, 1) == []
    a.num_computed_tokens, a.num_output_placeholders = 8, 2
    kv.cache_blocks(a)
    assert second.prefix is None
    a.output_token_ids.append(71)
    a.num_output_placeholders = 1
    kv.cache_blocks(a)
    assert second.prefix is not None and second.prefix.tokens == a.token_bytes(4, 8)
    kv.check_integrity()


def test_a_sampled_token_whose_kv_is_not_computed_does_not_fill_a_block():
    kv = manager()
    a = make_request(7)
    admit(kv, a)
    a.output_token_ids.append(70)
    kv.cache_blocks(a)
    assert kv.pool.blocks[2].prefix is None
    kv.cache_blocks(make_request(3))


@given(seed=st.integers(0, 2**32 - 1), collide=st.booleans())
def test_a_lookup_finds_exactly_what_its_blocks_hold(seed, collide):
    """Random traffic against a model that remembers which tokens each block last got."""
    rng = random.Random(seed)
    kv = KVCacheManager(13, 2, True, hash_function=(lambda p, t: b"") if collide else hash_block)
    content: dict[int, tuple[int, ...]] = {}
    alive = []
    for _ in range(40):
        if alive and rng.random() < 0.4:
            kv.free(alive.pop(rng.randrange(len(alive))).request_id)
        request = make_request([rng.randrange(2) for _ in range(rng.randint(1, 9))])
        hits, num_hit = kv.get_computed_blocks(request)
        tokens = tuple(request.prompt_token_ids)
        assert num_hit == 2 * len(hits) <= len(tokens) - 1
        assert [content[b] for b in hits] == [tokens[: 2 * i + 2] for i in range(len(hits))]
        added, _ = admit(kv, request)
        if added is not None:
            alive.append(request)
            for i, block in enumerate(added):
                content[block] = tokens[: 2 * i + 2]
        kv.check_integrity()
    for request in alive:
        kv.free(request.request_id)
    kv.check_integrity()
    assert kv.num_free_blocks == 12
