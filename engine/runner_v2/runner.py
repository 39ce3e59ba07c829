"""Model runner V2: a state table with fixed rows, inputs gathered on the device, no host wait inside a step but that of
a grammar for the drafts that it has to look at.

Contract of this file: only what every model and every request needs. A feature of sampling lives in sample/, what is
particular to a model family in its ModelState. No line here may read a device tensor on the host; what a step
computes is handed on in holders that only submitted work reads. The number in a comment is the kernel's in vLLM's
table (ARCHITECTURE.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from ..config import EngineConfig
from ..device import Device
from ..hooks import BlockTableGathered, Hooks, InputsPrepared, KernelLaunched, RowFreed, RowWritten, SamplingTraced
from ..models import CausalLM
from ..models.model_state import ModelState
from ..sched_output import GrammarOutput, NewRequestData, ScheduledRows, SchedulerOutput
from ..spec_decode import SpecDecoder
from .async_drafts import AsyncDrafts
from .async_output import AsyncOutput, HostRing
from .batch_maker import BatchMaker
from .block_tables import BlockTables
from .input_batch import InputBatch, InputBuffers
from .sample import Sampler
from .sample.states import SamplingStates
from .sample.structured_outputs import GrammarBitmask
from .sample.tables import TokenTable
from .speculation import DraftedWork, Speculation, make_speculation
from .states import RequestState
from .step_costs import measure_steps
from .step_graphs import StepGraphs, StepSize
from .step_work import StepWork
from .work_making import eager_work, padding_work

STEPS_IN_FLIGHT = 2

MADE_BY = {
    "input_ids": "kernels prepare_prefill_inputs, combine_sampled_and_draft_tokens",
    "positions": "kernel prepare_pos_seq_lens",
    "query_start_loc": "host, fresh copy",
    "seq_lens": "kernel prepare_pos_seq_lens",
    "slot_mapping": "kernel compute_slot_mappings",
    "logits_indices": "kernel combine_sampled_and_draft_tokens",
}


@dataclass(frozen=True)
class ExecuteModelState:
    """What `execute_model` leaves for `sample_tokens`. `graph` is the size of the captured step that does all the work;
    it puts its output into `replayed` when it runs."""

    batch: InputBatch
    work: StepWork
    graph: StepSize | None
    replayed: dict[str, torch.Tensor] = field(default_factory=dict)


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
        decoder: SpecDecoder | None = None,
    ) -> None:
        assert config.max_num_seqs is not None and config.max_model_len is not None
        self.config = config
        self.model = model
        self.model_state = model_state
        self.kv_cache = kv_cache
        self.device = device
        self.hooks = hooks
        self.decoder = decoder
        self.form = config.kernel_backend
        self.max_num_reqs = config.max_num_seqs
        self.max_num_tokens = config.max_num_batched_tokens
        self.speculation: Speculation | None = None
        self.reset()
        measure_steps(self)

    def reset(self) -> None:
        """An empty state table, whatever was in it: at the start, and after a step that failed."""
        config, device, form = self.config, self.device, self.form
        assert config.max_model_len is not None
        rows, tokens = self.max_num_reqs, self.max_num_tokens
        max_blocks = -(-config.max_model_len // config.block_size)
        self.num_drafts = num_drafts = self.decoder.num_drafts if self.decoder is not None else 0
        self.req_states = RequestState(device, rows, config.max_model_len, STEPS_IN_FLIGHT, form, num_drafts)
        self.block_tables = BlockTables(device, rows, max_blocks, tokens, config.block_size, STEPS_IN_FLIGHT, form)
        self.input_buffers = InputBuffers(device, rows, tokens)
        self.sampling_states = SamplingStates(
            device, rows, self.model.config.vocab_size, config.seed, STEPS_IN_FLIGHT, form
        )
        states = self.req_states
        token_table = TokenTable(states.all_token_ids.gpu, states.prompt_len.gpu, states.prefill_len.gpu)
        self.sampler = Sampler(self.sampling_states, form, token_table)
        self.speculation = make_speculation(
            config, self.model, self.decoder, self.sampler, device, self.hooks, self.speculation
        )
        self.arange = device.to_device(np.arange(rows + 1, dtype=np.int32))
        self.last_batch: InputBatch | None = None
        self.last_work: StepWork | None = None
        self._state: ExecuteModelState | None = None
        verification = None if self.speculation is None else self.speculation.verification
        self.batches = BatchMaker(config, states, self.sampler, verification)
        # [R] i64: the state row of the request in each of the scheduler's rows.
        self._row_of = np.zeros(rows, dtype=np.int64)
        # The state rows of the last step's requests, i64 [r]; while the same object comes, nothing came or went.
        self._scheduled: ScheduledRows | None = None
        self._rows = self._row_of[:0]
        self._host_tokens = HostRing(device, rows * (num_drafts + 1) + (rows + 1) // 2, STEPS_IN_FLIGHT + 1)
        # The last two.
        self._outputs: tuple[AsyncOutput | None, AsyncOutput | None] = (None, None)
        self._drafts = AsyncDrafts(device, rows * (num_drafts + 1))
        self.graphs = StepGraphs(self)
        self.device.catch_up()
        self.graphs.capture(partial(padding_work, self))

    @property
    def capture_seconds(self) -> float:
        return self.graphs.seconds

    # -- one step ------------------------------------------------------------------------------------------------------

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        """State, inputs and forward of one step; `sample_tokens` must follow."""
        self.update_states(scheduler_output)
        self.prepare_inputs(scheduler_output)
        self.forward()

    def update_states(self, scheduler_output: SchedulerOutput) -> None:
        self.finish_requests(scheduler_output)
        scheduled, cached, states = scheduler_output.scheduled, scheduler_output.scheduled_cached_reqs, self.req_states
        num_cached = len(cached.req_ids)
        if scheduler_output.scheduled_new_reqs:
            new_rows = [self._add_request(new) for new in scheduler_output.scheduled_new_reqs]
            self._row_of[scheduled.rows[num_cached:]] = new_rows
            self._launched(*states.apply_staged_writes())
            self.model_state.apply_staged_writes()
            self._launched(*self.sampler.apply_staged_writes())
        if scheduled is not self._scheduled:
            self._scheduled, self._rows = scheduled, self._row_of[scheduled.rows]
        states.num_computed_tokens_np[self._rows[:num_cached]] = cached.num_computed_tokens
        if new_block_ids := cached.new_block_ids:
            rows = [states.req_id_to_index[req_id] for req_id in new_block_ids]
            self.block_tables.append_block_ids(rows, list(new_block_ids.values()))
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
        if RowFreed in self.hooks.wanted:
            self.hooks.emit(RowFreed(*self.hooks.stamp(), req_id, row))

    def _add_request(self, new: NewRequestData) -> int:
        row = self.req_states.add_request(new)
        self.block_tables.set_block_ids(row, new.block_ids)
        self.sampler.add_request(row, new)
        self.model_state.add_request(row, new)
        if RowWritten in self.hooks.wanted:
            self.hooks.emit(RowWritten(*self.hooks.stamp(), new.req_id, row))
        return row

    def prepare_inputs(self, scheduler_output: SchedulerOutput) -> None:
        batch = self.batches.make(scheduler_output.scheduled, self._rows)
        graph = self.graphs.find(batch)
        self.input_buffers.send_index(batch.index_np)
        work = eager_work(self, batch) if graph is None else self.graphs.work[graph]
        if graph is None:
            if isinstance(work, DraftedWork) and work.is_budgeted:
                self._submit(work.allot_verification)
            if batch.has_prefill:
                self._submit(work.prepare_prefill_inputs)  # 2
            self._submit(work.prepare_pos_seq_lens)  # 3
            self._submit(work.combine_sampled_and_draft_tokens)  # 4
            if batch.plan.structured_outputs and batch.num_logits > batch.num_reqs:
                assert isinstance(work, DraftedWork)
                self._drafts.start(work.input_tokens)
            self._submit(work.gather_block_tables)  # 6
            self._submit(work.compute_slot_mappings)  # 7
        self._state = ExecuteModelState(batch, work, graph)
        self.last_batch, self.last_work = batch, work
        if BlockTableGathered in self.hooks.wanted:
            self.hooks.emit(BlockTableGathered(*self.hooks.stamp(), tuple(batch.idx_mapping_np.tolist())))
        if InputsPrepared in self.hooks.wanted:
            self.hooks.emit(
                InputsPrepared(*self.hooks.stamp(), batch.num_reqs, batch.num_tokens, work.num_tokens_padded, MADE_BY)
            )

    def forward(self) -> None:
        assert self._state is not None, "forward: prepare_inputs comes first"
        work, graph, plan, replayed = self._state.work, self._state.graph, self._state.batch.plan, self._state.replayed
        if graph is None:
            self._submit(work.forward)
            return

        def replay() -> None:
            replayed.update(self.graphs.replay(graph, plan))

        before_last = self._outputs[0]
        if before_last is not None:
            # A replay writes its output where the one before the last of its size did.
            before_last.let_overwrite()
        name = f"graph of {graph}"
        self.device.compute.submit(name, replay)
        self._launched(name)

    def sample_tokens(self, grammar: GrammarOutput | None = None) -> AsyncOutput:
        """Samples, starts the output's copy, then updates the state table; all of it only queued."""
        assert self._state is not None, "sample_tokens: execute_model comes first"
        batch, work, graph, replayed = self._state.batch, self._state.work, self._state.graph, self._state.replayed
        self._state = None
        rows = batch.idx_mapping_np
        prompt_logprobs = None
        if batch.has_prefill:
            computed = self.req_states.num_computed_tokens_np[rows]
            prompt_logprobs = self.sampler.prompt_logprobs.plan(batch.req_ids, rows, batch.query_start_loc_np, computed)
        if prompt_logprobs is not None:
            self._submit(work.prompt_logprobs, prompt_logprobs)
        if graph is None:
            traced = SamplingTraced in self.hooks.wanted
            self._submit(work.sample, batch.plan, self._grammar_bitmask(batch, grammar), traced)
            self._submit(work.get_num_sampled_and_rejected)  # 9
        # The copy is started before the state is updated: the host waits for the tokens, nobody waits for the table.
        num_logprobs = self.sampling_states.num_logprobs[rows] if batch.plan.logprobs.wanted else None
        output = AsyncOutput(
            self.device, batch.req_ids, num_logprobs, batch.plan.logprobs, prompt_logprobs, self._host_tokens.next(),
            work.width, batch.cu_num_logits_np, (lambda: work.output) if graph is None else (lambda: replayed),
            None if self.speculation is None else self.speculation.verification.observer(), batch.order,
        )  # fmt: skip
        self._outputs = (self._outputs[1], output)
        if graph is None:
            self._submit(work.post_update, batch.plan)  # 10
            if isinstance(work, DraftedWork):
                self._submit(work.propose)
        return output

    def draft_token_ids(self, req_ids: Sequence[str]) -> dict[str, list[int]]:
        """Between `forward` and `sample_tokens`: the drafts that the step verifies, -1 for none, of those of `req_ids`
        that have some; all of these have a grammar. Waits for the drafts, if there are any."""
        assert self._state is not None, "draft_token_ids: execute_model comes first"
        batch = self._state.batch
        assert self._state.work.num_logits == batch.num_logits, "a batch with a grammar verifies every draft"
        ends = batch.cu_num_logits_np.tolist()
        rows = dict(zip(batch.req_ids, zip(ends, ends[1:], strict=False), strict=True))
        own = {req_id: (begin + 1, end) for req_id in req_ids for begin, end in [rows[req_id]] if end > begin + 1}
        if not own:
            return {}
        tokens = self._drafts.wait(batch.num_logits)
        return {req_id: tokens[begin:end] for req_id, (begin, end) in own.items()}

    def take_draft_token_ids(self) -> dict[str, list[int]]:
        """None: the drafts stay on the device."""
        return {}

    def _grammar_bitmask(self, batch: InputBatch, grammar: GrammarOutput | None) -> GrammarBitmask | None:
        if grammar is None:
            return None
        first = dict(zip(batch.req_ids, batch.cu_num_logits_np.tolist(), strict=False))
        return GrammarBitmask.upload(self.device, grammar.logits_rows(first), grammar.grammar_bitmask)

    def _submit(self, work: Callable[..., None], *args: object) -> None:
        name = work.__name__
        self.device.compute.submit(name, work, *args)
        self._launched(name)

    def _launched(self, *names: str) -> None:
        if KernelLaunched in self.hooks.wanted:
            for name in names:
                self.hooks.emit(KernelLaunched(*self.hooks.stamp(), name, self.form))
