"""Blocks: given out, shared, freed and counted."""

from __future__ import annotations

import pytest

from engine.kv_cache import KVCacheManager
from tests.engine.scheduler_helpers import admit, make_request, manager


def test_blocks_come_from_the_front_and_are_freed_from_the_tail():
    kv = manager(6)
    a, b = make_request(10), make_request(5)
    assert admit(kv, a) == ([1, 2, 3], 0)
    assert admit(kv, b) == ([4, 5], 0)
    assert kv.pool.free_block_ids() == (6,)
    kv.free(a.request_id)
    assert kv.pool.free_block_ids() == (6, 3, 2, 1)
    kv.free(b.request_id)
    assert kv.pool.free_block_ids() == (6, 3, 2, 1, 5, 4)
    kv.check_integrity()


def test_the_null_block_is_never_given_out():
    kv = manager(3)
    request = make_request(12)
    assert admit(kv, request)[0] == [1, 2, 3]
    assert kv.num_free_blocks == 0 and kv.usage == 1.0
    with pytest.raises(ValueError, match="at least 2"):
        KVCacheManager(1, 4, True)


def test_a_block_is_added_only_when_the_last_one_is_full():
    kv = manager(4)
    request = make_request(7)
    assert admit(kv, request) == ([1, 2], 0)
    request.output_token_ids.append(1)
    assert kv.allocate_slots(request, 1) == []
    request.num_computed_tokens = 8
    request.output_token_ids.append(2)
    assert kv.allocate_slots(request, 1) == [3]
    assert kv.block_ids(request.request_id) == [1, 2, 3]
    kv.check_integrity()


def test_nothing_changes_when_blocks_are_short():
    kv = manager(4)
    a = make_request(9)
    admit(kv, a)
    kv.free(a.request_id)
    holder = make_request(4)
    admit(kv, holder)
    free, cached, view = kv.pool.free_block_ids(), kv.get_computed_blocks(a), kv.pool_view()
    again = make_request([*a.prompt_token_ids, *range(12)])
    hits, num_hit = kv.get_computed_blocks(again)
    assert num_hit == 8 and len(hits) == 2
    # Two of the three free blocks are the hits themselves, so 4 more blocks can't come from one.
    assert kv.allocate_slots(again, again.num_tokens - num_hit, hits) is None
    assert kv.pool.free_block_ids() == free and kv.get_computed_blocks(a) == cached and kv.pool_view() == view
    assert kv.block_ids(again.request_id) == []
    kv.check_integrity()
    assert kv.allocate_slots(again, 4, hits) is not None
    kv.check_integrity()


def test_lookahead_reserves_slots_and_publishes_none_of_them():
    kv = manager(8)
    request = make_request(4)
    assert kv.allocate_slots(request, 4, num_lookahead_tokens=5) == [1, 2, 3]
    request.num_computed_tokens = 4
    assert [b.block_hash is not None for b in kv.pool_view().blocks[1:4]] == [True, False, False]
    request.output_token_ids.append(9)
    assert kv.allocate_slots(request, 1, num_lookahead_tokens=5) == []
    kv.check_integrity()


def test_hits_are_refused_for_a_request_that_owns_blocks():
    kv = manager()
    request = make_request(6)
    admit(kv, request)
    with pytest.raises(ValueError, match="owns blocks already"):
        kv.allocate_slots(request, 1, [5])


def test_reference_counts_of_a_shared_prefix():
    kv = manager(12)
    prefix = list(range(8))
    requests = [make_request([*prefix, 100 + i]) for i in range(3)]
    assert [admit(kv, r)[0] for r in requests] == [[1, 2, 3], [1, 2, 4], [1, 2, 5]]
    view = kv.pool_view()
    ids = tuple(r.request_id for r in requests)
    assert [view.blocks[i].ref_cnt for i in range(7)] == [0, 3, 3, 1, 1, 1, 0]
    assert view.blocks[1].owners == ids and view.blocks[4].owners == ids[1:2]
    assert (view.prefix_queries, view.prefix_hits) == (27, 16)
    kv.free(ids[0])
    assert kv.pool.blocks[1].ref_cnt == 2 and 1 not in kv.pool.free_block_ids()
    kv.free(ids[1])
    kv.free(ids[2])
    kv.free("unknown")
    assert kv.pool.blocks[1].ref_cnt == 0 and kv.num_free_blocks == 12 and kv.usage == 0.0
    kv.check_integrity()


def test_the_pool_view_shows_owner_hash_and_free_order():
    kv = manager(5)
    request = make_request(6)
    admit(kv, request)
    view = kv.pool_view()
    assert view.block_size == 4 and [b.block_id for b in view.blocks] == [0, 1, 2, 3, 4, 5]
    assert view.free == (3, 4, 5)
    assert len(view.blocks[1].block_hash or "") == 8 and view.blocks[2].block_hash is None
    assert view.blocks[0].owners == () and view.blocks[2].owners == (request.request_id,)


def test_reset_prefix_cache_only_when_nothing_is_in_use():
    kv = manager()
    request = make_request(9)
    admit(kv, request)
    assert kv.reset_prefix_cache() is False
    kv.free(request.request_id)
    assert kv.get_computed_blocks(request)[1] == 8
    assert kv.reset_prefix_cache() is True
    assert kv.get_computed_blocks(request) == ([], 0)
    kv.check_integrity()


def test_reset_takes_everything_back():
    kv = manager(4)
    request = make_request(9)
    admit(kv, request)
    kv.pool.blocks[1].ref_cnt = 7
    kv.reset()
    assert kv.num_free_blocks == 4 and kv.get_computed_blocks(request) == ([], 0) and kv.pool.prefix_queries == 9
    kv.check_integrity()


def break_ref_cnt(kv):
    kv.pool.blocks[1].ref_cnt += 1


def break_free_list(kv):
    kv.pool._free[1] = None


def break_leak(kv):
    del kv.pool._free[5]


def break_twice(kv):
    kv._requests["a"].block_ids.append(1)


def break_null(kv):
    kv._requests["a"].block_ids[0] = 0


def break_hash(kv):
    kv.pool.blocks[1].prefix = None


def break_map(kv):
    kv.pool._cached.clear()


def break_share(kv):
    kv._requests["b"].block_ids[-1] = kv._requests["a"].block_ids[-1]


def break_bucket(kv):
    kv.pool._cached[b"else"] = kv.pool._cached.pop(kv.pool.blocks[1].prefix.block_hash)


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        (break_ref_cnt, "block 1: ref_cnt 2, but 1 requests own it"),
        (break_free_list, "block 1: ref_cnt 1, in the free list: True"),
        (break_leak, "block 5: ref_cnt 0, in the free list: False"),
        (break_twice, "block 1 is 2 times in request 'a'"),
        (break_null, "block 0 of request 'a'"),
        (break_hash, r"blocks \[1\]: block 1 holds another"),
        (break_map, "block 1: its hash is not in the map"),
        (break_share, "block 2: ref_cnt 1, but 2 requests own it"),
        (break_bucket, "block 1: its hash is not in the map"),
    ],
)
def test_check_integrity_names_the_block_at_fault(fault, named):
    kv = manager(6)
    for rid in "ab":
        admit(kv, make_request(6, request_id=rid))
    kv.check_integrity()
    fault(kv)
    with pytest.raises(AssertionError, match=named):
        kv.check_integrity()
