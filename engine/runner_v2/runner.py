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

import numpy as np
import torch

from ..attention import AttentionMetadata
from ..config import EngineConfig
from ..device import Device
from ..hooks import (
    DRAFT_EVENTS,
    BlockTableGathered,
    Hooks,
    InputsPrepared,
    KernelLaunched,
    RowFreed,
    RowWritten,
    SamplingTraced,
)
from ..models import CausalLM
from ..models.model_state import ModelState
from ..sched_output import GrammarOutput, NewRequestData, SchedulerOutput
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
from .step_graphs import StepGraphs, StepSize, is_verification
from .step_work import StepWork

STEPS_IN_FLIGHT = 2
MEASURED_EAGERLY = 8
"""Requests of the largest step that is measured where none is captured."""

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
        self._measure_steps()

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
        # What a step knows of the one before: while the same objects come, nothing came or went.
        self._cached_ids: tuple[str, ...] = ()
        self._cached_rows = np.empty(0, dtype=np.int64)
        self._index_on_device: np.ndarray | None = None
        self._host_tokens = HostRing(device, rows * (num_drafts + 1) + (rows + 1) // 2, STEPS_IN_FLIGHT + 1)
        # The last two.
        self._outputs: tuple[AsyncOutput | None, AsyncOutput | None] = (None, None)
        self._drafts = AsyncDrafts(device, rows * (num_drafts + 1))
        self.graphs = StepGraphs(self)
        self.device.catch_up()
        self.graphs.capture()

    @property
    def capture_seconds(self) -> float:
        return self.graphs.seconds

    def _measure_steps(self) -> None:
        """What steps cost, for the schedules of verification that go by it."""
        if self.speculation is None:
            return
        sizes: dict[int, list[int]] = {}
        for size in self.graphs.decodes or self._measured_eagerly():
            sizes.setdefault(size.num_reqs, []).append(size.num_tokens)
        self.speculation.verification.measure(sizes, self.graphs.seconds_of, is_captured=bool(self.graphs.decodes))

    def _measured_eagerly(self) -> list[StepSize]:
        """A few sizes of which the others follow: a step that is launched piece by piece has no sizes of its own."""
        most = min(self.max_num_reqs, MEASURED_EAGERLY)
        drafts = self.num_drafts
        return [
            StepSize(num_reqs, num_reqs * (1 + n))
            for num_reqs in {1, most}
            for n in sorted({0, 1, 3, drafts})
            if n <= drafts and num_reqs * (1 + n) <= self.max_num_tokens
        ]

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
            self._launched(*self.sampler.apply_staged_writes())
        cached, states = scheduler_output.scheduled_cached_reqs, self.req_states
        if cached.req_ids is not self._cached_ids:
            rows = [states.req_id_to_index[req_id] for req_id in cached.req_ids]
            self._cached_ids, self._cached_rows = cached.req_ids, np.array(rows, dtype=np.int64)
        states.num_computed_tokens_np[self._cached_rows] = cached.num_computed_tokens
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

    def _add_request(self, new: NewRequestData) -> None:
        row = self.req_states.add_request(new)
        self.block_tables.set_block_ids(row, new.block_ids)
        self.sampler.add_request(row, new)
        self.model_state.add_request(row, new)
        if RowWritten in self.hooks.wanted:
            self.hooks.emit(RowWritten(*self.hooks.stamp(), new.req_id, row))

    def prepare_inputs(self, scheduler_output: SchedulerOutput) -> None:
        batch = self.batches.make(scheduler_output)
        graph = self.graphs.find(batch)
        if batch.index_np is not self._index_on_device:
            self.device.write("query_start_loc, idx_mapping, cu_num_logits", self.input_buffers.index, batch.index_np)
            self._index_on_device = batch.index_np
        work = self._eager_work(batch) if graph is None else self.graphs.work[graph]
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

    def _eager_work(self, batch: InputBatch) -> StepWork:
        budget = None
        if self.speculation is not None and is_verification(batch):
            budget = self.speculation.verification.budget(batch.num_reqs, batch.num_reqs)
            if batch.num_reqs + budget >= batch.num_tokens:
                budget = None
        num_tokens, padded = batch.num_tokens, batch.num_tokens_padded
        if budget is not None:
            num_tokens = padded = batch.num_reqs + budget
        metadata = self.attention_metadata(
            num_reqs=batch.num_reqs,
            num_tokens=num_tokens,
            num_tokens_padded=padded,
            query_start_loc=self._query_start_loc(budget),
            query_start_loc_np=batch.query_start_loc_np,
            seq_lens_np=self._seq_lens_np(batch),
            num_decodes=batch.num_decodes if budget is None else 0,
            has_admitted=batch.has_prefill,  # a little wider: an admitted request computes prompt tokens
        )
        num_logits = batch.num_logits if budget is None else num_tokens
        watched = self.hooks.wants(DRAFT_EVENTS)
        return self._work(batch.num_reqs, batch.num_reqs_padded, metadata, num_logits, budget, watched)

    def padding_work(self, size: StepSize) -> StepWork:
        """A step of `size` requests of which none is there: it may run at any time and changes nothing."""
        num_reqs, num_tokens, is_mixed = size
        whole = num_reqs * (1 + self.num_drafts)
        num_logits = min(num_tokens, whole) if is_mixed else num_tokens
        budget = None if is_mixed or num_tokens == whole else num_tokens - num_reqs
        self.input_buffers.idx_mapping.fill_(self.req_states.padding_row)
        self.input_buffers.query_start_loc.zero_()
        self.input_buffers.cu_num_logits.copy_(self.arange)
        self._index_on_device = None
        longest = -(-num_tokens // num_reqs)
        metadata = self.attention_metadata(
            num_reqs=num_reqs,
            num_tokens=num_tokens,
            num_tokens_padded=num_tokens,
            query_start_loc=self._query_start_loc(budget),
            query_start_loc_np=np.minimum(np.arange(num_reqs + 1, dtype=np.int32) * longest, num_tokens),
            seq_lens_np=np.full(num_reqs, self.config.max_model_len, dtype=np.int32),
            num_decodes=num_reqs if num_tokens == num_reqs and not is_mixed else 0,
            has_admitted=is_mixed,
            max_query_len=None if is_mixed else 1 + self.num_drafts,
        )
        return self._work(num_reqs, num_reqs, metadata, num_logits, budget)

    def _work(
        self, num_reqs: int, num_reqs_padded: int, metadata: AttentionMetadata, num_logits: int, budget: int | None,
        watched: bool = False,
    ) -> StepWork:  # fmt: skip
        idx_mapping = self.input_buffers.idx_mapping[:num_reqs]
        padded = (num_reqs_padded, metadata.num_tokens_padded)
        if self.speculation is None:
            return StepWork(self, idx_mapping, *padded, metadata)
        return DraftedWork(
            self, idx_mapping, *padded, metadata, self.speculation, num_logits=num_logits, budget=budget,
            watched=watched,
        )  # fmt: skip

    def _query_start_loc(self, budget: int | None) -> torch.Tensor:
        """i32 [R + 1]: the host's, or what the device makes of it under a budget."""
        if budget is None or self.speculation is None:
            return self.input_buffers.query_start_loc
        return self.speculation.verification.query_start_loc

    def attention_metadata(
        self,
        *,
        num_reqs: int,
        num_tokens: int,
        num_tokens_padded: int,
        query_start_loc: torch.Tensor,
        query_start_loc_np: np.ndarray,
        seq_lens_np: np.ndarray,
        num_decodes: int,
        has_admitted: bool = False,
        max_query_len: int | None = None,
    ) -> AttentionMetadata:
        return self.model_state.prepare_attn(
            num_reqs=num_reqs,
            num_tokens=num_tokens,
            num_tokens_padded=num_tokens_padded,
            query_start_loc=query_start_loc,
            query_start_loc_np=query_start_loc_np,
            seq_lens=self.input_buffers.seq_lens,
            seq_lens_np=seq_lens_np,
            block_table=self.block_tables.input_block_table,
            slot_mapping=self.block_tables.slot_mapping[:num_tokens_padded],
            num_decodes=num_decodes,
            has_admitted=has_admitted,
            max_query_len=max_query_len,
        )

    def _seq_lens_np(self, batch: InputBatch) -> np.ndarray:
        """i32 [r]: an upper bound of the device's seq_lens, until the next step's `update_states`."""
        return self.req_states.num_computed_tokens_np[batch.idx_mapping_np] + batch.num_scheduled_tokens

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
            None if self.speculation is None else self.speculation.verification.observer(),
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
