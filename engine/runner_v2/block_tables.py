"""Runner V2's block tables: a persistent one with fixed rows, and the copy gathered for a step.

R max requests, B max blocks a request, T max batched tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels import compute_slot_mappings, gather_block_tables

from ..device import Device
from ..graphs import GraphPool
from .buffers import StagedWrites
from .row_ends import RowEnds


class BlockTables:
    def __init__(
        self,
        device: Device,
        max_num_reqs: int,
        max_blocks: int,
        max_tokens: int,
        block_size: int,
        ring_depth: int,
        form: str,
    ) -> None:
        self.block_size = block_size
        rows = max_num_reqs + 1  # the last one is the padding's, and stays empty
        self._form = form
        # [R, B] i32: the truth
        self._writes = StagedWrites(device, form, {"block_table": (rows, max_blocks)})
        self.block_table = self._writes.tables["block_table"]
        # [R] i32
        self.num_blocks = RowEnds(device, self.block_table.gpu, ring_depth, form)
        # [R, B] i32: row i is batch position i; its address never changes
        self.input_block_table = device.zeros(max_num_reqs, max_blocks, dtype=torch.int32)
        # [T] i64
        self.slot_mapping = torch.full((max_tokens,), -1, dtype=torch.int64, device=device.torch_device)

    def set_block_ids(self, row: int, block_ids: list[int]) -> None:
        """Stages `block_ids` in place of the row's blocks: after a resume they are the new ones only."""
        self.block_table.stage(row, 0, block_ids)
        self.num_blocks.set(row, len(block_ids))

    def append_block_ids(self, rows: Sequence[int], block_ids: Sequence[Sequence[int]]) -> None:
        """Stages some blocks behind those of each of `rows`, which are different ones; once a step at the most."""
        if not self.num_blocks.append(rows, block_ids):
            for row, own in zip(rows, block_ids, strict=True):
                end = int(self.num_blocks.np[row])
                self.block_table.stage(row, end, own)
                self.num_blocks.set(row, end + len(own))

    def capture(self, pool: GraphPool) -> None:
        """Captures how blocks are appended. Waits for the device."""
        self.num_blocks.capture(pool)

    def apply_staged_writes(self) -> bool:
        changed = self._writes.apply("write block_table")
        return self.num_blocks.apply("write block_table") or changed

    def gather(self, idx_mapping: torch.Tensor, num_reqs_padded: int) -> None:
        """Kernel 6, called on the stream: input_block_tables[i] = block_table[idx_mapping[i]]. idx_mapping i32 [r]."""
        gather_block_tables(
            idx_mapping, self.block_table.gpu, self.num_blocks.gpu, self.input_block_table, num_reqs_padded,
            form=self._form,
        )  # fmt: skip

    def compute_slots(
        self,
        idx_mapping: torch.Tensor,
        query_start_loc: torch.Tensor,
        positions: torch.Tensor,
        num_tokens_padded: int,
    ) -> None:
        """Kernel 7, called on the stream: slot = table[row, pos // block_size] * block_size + pos % block_size; padding
        is -1. idx_mapping i32 [r], query_start_loc i32 [>= r + 1], positions i64 [T]."""
        compute_slot_mappings(
            idx_mapping, query_start_loc, positions, self.block_table.gpu, self.block_size, self.slot_mapping,
            num_tokens_padded, form=self._form,
        )  # fmt: skip
