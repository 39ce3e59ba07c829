"""Runner V1's persistent batch: dense rows that are themselves the model's input, and the backup of each request.

R max requests, L max model length, B max blocks a request. Rows 0..r-1 are always occupied when a step runs, so a
finished request leaves a hole that `condense` fills by moving the last row, and attention that wants decodes first
swaps rows. Every per-row column is named once, in `_row_columns`, so that no move forgets one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from ..device import Device
from ..sampling_params import SamplingParams
from .sampling_metadata import SamplingMetadata, make_sampling_metadata


@dataclass(eq=False)
class CachedRequestState:
    """A request outside the batch's rows: it survives when the row is taken away."""

    req_id: str
    prompt_token_ids: list[int]
    output_token_ids: list[int]
    """-1 is a placeholder for a token that only the device knows (overlapped loop)."""
    block_ids: list[int]
    num_computed_tokens: int
    sampling_params: SamplingParams
    stop_token_ids: frozenset[int]
    generator: torch.Generator | None

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)


class CpuGpuBuffer:
    """A host tensor (pinned on CUDA), its numpy view and the device's copy. `copy_to_gpu` queues the copy: the host
    must not write the buffer again before that copy has ended."""

    def __init__(self, device: Device, *shape: int, dtype: torch.dtype) -> None:
        self._device = device
        self.cpu = device.empty_host(shape, dtype)
        self.np = self.cpu.numpy()
        self.gpu = device.zeros(*shape, dtype=dtype)

    def copy_to_gpu(self, n: int) -> None:
        self._device.compute.submit("copy inputs", lambda: self.gpu[:n].copy_(self.cpu[:n], non_blocking=True))


