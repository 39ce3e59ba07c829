"""Model runner V1: the persistent batch is the model's input.

Faithful to vLLM's V1 in structures, order and waits: dense rows, a backup of every request, pinned buffers rewritten
each step, host loops per request. Its host waits, by their letter in vLLM's list: A `prepare_inputs` (overlapped
loop: the pinned buffers are about to be rewritten; each step but the first, and of the empty steps those in which
rows leave), B `sampled tokens` (plain loop), F `output token ids` (overlapped loop, when a request's sampling looks at
its output: penalties, bad words, logits processors).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch

from ..config import EngineConfig
from ..device import Device
from ..hooks import DRAFT_EVENTS, Hooks, InputsPrepared, KernelLaunched, RowFreed, RowMoved, RowWritten, SamplingTraced
from ..models import CausalLM
from ..models.model_state import ModelState
from ..sample.logprobs import LogprobsTensors
from ..sample.prompt_logprobs import compute_prompt_logprobs
from ..sampling_params import SamplingParams
from ..sched_output import GrammarOutput, NewRequestData, SchedulerOutput
from ..spec_decode import SpecDecoder
from ..streams import Event
from .device_drafts import DeviceDrafts, Propose
from .forward_graphs import ForwardGraphs, ForwardSize
from .input_batch import CachedRequestState, CpuGpuBuffer, InputBatch
from .outputs import AsyncGPUModelRunnerOutput, OutputRows, ReadyOutput, copy_to_host
from .prompt_logprobs import PromptChunk, prompt_chunks
from .sampler import sample
from .speculation import DraftedSampling, make_speculation
from .step_sampling import make_step_sampling
from .step_values import DeviceValues, StepInputs
from .trace import sample_traced

PLACEHOLDER = -1

MADE_BY = {
    "input_ids": "host index_select from token_ids_cpu, pinned copy",
    "positions": "device, from the copied computed counts",
    "query_start_loc": "host numpy, pinned copy",
    "seq_lens": "device, from the copied computed counts",
    "slot_mapping": "device, from the copied block table",
    "logits_indices": "device, query_start_loc[1:] - 1",
}
MADE_BY_ASYNC = {**MADE_BY, "input_ids": MADE_BY["input_ids"] + ", then scatter of the last step's sampled tokens"}


class ModelRunnerV1:
    name = "v1"

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
        self.use_async_scheduling = config.async_scheduling
        self.max_num_reqs = config.max_num_seqs
        self.max_num_tokens = config.max_num_batched_tokens
        self.reset()

    def reset(self) -> None:
        """An empty batch, whatever was in it: at the start, and after a step that failed."""
        config, device = self.config, self.device
        assert config.max_model_len is not None
        r, t = self.max_num_reqs, self.max_num_tokens
        max_blocks = -(-config.max_model_len // config.block_size)
        self.requests: dict[str, CachedRequestState] = {}
        self.input_batch = InputBatch(device, r, config.max_model_len, max_blocks, self.model.config.vocab_size)
        self.input_ids = CpuGpuBuffer(device, t, dtype=torch.int32)
        self.query_start_loc = CpuGpuBuffer(device, r + 1, dtype=torch.int32)
        self.req_indices = CpuGpuBuffer(device, t, dtype=torch.int64)
        self.query_pos = CpuGpuBuffer(device, t, dtype=torch.int32)
        self.num_scheduled_tokens = CpuGpuBuffer(device, r, dtype=torch.int32)
        self.num_computed_tokens = CpuGpuBuffer(device, r, dtype=torch.int32)
        self.positions = device.zeros(t, dtype=torch.int64)
        self.seq_lens = device.zeros(r, dtype=torch.int32)
        self.slot_mapping = torch.full((t,), -1, dtype=torch.int64, device=device.torch_device)
        self.generator = torch.Generator(device.torch_device).manual_seed(config.seed)
        # Overlapped loop: the last step's tokens stay on the device, and its rows say whose they are.
        self.prev_sampled: DeviceValues | None = None
        self.prev_output: AsyncGPUModelRunnerOutput | None = None
        self.prev_req_id_to_index: dict[str, int] = {}
        self.prepare_inputs_event: Event | None = None
        self.last_inputs: StepInputs | None = None
        self._inputs: StepInputs | None = None
        self._values = DeviceValues()
        self.speculation = make_speculation(config, self.decoder, device)
        self._draft_token_ids: dict[str, list[int]] = {}
        self.graphs = ForwardGraphs(config, device, 0 if self.decoder is None else self.decoder.num_drafts)
        device.catch_up()
        self.graphs.capture(self._padding_forward)

    @property
    def capture_seconds(self) -> float:
        return self.graphs.seconds

    def _padding_forward(self, num_reqs: int, num_tokens: int) -> Callable[[], torch.Tensor]:
        """The forward of decodes, with all their drafts or without, of which none is there: it may run at any time and
        writes no cache."""
        self.slot_mapping.fill_(-1)
        self.seq_lens.zero_()
        metadata = self.model_state.prepare_attn(
            num_reqs=num_reqs,
            num_tokens=num_tokens,
            num_tokens_padded=num_tokens,
            query_start_loc=self.query_start_loc.gpu,
            query_start_loc_np=np.arange(num_reqs + 1, dtype=np.int32) * (num_tokens // num_reqs),
            seq_lens=self.seq_lens,
            seq_lens_np=np.full(num_reqs, self.config.max_model_len, dtype=np.int32),
            block_table=self.input_batch.block_table.gpu,
            slot_mapping=self.slot_mapping[:num_tokens],
            num_decodes=num_reqs if num_tokens == num_reqs else 0,
        )
        inputs = self.model_state.prepare_inputs(self.input_ids.gpu[:num_tokens], self.positions[:num_tokens])
        return partial(self.model, **inputs, metadata=metadata, kv_cache=self.kv_cache)

    # -- one step ------------------------------------------------------------------------------------------------------

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        """State, inputs and forward of one step; `sample_tokens` must follow."""
        self.update_states(scheduler_output)
        self.prepare_inputs(scheduler_output)
        self.forward()

    def update_states(self, scheduler_output: SchedulerOutput) -> None:
        self._wait_for_inputs()
        batch, cached = self.input_batch, scheduler_output.scheduled_cached_reqs
        self._drop_finished(scheduler_output)
        kept = scheduler_output.num_scheduled_tokens.keys() - cached.resumed_req_ids
        for req_id in [r for r in batch.req_id_to_index if r not in kept]:
            self._remove_row(req_id)
        to_add = [self._cache_new(new) for new in scheduler_output.scheduled_new_reqs]
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
                to_add.append(state)
                continue
            batch.num_computed_tokens_cpu[row] = computed
            if block_ids:
                batch.append_blocks(row, block_ids)
        for state in to_add:
            row = batch.add_request(state)
            if RowWritten in self.hooks.wanted:
                self.hooks.emit(RowWritten(*self.hooks.stamp(), state.req_id, row))
        self._condense()
        self._may_reorder_batch(scheduler_output.num_scheduled_tokens)
        batch.refresh_metadata()

    def _wait_for_inputs(self) -> None:
        if self.use_async_scheduling and self.prepare_inputs_event is not None:
            self.device.wait(self.prepare_inputs_event, "prepare_inputs", inside_step=True)  # A

    def finish_requests(self, scheduler_output: SchedulerOutput) -> None:
        """What a step without tokens does: forget the requests that ended. A preempted one leaves when the next step
        runs."""
        if scheduler_output.finished_req_ids:
            # Rows are about to move in buffers that a step in flight may not have copied yet.
            self._wait_for_inputs()
            self._drop_finished(scheduler_output)
            self._condense()

    def _drop_finished(self, scheduler_output: SchedulerOutput) -> None:
        for req_id in sorted(scheduler_output.finished_req_ids):
            self.requests.pop(req_id, None)
            self.model_state.remove_request(req_id)
            self._remove_row(req_id)

    def _condense(self) -> None:
        for req_id, src, dst in self.input_batch.condense():
            if RowMoved in self.hooks.wanted:
                self.hooks.emit(RowMoved(*self.hooks.stamp(), req_id, src, dst, "condense"))

    def _remove_row(self, req_id: str) -> None:
        row = self.input_batch.remove_request(req_id)
        if row is not None and RowFreed in self.hooks.wanted:
            self.hooks.emit(RowFreed(*self.hooks.stamp(), req_id, row))

    def _cache_new(self, new: NewRequestData) -> CachedRequestState:
        # Not empty only after `reset`: the request ran before.
        outputs = new.prefill_token_ids[new.num_prompt_tokens :]
        state = CachedRequestState(
            req_id=new.req_id,
            prompt_token_ids=new.prompt_token_ids,
            output_token_ids=outputs,
            block_ids=list(new.block_ids),
            num_computed_tokens=new.num_computed_tokens,
            sampling_params=new.sampling_params,
            stop_token_ids=new.stop_token_ids,
            generator=self._make_generator(new.sampling_params, len(outputs)),
        )
        self.requests[new.req_id] = state
        return state

    def _make_generator(self, params: SamplingParams, num_drawn: int) -> torch.Generator | None:
        """A seeded request's own generator, behind the draws of the tokens that it has."""
        if params.seed is None or params.temperature == 0:
            return None
        generator = torch.Generator(self.device.torch_device).manual_seed(params.seed)
        row = torch.empty(self.model.config.vocab_size, device=self.device.torch_device)
        for _ in range(num_drawn):
            row.exponential_(generator=generator)
        return generator

    def _may_reorder_batch(self, scheduled: dict[str, int]) -> None:
        """Attention wants the decodes first: the first row that is none changes places with the last that is one."""
        batch = self.input_batch
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
                if RowMoved in self.hooks.wanted:
                    for src, dst in ((high, low), (low, high)):
                        req_id = batch.req_ids[dst]
                        assert req_id is not None
                        self.hooks.emit(RowMoved(*self.hooks.stamp(), req_id, src, dst, "swap"))

    def prepare_inputs(self, scheduler_output: SchedulerOutput) -> None:
        batch = self.input_batch
        r = batch.num_reqs
        req_ids = tuple(r for r in batch.req_ids if r is not None)
        batch.block_table.copy_to_gpu(r)  # first, so that the copy runs while the host does the rest
        scheduled = np.array([scheduler_output.num_scheduled_tokens[req_id] for req_id in req_ids], dtype=np.int32)
        t = int(scheduled.sum())
        drafts = tuple(scheduler_output.scheduled_spec_decode_tokens.get(req_id, []) for req_id in req_ids)
        if self.speculation is not None:
            self.speculation.write_drafts(batch, drafts)
        req_indices = np.repeat(np.arange(r, dtype=np.int64), scheduled)
        ends = np.cumsum(scheduled)
        query_pos = np.arange(t, dtype=np.int32) - np.repeat(ends - scheduled, scheduled)
        computed = batch.num_computed_tokens_cpu[:r]
        positions = computed[req_indices] + query_pos
        flat = torch.from_numpy(positions + req_indices * batch.max_model_len)
        torch.index_select(batch.token_ids_cpu_tensor.flatten(), 0, flat, out=self.input_ids.cpu[:t])
        self.query_start_loc.np[0] = 0
        self.query_start_loc.np[1 : r + 1] = ends
        self.query_start_loc.np[r + 1 :] = t
        self.req_indices.np[:t] = req_indices
        self.query_pos.np[:t] = query_pos
        self.num_scheduled_tokens.np[:r] = scheduled
        self.num_computed_tokens.np[:r] = computed
        seq_lens = computed + scheduled
        # A request still inside its prompt is sampled too, and its token thrown away.
        discarded = frozenset(np.flatnonzero(seq_lens < batch.num_tokens[:r]).tolist())
        for buffer, n in (
            (self.query_start_loc, self.max_num_reqs + 1), (self.req_indices, t), (self.query_pos, t),
            (self.num_scheduled_tokens, r), (self.num_computed_tokens, r), (self.input_ids, t),
        ):  # fmt: skip
            buffer.copy_to_gpu(n)
        self.prepare_inputs_event = self.device.compute.record_event()
        self.device.compute.submit("positions, slots", self._device_inputs, r, t)
        made_by = self._scatter_sampled_tokens(req_ids, ends)
        query_start_loc_np = self.query_start_loc.np.copy()
        metadata = self.model_state.prepare_attn(
            num_reqs=r,
            num_tokens=t,
            num_tokens_padded=t,
            query_start_loc=self.query_start_loc.gpu,
            query_start_loc_np=query_start_loc_np,
            seq_lens=self.seq_lens,
            seq_lens_np=seq_lens,
            block_table=batch.block_table.gpu,
            slot_mapping=self.slot_mapping[:t],
            num_decodes=int((scheduled == 1).sum()),
            has_admitted=bool(
                scheduler_output.scheduled_new_reqs or scheduler_output.scheduled_cached_reqs.resumed_req_ids
            ),
        )
        self._inputs = StepInputs(req_ids, scheduled, query_start_loc_np, t, discarded, metadata, drafts)
        self._values = DeviceValues()
        self.last_inputs = self._inputs
        if InputsPrepared in self.hooks.wanted:
            self.hooks.emit(InputsPrepared(*self.hooks.stamp(), r, t, t, made_by))

    def _device_inputs(self, r: int, t: int) -> None:
        """On the stream: positions i64 [t], seq_lens i32 [r], slots i64 [t] from what was copied."""
        req_indices, block_size = self.req_indices.gpu[:t], self.config.block_size
        positions = self.positions[:t]
        positions.copy_(self.num_computed_tokens.gpu[req_indices] + self.query_pos.gpu[:t])
        self.seq_lens[:r].copy_(self.num_computed_tokens.gpu[:r] + self.num_scheduled_tokens.gpu[:r])
        self.seq_lens[r:].zero_()
        blocks = self.input_batch.block_table.gpu[req_indices, positions // block_size]
        # A captured batch is larger: its rows beyond t must write nothing.
        self.slot_mapping[t:].fill_(-1)
        self.slot_mapping[:t].copy_(blocks.long() * block_size + positions % block_size)

    def _scatter_sampled_tokens(self, req_ids: tuple[str, ...], ends: np.ndarray) -> dict[str, str]:
        """Overlapped loop: puts the last step's tokens, which only the device knows, where the host has
        placeholders."""
        if not self.use_async_scheduling:
            return MADE_BY
        source, target = [], []
        for row, req_id in enumerate(req_ids):
            previous = self.prev_req_id_to_index.get(req_id)
            outputs = self.requests[req_id].output_token_ids
            if previous is not None and outputs and outputs[-1] == PLACEHOLDER:
                source.append(previous)
                target.append(int(ends[row]) - 1)
        if not source:
            return MADE_BY
        previous_values, n, input_ids = self.prev_sampled, len(source), self.input_ids.gpu
        assert previous_values is not None
        # Nothing moved and all are decodes: the tokens lie as the input wants them.
        unchanged = source == target == list(range(n))
        indices = (
            None if unchanged else (self.device.to_device(np.array(source)), self.device.to_device(np.array(target)))
        )

        def scatter() -> None:
            assert previous_values.output is not None
            sampled = previous_values.output.sampled[:, 0].to(torch.int32)
            if indices is None:
                input_ids[:n].copy_(sampled[:n])
            else:
                input_ids.scatter_(0, indices[1], sampled[indices[0]])

        self.device.compute.submit("scatter sampled", scatter)
        return MADE_BY_ASYNC

    def forward(self) -> None:
        assert self._inputs is not None, "forward: prepare_inputs comes first"
        t, metadata, values = self._inputs.num_tokens, self._inputs.metadata, self._values
        if (size := self.graphs.find(metadata)) is not None:
            self._submit_replay(size, t, values)
            return
        inputs = self.model_state.prepare_inputs(self.input_ids.gpu[:t], self.positions[:t])

        def run() -> None:
            values.hidden = self.model(**inputs, metadata=metadata, kv_cache=self.kv_cache)

        self.device.compute.submit("forward", run)
        if KernelLaunched in self.hooks.wanted:
            self.hooks.emit(KernelLaunched(*self.hooks.stamp(), "forward", "torch"))

    def _submit_replay(self, size: ForwardSize, num_tokens: int, values: DeviceValues) -> None:
        def replay() -> None:
            values.hidden = self.graphs.replay(size)[:num_tokens]

        name = f"graph of {size}"
        self.device.compute.submit(name, replay)
        if KernelLaunched in self.hooks.wanted:
            self.hooks.emit(KernelLaunched(*self.hooks.stamp(), name, "triton"))

    def sample_tokens(self, grammar_output: GrammarOutput | None = None) -> ReadyOutput | AsyncGPUModelRunnerOutput:
        assert self._inputs is not None, "sample_tokens: execute_model comes first"
        inputs, values, batch = self._inputs, self._values, self.input_batch
        self._inputs = None
        if self.use_async_scheduling and batch.needs_output_tokens:
            self._update_async_output_token_ids()
        drafted, propose = self._drafted_sampling(inputs, grammar_output), self._device_drafts(inputs)
        # Of a step with drafts `drafted` has all this, for each row of logits.
        grammar_output = grammar_output if drafted is None else None
        metadata, step = batch.sampling_metadata, make_step_sampling(batch, inputs.discarded, grammar_output)
        assert metadata is not None
        r, query_start_loc = len(inputs.req_ids), self.query_start_loc.gpu
        chunks = prompt_chunks(batch, inputs.query_start_loc_np)
        traced, watched = SamplingTraced in self.hooks.wanted, self.hooks.wants(DRAFT_EVENTS)

        def run() -> None:
            assert values.hidden is not None
            last = query_start_loc[1 : r + 1].long() - 1 if drafted is None else drafted.spec.logits_indices
            logits = self.model.compute_logits(values.hidden[last])
            if drafted is not None:
                token_ids = self.input_ids.gpu[last]
                values.output = output = drafted.sample(logits, token_ids, self.generator)
                values.trace = drafted.trace(output, token_ids) if watched else {}
            elif traced:
                values.output, values.trace = sample_traced(logits, metadata, step, self.generator)
            else:
                values.output = sample(logits, metadata, step, self.generator)
            for chunk in chunks:
                values.prompt_logprobs[chunk.req_id] = self._prompt_logprobs(values.hidden, chunk)
            if propose is not None:
                values.drafts = propose(values.output, values.hidden)
            values.hidden = None

        self.device.compute.submit("sample", run)
        if KernelLaunched in self.hooks.wanted:
            self.hooks.emit(KernelLaunched(*self.hooks.stamp(), "sample", "torch"))
        num_logprobs = tuple(batch.params[row].logprobs for row in range(r))
        prompt_starts = {chunk.req_id: (chunk.start, chunk.k) for chunk in chunks}
        rows = OutputRows(inputs.req_ids, inputs.discarded, num_logprobs, prompt_starts, inputs.num_drafts)
        if self.use_async_scheduling:
            return self._bookkeeping_async(rows, values)
        return self._bookkeeping_sync(rows, values.tensors)

    def _drafted_sampling(self, inputs: StepInputs, grammar_output: GrammarOutput | None) -> DraftedSampling | None:
        if self.speculation is None or not any(inputs.drafts):
            return None
        return self.speculation.sampling(
            self.input_batch, inputs.query_start_loc_np, inputs.drafts, inputs.discarded, grammar_output
        )

    def _device_drafts(self, inputs: StepInputs) -> Propose | None:
        if self.speculation is None or self.speculation.device_drafts is None:
            return None
        return self.speculation.device_drafts.prepare(
            self.input_batch, inputs.num_scheduled_tokens, inputs.num_drafts, inputs.discarded, inputs.metadata,
            self.input_ids.gpu, self.positions,
        )  # fmt: skip

    def draft_token_ids(self, req_ids: Sequence[str]) -> dict[str, list[int]]:
        """Between `forward` and `sample_tokens`: the drafts that the step verifies, of those of `req_ids` that have
        some."""
        assert self._inputs is not None, "draft_token_ids: prepare_inputs comes first"
        drafts = dict(zip(self._inputs.req_ids, self._inputs.drafts, strict=True))
        return {req_id: drafts[req_id] for req_id in req_ids if drafts[req_id]}

    def take_draft_token_ids(self) -> dict[str, list[int]]:
        """Drafts behind the tokens of the last step, of every request that got some, for the scheduler."""
        drafts, self._draft_token_ids = self._draft_token_ids, {}
        return drafts

    def _prompt_logprobs(self, hidden: torch.Tensor, chunk: PromptChunk) -> LogprobsTensors:
        rows = hidden[chunk.first : chunk.first + chunk.targets.shape[0]]
        return compute_prompt_logprobs(rows, chunk.targets, chunk.k, self.model.compute_logits)

    def _update_async_output_token_ids(self) -> None:
        """Writes the last step's tokens over their placeholders, for penalties, bad words and processors. The forward
        of this step is launched already, so the device doesn't stand still."""
        if self.prev_output is None:
            return
        sampled = self.prev_output.wait_for_sampled()  # F
        batch = self.input_batch
        for req_id, previous in self.prev_req_id_to_index.items():
            row = batch.req_id_to_index.get(req_id)
            outputs = self.requests[req_id].output_token_ids if row is not None else []
            if row is not None and outputs and outputs[-1] == PLACEHOLDER:
                outputs[-1] = int(sampled[previous, 0])
                batch.token_ids_cpu[row, batch.num_tokens[row] - 1] = outputs[-1]

    def _bookkeeping_sync(self, rows: OutputRows, tensors: Callable[[], dict[str, torch.Tensor]]) -> ReadyOutput:
        """Waits for the tokens and writes each into the batch: the next step's input is made from them on the host."""
        host: dict[str, torch.Tensor] = {}
        self.device.compute.submit("copy sampled", copy_to_host, self.device, tensors, host)
        self.device.wait(self.device.compute.record_event(), "sampled tokens", inside_step=True)  # B
        output = rows.build(host)
        tokens = output.sampled_token_ids.tolist()
        for row, (req_id, count) in enumerate(zip(output.req_ids, output.num_sampled.tolist(), strict=True)):
            for token in tokens[row][:count]:
                self._append_token(row, req_id, token)
        if self.speculation is not None:
            sampled = {req_id: row for row, req_id in enumerate(rows.req_ids) if row not in rows.discarded}
            if "drafts" in host:
                self._draft_token_ids = DeviceDrafts.to_lists(host["drafts"].numpy(), sampled)
            else:
                self._draft_token_ids = self.speculation.propose(self.input_batch, sampled)
        return ReadyOutput(output)

    def _bookkeeping_async(self, rows: OutputRows, values: DeviceValues) -> AsyncGPUModelRunnerOutput:
        """Keeps the tokens on the device and writes a placeholder for each."""
        output = AsyncGPUModelRunnerOutput(self.device, rows, values.tensors)
        self.prev_sampled, self.prev_output = values, output
        self.prev_req_id_to_index = {
            req_id: row for row, req_id in enumerate(rows.req_ids) if row not in rows.discarded
        }
        for req_id, row in self.prev_req_id_to_index.items():
            self._append_token(row, req_id, PLACEHOLDER)
        return output

    def _append_token(self, row: int, req_id: str, token: int) -> None:
        batch = self.input_batch
        batch.token_ids_cpu[row, batch.num_tokens[row]] = token
        batch.num_tokens[row] += 1
        self.requests[req_id].output_token_ids.append(token)
