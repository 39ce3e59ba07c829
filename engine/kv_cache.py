"""Which request owns which KV blocks, and which computed blocks a new request may share.

A *full* block is known by a chained hash of its parent's hash and its tokens. It is published when slots are given for
its last token, provided the host knows all its tokens: a later reader's attention runs after the write in stream order,
and in the same step a layer stores all keys and values before any row attends. A block with a token that is still on
the device is published once that token has arrived.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from .block_pool import ROOT_PREFIX_ID, BlockPool
from .request import Request
from .running_table import NEVER
from .snapshot import BlockView, PoolView

HashFunction = Callable[[bytes, bytes], bytes]


def hash_block(parent_hash: bytes, tokens: bytes) -> bytes:
    """The chained hash (16 bytes) of a full block of `Request.token_bytes`; `parent_hash` is empty for a first
    block."""
    return hashlib.blake2b(parent_hash + tokens, digest_size=16).digest()


@dataclass(slots=True)
class _RequestBlocks:
    """`hashes` may run ahead of `block_ids` (a lookup); the first `num_published` blocks are in the prefix cache, as
    `prefix_id`."""

    block_ids: list[int] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)
    num_published: int = 0
    prefix_id: int = ROOT_PREFIX_ID


class KVCacheManager:
    """Gives out blocks of `block_size` token slots. `num_blocks - 1` are usable: block 0 is the null block."""

    def __init__(
        self, num_blocks: int, block_size: int, enable_caching: bool, hash_function: HashFunction = hash_block
    ) -> None:
        self.block_size = block_size
        self.enable_caching = enable_caching
        self.pool = BlockPool(num_blocks)
        self._hash_function = hash_function
        self._requests: dict[str, _RequestBlocks] = {}

    @property
    def num_usable_blocks(self) -> int:
        return self.pool.num_blocks - 1

    @property
    def num_free_blocks(self) -> int:
        return self.pool.num_free_blocks

    @property
    def usage(self) -> float:
        """Fraction of the usable blocks that requests own, 0 to 1."""
        return 1.0 - self.pool.num_free_blocks / self.num_usable_blocks

    def block_ids(self, request_id: str) -> list[int]:
        """A copy of the request's blocks in token order; empty if it has none."""
        blocks = self._requests.get(request_id)
        return list(blocks.block_ids) if blocks else []

    def bounds(self, request_id: str) -> tuple[int, int]:
        """Token slots of the request's blocks, and the number of computed and known tokens from which `cache_blocks`
        has something to do."""
        blocks = self._requests[request_id]
        publish_at = (blocks.num_published + 1) * self.block_size if self.enable_caching else NEVER
        return len(blocks.block_ids) * self.block_size, publish_at

    def get_computed_blocks(self, request: Request) -> tuple[list[int], int]:
        """The longest cached prefix of the request's known tokens: (block ids, number of tokens).

        At most `num_tokens - 1` tokens, rounded down to a block: at least one token is left to compute logits from.
        Takes no reference: hand the blocks to `allocate_slots` before anything else is allocated.
        """
        if not self.enable_caching:
            return [], 0
        blocks = self._requests.setdefault(request.request_id, _RequestBlocks())
        hits: list[int] = []
        parent_id = ROOT_PREFIX_ID
        for index in range((request.num_tokens - 1) // self.block_size):
            tokens = self._tokens(request, index)
            prefix = self.pool.find(parent_id, self._hash(blocks.hashes, index, tokens), tokens)
            if prefix is None:
                break
            hits.append(prefix.block_ids[0])
            parent_id = prefix.prefix_id
        return hits, len(hits) * self.block_size

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        new_computed_blocks: Sequence[int] = (),
        num_lookahead_tokens: int = 0,
    ) -> list[int] | None:
        """Makes room for `num_new_tokens` after the request's computed tokens and the hits, and for the look-ahead.

        Returns the block ids added to the request, the hits first; None, with nothing changed, when blocks are short.
        `new_computed_blocks` (from `get_computed_blocks`) is only for a request that owns no block yet.
        """
        blocks = self._requests.get(request.request_id) or _RequestBlocks()
        if new_computed_blocks and blocks.block_ids:
            raise ValueError(f"request {request.request_id!r} owns blocks already and can't take a prefix-cache hit")
        num_computed = request.num_computed_tokens
        end, owned = num_computed + num_new_tokens, len(blocks.block_ids) * self.block_size
        if end + num_lookahead_tokens <= owned and end < (blocks.num_published + 1) * self.block_size:
            return []  # what nearly every decode of nearly every step needs
        num_computed += len(new_computed_blocks) * self.block_size
        num_slots = num_computed + num_new_tokens + num_lookahead_tokens
        num_needed = max(0, -(-num_slots // self.block_size) - len(blocks.block_ids) - len(new_computed_blocks))
        num_idle_hits = sum(self.pool.blocks[i].ref_cnt == 0 for i in new_computed_blocks)
        if num_needed > self.pool.num_free_blocks - num_idle_hits:
            return None
        if not blocks.block_ids:
            self._requests[request.request_id] = blocks
            blocks.num_published = len(new_computed_blocks)
            hit = self.pool.blocks[new_computed_blocks[-1]].prefix if new_computed_blocks else None
            blocks.prefix_id = hit.prefix_id if hit else ROOT_PREFIX_ID
            if self.enable_caching:
                self.pool.prefix_queries += request.num_tokens
                self.pool.prefix_hits += len(new_computed_blocks) * self.block_size
        self.pool.touch(new_computed_blocks)
        added = [*new_computed_blocks, *self.pool.allocate(num_needed)]
        blocks.block_ids += added
        if self.enable_caching:
            self._publish(request, blocks, min(num_computed + num_new_tokens, request.num_tokens) // self.block_size)
        return added

    def add_blocks(self, request_ids: Iterable[str], counts: Sequence[int]) -> list[list[int]] | None:
        """Gives each of the requests, which own blocks already, as many more as `counts` says, in this order.

        Returns the block ids of each; None, with nothing changed, when blocks are short for all of them together.
        """
        total = sum(counts)
        if total > self.pool.num_free_blocks:
            return None
        block_ids, begin, added = self.pool.allocate(total), 0, []
        for request_id, count in zip(request_ids, counts, strict=True):
            own = block_ids[begin : begin + count]
            self._requests[request_id].block_ids += own
            added.append(own)
            begin += count
        return added

    def cache_blocks(self, request: Request) -> None:
        """Publishes the full blocks whose tokens have become known since their slots were given."""
        blocks = self._requests.get(request.request_id)
        if blocks is not None and self.enable_caching:
            self._publish(request, blocks, min(request.num_computed_tokens, request.num_tokens) // self.block_size)

    def publish(self, requests: Sequence[Request], num_full: Sequence[int], last: Iterable[bytes | None]) -> None:
        """Publishes the first blocks of each request, so many of them, as far as they aren't yet: all their tokens are
        known, and computed, or being computed by a step that is launched before any that could read them. `last`: what
        `Request.token_bytes` gives for the last of these blocks, where it is at hand."""
        if self.enable_caching:
            for request, count, tokens in zip(requests, num_full, last, strict=False):
                self._publish(request, self._requests[request.request_id], count, tokens)

    def free(self, request_id: str) -> None:
        """Gives the request's blocks back, the last first: a prefix is evicted from its end. Ignores unknown ids."""
        blocks = self._requests.pop(request_id, None)
        if blocks is not None:
            self.pool.release(reversed(blocks.block_ids))

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached content. False, and nothing is changed, while any request owns a block."""
        return self.pool.reset_prefix_cache()

    def reset(self) -> None:
        """Takes every block back and forgets all cached content, in whatever state the books are."""
        pool = BlockPool(self.pool.num_blocks)
        pool.prefix_queries, pool.prefix_hits = self.pool.prefix_queries, self.pool.prefix_hits
        self.pool = pool
        self._requests.clear()

    def pool_view(self) -> PoolView:
        """A frozen copy of the pool, with owners, for the views."""
        owners: dict[int, list[str]] = {}
        for request_id, blocks in self._requests.items():
            for block_id in blocks.block_ids:
                owners.setdefault(block_id, []).append(request_id)
        views = []
        for block in self.pool.blocks:
            block_hash = block.prefix.block_hash.hex()[:8] if block.prefix else None
            views.append(BlockView(block.block_id, block.ref_cnt, tuple(owners.get(block.block_id, ())), block_hash))
        return PoolView(
            block_size=self.block_size,
            blocks=tuple(views),
            free=self.pool.free_block_ids(),
            prefix_queries=self.pool.prefix_queries,
            prefix_hits=self.pool.prefix_hits,
        )

    def check_integrity(self) -> None:
        """Raises AssertionError, naming the block, if the books don't balance."""
        self.pool.check_integrity({rid: blocks.block_ids for rid, blocks in self._requests.items()}, self.block_size)
        for request_id, blocks in self._requests.items():
            parent_id = ROOT_PREFIX_ID
            for index, block_id in enumerate(blocks.block_ids):
                what = f"block {block_id} of request {request_id!r}: "
                prefix = self.pool.blocks[block_id].prefix
                published = prefix is not None
                assert published == (index < blocks.num_published), what + f"published: {published}, against the books"
                if prefix is not None:
                    assert prefix.parent_id == parent_id, what + "published under another parent"
                    assert prefix.block_hash == blocks.hashes[index], what + "published under another hash"
                    parent_id = prefix.prefix_id
            assert blocks.prefix_id == parent_id, f"request {request_id!r} would publish under another parent"

    def _publish(
        self, request: Request, blocks: _RequestBlocks, num_full: int, last_tokens: bytes | None = None
    ) -> None:
        for index in range(blocks.num_published, num_full):
            tokens = last_tokens if last_tokens and index == num_full - 1 else self._tokens(request, index)
            block_hash = self._hash(blocks.hashes, index, tokens)
            blocks.prefix_id = self.pool.publish(blocks.block_ids[index], blocks.prefix_id, block_hash, tokens)
            blocks.num_published = index + 1

    def _hash(self, hashes: list[bytes], index: int, tokens: bytes) -> bytes:
        """The hash of block `index`, kept in `hashes`; each is computed once, in order."""
        if index == len(hashes):
            hashes.append(self._hash_function(hashes[-1] if index else b"", tokens))
        return hashes[index]

    def _tokens(self, request: Request, index: int) -> bytes:
        """The tokens of block `index`."""
        return request.token_bytes(index * self.block_size, (index + 1) * self.block_size)