@dataclass(eq=False)
class InputBatch:
    device: Device
    max_num_reqs: int
    max_model_len: int
    max_blocks: int
    vocab_size: int
    req_ids: list[str | None] = field(default_factory=list)
    req_id_to_index: dict[str, int] = field(default_factory=dict)
    generators: dict[int, torch.Generator] = field(default_factory=dict)
    params: dict[int, SamplingParams] = field(default_factory=dict)
    stop_ids: dict[int, frozenset[int]] = field(default_factory=dict)
    changed: bool = True

    def __post_init__(self) -> None:
        rows = self.max_num_reqs
        # Never sent as a whole, so not pinned: [R, L] i32
        self.token_ids_cpu_tensor = torch.zeros(rows, self.max_model_len, dtype=torch.int32)
        self.token_ids_cpu = self.token_ids_cpu_tensor.numpy()
        self.num_tokens = np.zeros(rows, dtype=np.int32)
        self.num_prompt_tokens = np.zeros(rows, dtype=np.int32)
        self.num_computed_tokens_cpu = np.zeros(rows, dtype=np.int32)
        self.block_table = CpuGpuBuffer(self.device, rows, self.max_blocks, dtype=torch.int32)
        self.num_blocks = np.zeros(rows, dtype=np.int32)
        self.temperature = CpuGpuBuffer(self.device, rows, dtype=torch.float32)
        self.top_p = CpuGpuBuffer(self.device, rows, dtype=torch.float32)
        self.top_k = CpuGpuBuffer(self.device, rows, dtype=torch.int32)
        self.min_p = CpuGpuBuffer(self.device, rows, dtype=torch.float32)
        self.presence_penalties = CpuGpuBuffer(self.device, rows, dtype=torch.float32)
        self.frequency_penalties = CpuGpuBuffer(self.device, rows, dtype=torch.float32)
        self.repetition_penalties = CpuGpuBuffer(self.device, rows, dtype=torch.float32)
        self.greedy_reqs: set[str] = set()
        self.random_reqs: set[str] = set()
        self.top_p_reqs: set[str] = set()
        self.top_k_reqs: set[str] = set()
        self.min_p_reqs: set[str] = set()
        # Requests whose sampling looks at the tokens of their output.
        self.penalties_reqs: set[str] = set()
        self.bad_words_reqs: set[str] = set()
        self.processors_reqs: set[str] = set()
        self.sampling_metadata: SamplingMetadata | None = None

    @property
    def num_reqs(self) -> int:
        return len(self.req_id_to_index)

    def _row_columns(self) -> tuple[np.ndarray, ...]:
        """Every array with one entry a row, the wide ones first."""
        return (
            self.token_ids_cpu, self.block_table.np, self.num_tokens, self.num_prompt_tokens,
            self.num_computed_tokens_cpu, self.num_blocks,
            self.temperature.np, self.top_p.np, self.top_k.np, self.min_p.np,
            self.presence_penalties.np, self.frequency_penalties.np, self.repetition_penalties.np,
        )  # fmt: skip

    def _row_dicts(self) -> tuple[dict, ...]:
        return (self.generators, self.params, self.stop_ids)

    def row_sets(self) -> tuple[set[str], ...]:
        return (
            self.greedy_reqs, self.random_reqs, self.top_p_reqs, self.top_k_reqs, self.min_p_reqs,
            self.penalties_reqs, self.bad_words_reqs, self.processors_reqs,
        )  # fmt: skip

    @property
    def needs_output_tokens(self) -> bool:
        """Some row's sampling looks at the tokens of its output, so the host must know them."""
        return bool(self.penalties_reqs or self.bad_words_reqs or self.processors_reqs)

    def add_request(self, state: CachedRequestState) -> int:
        """Puts a request into the smallest empty row and returns it."""
        holes = (row for row, req_id in enumerate(self.req_ids) if req_id is None)
        row = next(holes, len(self.req_ids))
        if row == len(self.req_ids):
            self.req_ids.append(state.req_id)
        else:
            self.req_ids[row] = state.req_id
        self.req_id_to_index[state.req_id] = row
        tokens = state.prompt_token_ids + state.output_token_ids
        self.token_ids_cpu[row, : len(tokens)] = tokens
        self.num_tokens[row] = len(tokens)
        self.num_prompt_tokens[row] = len(state.prompt_token_ids)
        self.num_computed_tokens_cpu[row] = state.num_computed_tokens
        self.num_blocks[row] = 0
        self.append_blocks(row, state.block_ids)
        self._add_sampling(row, state)
        self.changed = True
        return row

    def _add_sampling(self, row: int, state: CachedRequestState) -> None:
        params = state.sampling_params
        self.params[row] = params
        self.stop_ids[row] = state.stop_token_ids
        self.temperature.np[row] = params.temperature
        self.top_p.np[row] = params.top_p
        self.top_k.np[row] = params.top_k if params.top_k > 0 else self.vocab_size
        self.min_p.np[row] = params.min_p
        self.presence_penalties.np[row] = params.presence_penalty
        self.frequency_penalties.np[row] = params.frequency_penalty
        self.repetition_penalties.np[row] = params.repetition_penalty
        (self.greedy_reqs if params.temperature == 0 else self.random_reqs).add(state.req_id)
        if params.top_p < 1:
            self.top_p_reqs.add(state.req_id)
        if params.top_k > 0:
            self.top_k_reqs.add(state.req_id)
        if params.min_p > 0:
            self.min_p_reqs.add(state.req_id)
        if params.uses_penalties:
            self.penalties_reqs.add(state.req_id)
        if params.bad_words_token_ids:
            self.bad_words_reqs.add(state.req_id)
        if params.logits_processors:
            self.processors_reqs.add(state.req_id)
        if state.generator is not None:
            self.generators[row] = state.generator

    def append_blocks(self, row: int, block_ids: list[int]) -> None:
        start = self.num_blocks[row]
        self.block_table.np[row, start : start + len(block_ids)] = block_ids
        self.num_blocks[row] = start + len(block_ids)

    def remove_request(self, req_id: str) -> int | None:
        """Leaves a hole in the request's row and returns it; `condense` must follow. None if it has no row."""
        row = self.req_id_to_index.pop(req_id, None)
        if row is None:
            return None
        self.req_ids[row] = None
        for column in self._row_dicts():
            column.pop(row, None)
        for members in self.row_sets():
            members.discard(req_id)
        self.changed = True
        return row

    def condense(self) -> list[tuple[str, int, int]]:
        """Fills each hole, the smallest first, with the highest occupied row. Returns the moves (request, from, to)."""
        moves = []
        while self.req_ids and self.req_ids[-1] is None:
            self.req_ids.pop()
        for hole in range(len(self.req_ids)):
            if hole >= len(self.req_ids):
                break
            if self.req_ids[hole] is not None:
                continue
            last = len(self.req_ids) - 1
            req_id = self.req_ids[last]
            assert req_id is not None
            self._move_row(last, hole)
            moves.append((req_id, last, hole))
            while self.req_ids and self.req_ids[-1] is None:
                self.req_ids.pop()
        return moves

    def _move_row(self, src: int, dst: int) -> None:
        req_id = self.req_ids[src]
        assert req_id is not None
        used = self.num_tokens[src]
        self.token_ids_cpu[dst, :used] = self.token_ids_cpu[src, :used]
        for column in self._row_columns()[1:]:
            column[dst] = column[src]
        for mapping in self._row_dicts():
            if src in mapping:
                mapping[dst] = mapping.pop(src)
        self.req_ids[dst], self.req_ids[src] = req_id, None
        self.req_id_to_index[req_id] = dst
        self.changed = True

    def swap_states(self, a: int, b: int) -> None:
        """Exchanges two occupied rows, every column of them."""
        for column in self._row_columns():
            # A fancy index copies the right side first; `x[a], x[b] = x[b], x[a]` on views would leave both rows equal.
            column[[a, b]] = column[[b, a]]
        for mapping in self._row_dicts():
            value_a, value_b = mapping.pop(a, None), mapping.pop(b, None)
            if value_b is not None:
                mapping[a] = value_b
            if value_a is not None:
                mapping[b] = value_a
        self.req_ids[a], self.req_ids[b] = self.req_ids[b], self.req_ids[a]
        for row in (a, b):
            req_id = self.req_ids[row]
            assert req_id is not None
            self.req_id_to_index[req_id] = row
        self.changed = True

    def refresh_metadata(self) -> None:
        """Sends the sampling slices again if rows changed."""
        if not self.changed and self.sampling_metadata is not None:
            return
        self.changed = False
        self.sampling_metadata = make_sampling_metadata(self)
