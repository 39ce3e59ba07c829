"""The KV blocks of the device as the host counts them: who is free, who is shared, whose content can be found again.

Nothing here knows of requests or tokens to come; `kv_cache.py` does. Block 0 is the null block and is never given out.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

ROOT_PREFIX_ID = 0
TOKEN_BYTES = 8


@dataclass(slots=True, eq=False)
class CachedPrefix:
    """A prefix of whole blocks, known by its last block's tokens and by the prefix before it.

    `prefix_id` stands for the exact content of the whole prefix, so comparing `tokens`, TOKEN_BYTES each, and
    `parent_id` compares every token: two prefixes whose hashes collide differ in one of them. `block_ids` are the
    copies; requests that computed the same tokens side by side make more than one.
    """

    prefix_id: int
    parent_id: int
    block_hash: bytes
    tokens: bytes
    block_ids: list[int]


@dataclass(slots=True, eq=False)
class KVCacheBlock:
    """`prefix` is set while the block is published in the prefix cache, whether it is in use or free."""

    block_id: int
    ref_cnt: int = 0
    prefix: CachedPrefix | None = None


class BlockPool:
    """`num_blocks` blocks of which block 0 is never given out."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"num_blocks={num_blocks}: at least 2, since no request can own block 0, the null block")
        self.num_blocks = num_blocks
        self.blocks = [KVCacheBlock(i) for i in range(num_blocks)]
        self.prefix_queries = 0
        """Tokens looked up for admitted requests since the start."""
        self.prefix_hits = 0
        """Tokens of those found."""
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))
        self._cached: dict[bytes, list[CachedPrefix]] = {}
        self._last_prefix_id = ROOT_PREFIX_ID

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    def free_block_ids(self) -> tuple[int, ...]:
        """Free blocks in the order in which they will be given out."""
        return tuple(self._free)

    def allocate(self, num: int) -> list[int]:
        """Takes `num` blocks from the front of the free queue, one reference each, and forgets what they had cached."""
        if num > len(self._free):
            raise ValueError(f"{num} blocks asked for, {len(self._free)} are free")
        block_ids = [self._free.popitem(last=False)[0] for _ in range(num)]
        for block_id in block_ids:
            block = self.blocks[block_id]
            block.ref_cnt = 1
            if block.prefix is not None:
                self._unpublish(block, block.prefix)
        return block_ids

    def touch(self, block_ids: Iterable[int]) -> None:
        """Adds a reference to each block; a free one leaves the free queue and keeps its content."""
        for block_id in block_ids:
            block = self.blocks[block_id]
            if block.ref_cnt == 0:
                del self._free[block_id]
            block.ref_cnt += 1

    def release(self, block_ids: Iterable[int]) -> None:
        """Drops a reference of each block, in the given order; the unreferenced go to the back of the free queue."""
        for block_id in block_ids:
            block = self.blocks[block_id]
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                self._free[block_id] = None

    def find(self, parent_id: int, block_hash: bytes, tokens: bytes) -> CachedPrefix | None:
        """The published prefix with this parent and these tokens, or None. The hash only says where to look."""
        for prefix in self._cached.get(block_hash, ()):
            if prefix.parent_id == parent_id and prefix.tokens == tokens:
                return prefix
        return None

    def publish(self, block_id: int, parent_id: int, block_hash: bytes, tokens: bytes) -> int:
        """Lets others find `block_id` under (parent, tokens); a second block of that content becomes another copy.
        Returns the prefix's id."""
        bucket = self._cached.get(block_hash)
        prefix = self.find(parent_id, block_hash, tokens) if bucket else None
        if prefix is None:
            self._last_prefix_id += 1
            prefix = CachedPrefix(self._last_prefix_id, parent_id, block_hash, tokens, [block_id])
            if bucket:
                bucket.append(prefix)
            else:
                self._cached[block_hash] = [prefix]
        else:
            prefix.block_ids.append(block_id)
        self.blocks[block_id].prefix = prefix
        return prefix.prefix_id

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached content. False, and nothing is changed, while any block is in use."""
        if len(self._free) != self.num_blocks - 1:
            return False
        self._cached.clear()
        for block in self.blocks:
            block.prefix = None
        return True

    def _unpublish(self, block: KVCacheBlock, prefix: CachedPrefix) -> None:
        block.prefix = None
        prefix.block_ids.remove(block.block_id)
        if not prefix.block_ids:
            bucket = self._cached[prefix.block_hash]
            bucket.remove(prefix)
            if not bucket:
                del self._cached[prefix.block_hash]

    def check_integrity(self, owned: Mapping[str, list[int]], block_size: int) -> None:
        """Raises AssertionError naming the block at fault. `owned` maps each request to its blocks."""
        counts: Counter[int] = Counter()
        for request_id, block_ids in owned.items():
            for block_id, times in Counter(block_ids).items():
                assert 0 < block_id < self.num_blocks, f"block {block_id} of request {request_id!r} can't be owned"
                assert times == 1, f"block {block_id} is {times} times in request {request_id!r}"
                counts[block_id] += 1
        for block in self.blocks[1:]:
            self._check_block(block, counts[block.block_id])
        null = self.blocks[0]
        assert null.ref_cnt == 0 and null.prefix is None and 0 not in self._free, "block 0, the null block, is in use"
        used, free, usable = len(counts), len(self._free), self.num_blocks - 1
        assert used + free == usable, f"{used} blocks used and {free} free of {usable}"
        for block_hash, bucket in self._cached.items():
            for prefix in bucket:
                what = f"prefix {prefix.prefix_id} of blocks {prefix.block_ids}: "
                assert prefix.block_hash == block_hash, what + "in the map under another hash"
                num_tokens = len(prefix.tokens) // TOKEN_BYTES
                assert num_tokens == block_size, what + f"{num_tokens} tokens, not a full block"
                assert prefix.block_ids, what + "no block holds it"
                for block_id in prefix.block_ids:
                    assert self.blocks[block_id].prefix is prefix, what + f"block {block_id} holds another"

    def _check_block(self, block: KVCacheBlock, num_owners: int) -> None:
        what, is_free = f"block {block.block_id}: ", block.block_id in self._free
        assert block.ref_cnt == num_owners, what + f"ref_cnt {block.ref_cnt}, but {num_owners} requests own it"
        assert is_free == (block.ref_cnt == 0), what + f"ref_cnt {block.ref_cnt}, in the free list: {is_free}"
        assert block.ref_cnt <= 1 or block.prefix is not None, what + "shared and not published"
        if block.prefix is not None:
            assert block.block_id in block.prefix.block_ids, what + "missing among the copies of its prefix"
            assert block.prefix in self._cached.get(block.prefix.block_hash, ()), what + "its hash is not in the map"
