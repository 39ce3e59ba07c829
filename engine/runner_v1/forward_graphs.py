"""What runner V1 captures: forwards, and behind them what a drafter on the device does. The host makes their inputs and
launches the sampler between the two piece by piece, so a step can't be one graph.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from ..attention import AttentionMetadata
from ..config import EngineConfig
from ..device import Device
from ..graphs import make_graph_pool

Work = Callable[[], torch.Tensor]
Padding = Callable[[int, int], Work]
"""Makes the work of so many requests with so many tokens of which none is there: it may run at any time."""


class ForwardSize(NamedTuple):
    num_reqs: int
    num_tokens: int


class ForwardGraphs:
    """For batches of decodes, and for those in which every request has up to `num_drafts` drafts. None on a CPU and
    with enforce_eager."""

    def __init__(self, config: EngineConfig, device: Device, num_drafts: int) -> None:
        self._device, self._num_drafts = device, num_drafts
        self._pool, self._drafts = (None if config.enforce_eager else make_graph_pool(device.compute) for _ in range(2))
        most = config.max_num_seqs or 0, config.max_num_batched_tokens
        every = (ForwardSize(n, n * each) for n in config.cudagraph_capture_sizes for each in {1, 1 + num_drafts})
        self.sizes = sorted(size for size in every if size.num_reqs <= most[0] and size.num_tokens <= most[1])
        self.seconds = 0.0
        """How long capturing took."""

    def capture(self, padding_forward: Padding, padding_drafts: Padding | None = None) -> None:
        """Waits for the device: called before the first step. `padding_drafts`: of a drafter on the device, if there is
        one."""
        if self._pool is None or self._drafts is None:
            return
        begin = time.monotonic()
        # The largest first: the smaller ones fit into its memory.
        largest_first = sorted(self.sizes, key=lambda size: size.num_tokens, reverse=True)
        for size in largest_first:
            self._pool.capture(size, partial(padding_forward, *size))
        if padding_drafts is not None:
            for size in largest_first:
                self._drafts.capture(size, partial(padding_drafts, *size))
        self._device.drain()
        self.seconds = time.monotonic() - begin

    def find(self, metadata: AttentionMetadata) -> ForwardSize | None:
        """The smallest captured batch that holds this one; None for one with prompts, or if there is none."""
        # A captured forward stores a token's keys in the launch that reads those of others.
        if self._pool is None or metadata.has_admitted or metadata.max_query_len > 1 + self._num_drafts:
            return None
        each = 1 if metadata.num_tokens == metadata.num_reqs else 1 + self._num_drafts
        enough = (size for size in self.sizes if size.num_reqs >= metadata.num_reqs)
        return next((size for size in enough if size.num_tokens == size.num_reqs * each), None)

    def replay(self, size: ForwardSize) -> torch.Tensor:
        """Called on the stream: hidden states [num_tokens, d], until the next replay of this size."""
        assert self._pool is not None
        hidden: torch.Tensor = self._pool.replay(size)
        return hidden

    def replay_drafts(self, size: ForwardSize) -> torch.Tensor:
        """Called on the stream behind the forward of this size: drafts i64 [num_reqs, N], until the next replay."""
        assert self._drafts is not None
        drafts: torch.Tensor = self._drafts.replay(size)
        return drafts
