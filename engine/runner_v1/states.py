"""Runner V1's requests: a backup of each, and which of them have a row of the batch.

A preempted request loses its row and keeps its backup, from which it gets another row later. All of it is done by host
loops, as in vLLM's V1.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import torch

from ..device import Device
from ..hooks import Hooks, RowFreed, RowMoved, RowWritten
from ..models.model_state import ModelState
from ..sampling_params import SamplingParams
from ..sched_output import CachedRequestData, NewRequestData, SchedulerOutput
from .input_batch import CachedRequestState, InputBatch


class RequestStates:
    """`requests` are the backups by id. `update` and `finish` move rows of `batch`."""

    def __init__(self, batch: InputBatch, model_state: ModelState, hooks: Hooks) -> None:
        self.requests: dict[str, CachedRequestState] = {}
        self._batch = batch
        self._model_state = model_state
        self._hooks = hooks

    def update(self, scheduler_output: SchedulerOutput) -> None:
        """Drops, adds and moves rows until they are those of the step's requests, decodes first."""
        batch, cached = self._batch, scheduler_output.scheduled_cached_reqs
        self._drop(scheduler_output.finished_req_ids)
        kept = scheduler_output.num_scheduled_tokens.keys() - cached.resumed_req_ids
        for req_id in [r for r in batch.req_id_to_index if r not in kept]:
            self._remove_row(req_id)
        to_add = [self._cache_new(new) for new in scheduler_output.scheduled_new_reqs]
        to_add += self._update_cached(cached)
        for state in to_add:
            row = batch.add_request(state)
            if RowWritten in self._hooks.wanted:
                self._hooks.emit(RowWritten(*self._hooks.stamp(), state.req_id, row))
        self._condense()
        self._may_reorder(scheduler_output.num_scheduled_tokens)
        batch.refresh_metadata()

    def finish(self, req_ids: Iterable[str]) -> None:
        """Forgets requests that ended. The others keep their rows, or move into those that are free now."""
        self._drop(req_ids)
        self._condense()

    def append_token(self, row: int, req_id: str, token: int) -> None:
        batch = self._batch
        batch.token_ids_cpu[row, batch.num_tokens[row]] = token
        batch.num_tokens[row] += 1
        self.requests[req_id].output_token_ids.append(token)

    def _drop(self, req_ids: Iterable[str]) -> None:
        for req_id in sorted(req_ids):
            self.requests.pop(req_id, None)
            self._model_state.remove_request(req_id)
            self._remove_row(req_id)

    def _remove_row(self, req_id: str) -> None:
        row = self._batch.remove_request(req_id)
        if row is not None and RowFreed in self._hooks.wanted:
            self._hooks.emit(RowFreed(*self._hooks.stamp(), req_id, row))

    def _cache_new(self, new: NewRequestData) -> CachedRequestState:
        # Not empty only after the runner's `reset`: the request ran before.
        outputs = new.prefill_token_ids[new.num_prompt_tokens :]
        state = CachedRequestState(
            req_id=new.req_id,
            prompt_token_ids=new.prompt_token_ids,
            output_token_ids=outputs,
            block_ids=list(new.block_ids),
            num_computed_tokens=new.num_computed_tokens,
            sampling_params=new.sampling_params,
            stop_token_ids=new.stop_token_ids,
            generator=_make_generator(new.sampling_params, len(outputs), self._batch.device, self._batch.vocab_size),
        )
        self.requests[new.req_id] = state
        return state

    def _update_cached(self, cached: CachedRequestData) -> list[CachedRequestState]:
        """Brings backups and rows up to date; returns those that have no row."""
        batch, without_row = self._batch, []
        for req_id, computed in zip(cached.req_ids, cached.num_computed_tokens.tolist(), strict=True):
            block_ids = cached.new_block_ids.get(req_id, ())
            state = self.requests[req_id]
            state.num_computed_tokens = computed
            if req_id in cached.all_token_ids:
                state.output_token_ids = cached.all_token_ids[req_id][len(state.prompt_token_ids) :]
            if req_id in cached.resumed_req_ids:
                state.block_ids = list(block_ids)
            else:
                state.block_ids.extend(block_ids)
            row = batch.req_id_to_index.get(req_id)
            if row is None:
                without_row.append(state)
                continue
            batch.num_computed_tokens_cpu[row] = computed
            if block_ids:
                batch.append_blocks(row, block_ids)
        return without_row

    def _condense(self) -> None:
        for req_id, src, dst in self._batch.condense():
            self._moved(req_id, src, dst, "condense")

    def _may_reorder(self, scheduled: dict[str, int]) -> None:
        """Attention wants the decodes first: the first row that is none changes places with the last that is one."""
        batch = self._batch
        counts = [scheduled[req_id] for req_id in batch.req_ids if req_id is not None]
        low, high = 0, batch.num_reqs - 1
        while low < high:
            if counts[low] == 1:
                low += 1
            elif counts[high] > 1:
                high -= 1
            else:
                batch.swap_states(low, high)
                counts[low], counts[high] = counts[high], counts[low]
                for src, dst in ((high, low), (low, high)):
                    self._moved(batch.req_ids[dst], src, dst, "swap")

    def _moved(self, req_id: str | None, src: int, dst: int, how: Literal["condense", "swap"]) -> None:
        assert req_id is not None
        if RowMoved in self._hooks.wanted:
            self._hooks.emit(RowMoved(*self._hooks.stamp(), req_id, src, dst, how))


def _make_generator(params: SamplingParams, num_drawn: int, device: Device, vocab_size: int) -> torch.Generator | None:
    """A seeded request's own generator, behind the draws of the tokens that it has."""
    if params.seed is None or params.temperature == 0:
        return None
    generator = torch.Generator(device.torch_device).manual_seed(params.seed)
    row = torch.empty(vocab_size, device=device.torch_device)
    for _ in range(num_drawn):
        row.exponential_(generator=generator)
    return generator
