"""Model runner V2: a state table with fixed rows, inputs gathered on the device, no host wait inside a step.

Contract of this file: only what every model and every request needs. A feature of sampling lives in sample/, what is
particular to a model family in its ModelState. No line here may read a device tensor on the host; what a step
computes is handed on in holders that only submitted work reads. The number in a comment is the kernel's in vLLM's
table (ARCHITECTURE.md).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from kernels import (
    combine_sampled_and_draft_tokens,
    get_num_sampled_and_rejected,
    post_update,
    prepare_pos_seq_lens,
    prepare_prefill_inputs,
)

from ..attention import AttentionMetadata
from ..config import EngineConfig
from ..device import Device
from ..hooks import BlockTableGathered, Hooks, InputsPrepared, KernelLaunched, RowFreed, RowWritten
from ..models import CausalLM
from ..models.model_state import ModelState
from ..sched_output import NewRequestData, SchedulerOutput
from .async_output import AsyncOutput
from .block_tables import BlockTables
from .input_batch import InputBatch, InputBuffers, choose_descriptor
from .sample import Sampler
from .sample.states import SamplingStates
from .states import RequestState

STEPS_IN_FLIGHT = 2

MADE_BY = {
    "input_ids": "kernels prepare_prefill_inputs, combine_sampled_and_draft_tokens",
    "positions": "kernel prepare_pos_seq_lens",
    "query_start_loc": "host, fresh copy",
    "seq_lens": "kernel prepare_pos_seq_lens",
    "slot_mapping": "kernel compute_slot_mappings",
    "logits_indices": "kernel combine_sampled_and_draft_tokens",
}


@dataclass
class DeviceValues:
    """What a step computes on the device. Written and read by submitted work only."""

    logits_indices: torch.Tensor | None = None
    hidden: torch.Tensor | None = None
    output: dict[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class ExecuteModelState:
    """What `execute_model` leaves for `sample_tokens`."""

    batch: InputBatch
    metadata: AttentionMetadata
    values: DeviceValues


class ModelRunnerV2:
    name = "v2"

    def __init__(
        self,
        config: EngineConfig,
        model: CausalLM,
        model_state: ModelState,
        kv_cache: torch.Tensor,
        device: Device,
        hooks: Hooks,
    ) -> None:
        assert config.max_num_seqs is not None and config.max_model_len is not None
        self.config = config
        self.model = model
        self.model_state = model_state
        self.kv_cache = kv_cache
        self.device = device
        self.hooks = hooks
        self.form = config.kernel_backend
        self.max_num_reqs = config.max_num_seqs
        self.max_num_tokens = config.max_num_batched_tokens
        self.reset()

    def reset(self) -> None:
        """An empty state table, whatever was in it: at the start, and after a step that failed."""
        config, device, form = self.config, self.device, self.form
        assert config.max_model_len is not None
        rows, tokens = self.max_num_reqs, self.max_num_tokens
        max_blocks = -(-config.max_model_len // config.block_size)
        self.req_states = RequestState(device, rows, config.max_model_len, STEPS_IN_FLIGHT, form)
        self.block_tables = BlockTables(device, rows, max_blocks, tokens, config.block_size, STEPS_IN_FLIGHT, form)
        self.input_buffers = InputBuffers(device, rows, tokens)
        self.sampling_states = SamplingStates(
            device, rows, self.model.config.vocab_size, config.seed, STEPS_IN_FLIGHT, form
        )
        self.sampler = Sampler(self.sampling_states, form)
        # cu_num_logits without drafts: one row a request, so a prefix of 0..R.
        self._arange = device.to_device(np.arange(rows + 1, dtype=np.int32))
        self.last_batch: InputBatch | None = None
        self.last_values: DeviceValues | None = None
        self._state: ExecuteModelState | None = None

    # -- one step ------------------------------------------------------------------------------------------------------

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        """State, inputs and forward of one step; `sample_tokens` must follow."""
        self.update_states(scheduler_output)
        self.prepare_inputs(scheduler_output)
        self.forward()

    def update_states(self, scheduler_output: SchedulerOutput) -> None:
        self.finish_requests(scheduler_output)
        for new in scheduler_output.scheduled_new_reqs:
            self._add_request(new)
        if scheduler_output.scheduled_new_reqs:
            self._launched(*self.req_states.apply_staged_writes())
            self.model_state.apply_staged_writes()
            if self.sampling_states.apply_staged_writes():
                self._launched("write stop_token_ids")
        cached = scheduler_output.scheduled_cached_reqs
        for req_id, block_ids, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            row = self.req_states.req_id_to_index[req_id]
            self.req_states.num_computed_tokens_np[row] = computed
            if block_ids:
                self.block_tables.append_block_ids(row, block_ids, overwrite=False)
        if self.block_tables.apply_staged_writes():
            self._launched("write block_table")

    def finish_requests(self, scheduler_output: SchedulerOutput) -> None:
        """Frees the rows of requests that ended or were preempted; all that a step without tokens does."""
        for req_id in sorted(scheduler_output.finished_req_ids | scheduler_output.preempted_req_ids):
            self._remove_request(req_id)

    def _remove_request(self, req_id: str) -> None:
        row = self.req_states.remove_request(req_id)
        if row is None:
            return
        self.model_state.remove_request(req_id)
        if self.hooks.active:
            self.hooks.emit(RowFreed(*self.hooks.stamp(), req_id, row))

    def _add_request(self, new: NewRequestData) -> None:
        row = self.req_states.add_request(new)
        self.block_tables.append_block_ids(row, new.block_ids, overwrite=True)
        self.sampling_states.add_request(
            row, new.sampling_params, new.num_prompt_tokens, new.stop_token_ids, new.request_seed_index
        )
        self.model_state.add_request(row, new)
        if self.hooks.active:
            self.hooks.emit(RowWritten(*self.hooks.stamp(), new.req_id, row))

    def prepare_inputs(self, scheduler_output: SchedulerOutput) -> None:
        batch = self._make_batch(scheduler_output)
        values = DeviceValues()
        self._gather_inputs(batch, values)
        self.block_tables.gather(batch.idx_mapping, batch.num_reqs_padded)  # 6
        self.block_tables.compute_slots(
            batch.idx_mapping, self.input_buffers.query_start_loc, self.input_buffers.positions, batch.num_tokens_padded
        )  # 7
        self._launched("gather_block_tables", "compute_slot_mappings")
        metadata = self.model_state.prepare_attn(
            num_reqs=batch.num_reqs,
            num_tokens=batch.num_tokens,
            num_tokens_padded=batch.num_tokens_padded,
            query_start_loc=self.input_buffers.query_start_loc,
            query_start_loc_np=batch.query_start_loc_np,
            seq_lens=self.input_buffers.seq_lens,
            seq_lens_np=batch.seq_lens_np,
            block_table=self.block_tables.input_block_table,
            slot_mapping=self.block_tables.slot_mapping[: batch.num_tokens_padded],
            num_decodes=batch.num_decodes,
        )
        self._state = ExecuteModelState(batch, metadata, values)
        self.last_batch, self.last_values = batch, values
        if self.hooks.active:
            rows = tuple(int(row) for row in batch.idx_mapping_np)
            self.hooks.emit(BlockTableGathered(*self.hooks.stamp(), rows))
            self.hooks.emit(
                InputsPrepared(*self.hooks.stamp(), batch.num_reqs, batch.num_tokens, batch.num_tokens_padded, MADE_BY)
            )

    def _make_batch(self, scheduler_output: SchedulerOutput) -> InputBatch:
        """The step's index, from the host's numpy mirrors alone. Sorted by scheduled tokens, so decodes come first."""
        scheduled = scheduler_output.num_scheduled_tokens
        states = self.req_states
        req_ids = tuple(sorted(scheduled, key=lambda req_id: scheduled[req_id]))
        counts = np.fromiter((scheduled[req_id] for req_id in req_ids), dtype=np.int32, count=len(req_ids))
        rows = np.fromiter((states.req_id_to_index[req_id] for req_id in req_ids), dtype=np.int32, count=len(req_ids))
        num_reqs, num_tokens = len(req_ids), int(counts.sum())
        size = choose_descriptor(
            num_reqs, num_tokens, self.config.cudagraph_capture_sizes, self.max_num_reqs, self.max_num_tokens
        )
        query_start_loc = np.full(self.max_num_reqs + 1, num_tokens, dtype=np.int32)
        query_start_loc[0] = 0
        np.cumsum(counts, out=query_start_loc[1 : num_reqs + 1])
        computed = states.num_computed_tokens_np[rows]
        prefill_len = states.prefill_len.np[rows]
        seq_lens = computed + counts
        return InputBatch(
            req_ids=req_ids,
            idx_mapping=self.device.to_device(rows),
            idx_mapping_np=rows,
            num_scheduled_tokens=counts,
            query_start_loc_np=query_start_loc,
            seq_lens_np=seq_lens,
            is_prefilling_np=seq_lens < prefill_len,
            num_tokens=num_tokens,
            num_tokens_padded=size.num_tokens,
            num_reqs_padded=size.num_reqs,
            num_decodes=int((counts == 1).sum()),
            has_prefill=bool((computed < prefill_len).any()),
            cu_num_logits=self._arange[: num_reqs + 1],
        )

    def _gather_inputs(self, batch: InputBatch, values: DeviceValues) -> None:
        """Kernels 2, 3 and 4: the flat input of the model, from the state table."""
        compute, states, buffers = self.device.compute, self.req_states, self.input_buffers
        # Bound now: publishing in a later step gives these tables another snapshot.
        prefill_len = states.prefill_len.gpu
        compute.submit(
            "query_start_loc", buffers.query_start_loc.copy_, self.device.to_device(batch.query_start_loc_np)
        )
        if batch.has_prefill:
            compute.submit(
                "prepare_prefill_inputs",
                lambda: prepare_prefill_inputs(
                    buffers.input_ids, states.next_prefill_tokens, batch.idx_mapping, buffers.query_start_loc,
                    states.all_token_ids.gpu, prefill_len, states.num_computed_tokens.gpu, form=self.form,
                ),
            )  # fmt: skip
            self._launched("prepare_prefill_inputs")
        compute.submit(
            "prepare_pos_seq_lens",
            lambda: prepare_pos_seq_lens(
                batch.idx_mapping, buffers.query_start_loc, states.num_computed_tokens.gpu, buffers.positions,
                buffers.seq_lens, form=self.form,
            ),
        )  # fmt: skip

        def combine() -> None:
            values.logits_indices = combine_sampled_and_draft_tokens(
                buffers.input_ids, batch.idx_mapping, states.last_sampled_tokens, buffers.query_start_loc,
                buffers.seq_lens, prefill_len, states.draft_tokens, batch.cu_num_logits, batch.num_reqs, form=self.form,
            )  # fmt: skip

        compute.submit("combine_sampled_and_draft_tokens", combine)
        self._launched("prepare_pos_seq_lens", "combine_sampled_and_draft_tokens")

    def forward(self) -> None:
        assert self._state is not None, "forward: prepare_inputs comes first"
        batch, metadata, values = self._state.batch, self._state.metadata, self._state.values
        padded = batch.num_tokens_padded
        inputs = self.model_state.prepare_inputs(
            self.input_buffers.input_ids[:padded], self.input_buffers.positions[:padded]
        )

        def run() -> None:
            values.hidden = self.model(**inputs, metadata=metadata, kv_cache=self.kv_cache)

        self.device.compute.submit("forward", run)
        self._launched("forward")

    def sample_tokens(self) -> AsyncOutput:
        """Samples, starts the output's copy, then updates the state table; all of it only queued."""
        assert self._state is not None, "sample_tokens: execute_model comes first"
        batch, values = self._state.batch, self._state.values
        self._state = None
        plan = self.sampler.plan(batch.idx_mapping_np)
        buffers, states = self.input_buffers, self.req_states
        prefill_len = states.prefill_len.gpu

        def sample() -> None:
            assert values.hidden is not None and values.logits_indices is not None
            logits = self.model.compute_logits(values.hidden[values.logits_indices])
            # The token to be sampled stands one behind the token that the logits are of.
            positions = buffers.positions[values.logits_indices] + 1
            output = plan(logits, batch.idx_mapping, positions)
            num_sampled = torch.ones(batch.num_reqs, dtype=torch.int32, device=logits.device)
            values.output = {"sampled": output.sampled, "num_sampled": num_sampled}
            if output.logprobs is not None:
                values.output |= output.logprobs.as_dict()
            values.hidden = None

        num_rejected: list[torch.Tensor] = []

        def count() -> None:
            num_rejected.append(
                get_num_sampled_and_rejected(
                    values.output["num_sampled"], buffers.seq_lens, batch.cu_num_logits, batch.idx_mapping, prefill_len,
                    form=self.form,
                )
            )  # fmt: skip

        def update() -> None:
            post_update(
                batch.idx_mapping, states.num_computed_tokens.gpu, states.last_sampled_tokens, states.total_len.gpu,
                states.all_token_ids.gpu, values.output["sampled"], values.output["num_sampled"], num_rejected[0],
                buffers.query_start_loc, form=self.form,
            )  # fmt: skip

        compute = self.device.compute
        compute.submit("sample", sample)
        compute.submit("get_num_sampled_and_rejected", count)  # 9
        # The copy is started before the state is updated: the host waits for the tokens, nobody waits for the table.
        output = AsyncOutput(
            self.device, batch.req_ids, self.sampling_states.num_logprobs[batch.idx_mapping_np], lambda: values.output
        )
        compute.submit("post_update", update)  # 10
        self._launched("gumbel_sample", "get_num_sampled_and_rejected", "post_update")
        return output

    def _launched(self, *names: str) -> None:
        if self.hooks.active:
            for name in names:
                self.hooks.emit(KernelLaunched(*self.hooks.stamp(), name, self.form))
