"""Model runner V1: the persistent batch is the model's input.

Faithful to vLLM's V1 in structures, order and waits: dense rows, a backup of every request, pinned buffers rewritten
each step, host loops per request. Its host waits, by their letter in vLLM's list: A `prepare_inputs` (overlapped
loop: the pinned buffers are about to be rewritten; each step but the first, and of the empty steps those in which
rows leave), B `sampled tokens` (plain loop), F `output token ids` (overlapped loop, when a request's sampling looks at
its output: penalties, bad words, logits processors; `unseen_tokens.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch

from ..attention import AttentionMetadata
from ..config import EngineConfig
from ..device import Device
from ..hooks import DRAFT_EVENTS, Hooks, InputsPrepared, KernelLaunched, SamplingTraced
from ..models import CausalLM
from ..models.model_state import ModelState
from ..sample.logprobs import LogprobsTensors
from ..sample.prompt_logprobs import compute_prompt_logprobs
from ..sched_output import GrammarOutput, SchedulerOutput
from ..spec_decode import SpecDecoder
from .device_drafts import DeviceDrafts, Propose
from .forward_graphs import ForwardGraphs, ForwardSize
from .input_batch import InputBatch
from .input_buffers import MADE_BY, MADE_BY_ASYNC, InputBuffers
from .outputs import AsyncGPUModelRunnerOutput, OutputRows, ReadyOutput, copy_to_host
from .prompt_logprobs import PromptChunk, prompt_chunks
from .sampler import sample
from .speculation import DraftedSampling, make_speculation
from .states import RequestStates
from .step_sampling import make_step_sampling
from .step_values import DeviceValues, StepInputs
from .trace import sample_traced
from .unseen_tokens import UnseenTokens


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
        r, max_blocks = self.max_num_reqs, -(-config.max_model_len // config.block_size)
        self.input_batch = InputBatch(device, r, config.max_model_len, max_blocks, self.model.config.vocab_size)
        self.states = RequestStates(self.input_batch, self.model_state, self.hooks)
        self.input_buffers = InputBuffers(device, r, self.max_num_tokens, config.block_size)
        self.unseen = UnseenTokens(device, self.states)
        self.generator = torch.Generator(device.torch_device).manual_seed(config.seed)
        self.last_inputs: StepInputs | None = None
        self._inputs: StepInputs | None = None
        self._values = DeviceValues()
        self._draft_token_ids: dict[str, list[int]] = {}
        self.graphs = ForwardGraphs(config, device, 0 if self.decoder is None else self.decoder.num_drafts)
        self.speculation = make_speculation(config, self.model, self.decoder, device, self.graphs)
        device.catch_up()
        self.capture()

    @property
    def capture_seconds(self) -> float:
        return self.graphs.seconds

    def capture(self) -> None:
        """What `graphs` takes: forwards, and the work of a drafter on the device."""
        drafts = None if self.speculation is None else self.speculation.device_drafts
        self.graphs.capture(self._padding_forward, None if drafts is None else self._padding_drafts)

    def _padding_forward(self, num_reqs: int, num_tokens: int) -> Callable[[], torch.Tensor]:
        """The forward of decodes, with all their drafts or without, of which none is there: it may run at any time and
        writes no cache."""
        metadata, buffers = self._padding_metadata(num_reqs, num_tokens), self.input_buffers
        inputs = self.model_state.prepare_inputs(buffers.input_ids.gpu[:num_tokens], buffers.positions[:num_tokens])
        return partial(self.model, **inputs, metadata=metadata, kv_cache=self.kv_cache)

    def _padding_drafts(self, num_reqs: int, num_tokens: int) -> Callable[[], torch.Tensor]:
        """What the drafter does behind `_padding_forward`."""
        assert self.speculation is not None and self.speculation.device_drafts is not None
        metadata = self._padding_metadata(num_reqs, num_tokens)
        return self.speculation.device_drafts.padding_work(metadata, self.input_buffers)

    def _padding_metadata(self, num_reqs: int, num_tokens: int) -> AttentionMetadata:
        buffers = self.input_buffers
        buffers.slot_mapping.fill_(-1)
        buffers.seq_lens.zero_()
        return self.model_state.prepare_attn(
            num_reqs=num_reqs,
            num_tokens=num_tokens,
            num_tokens_padded=num_tokens,
            query_start_loc=buffers.query_start_loc.gpu,
            query_start_loc_np=np.arange(num_reqs + 1, dtype=np.int32) * (num_tokens // num_reqs),
            seq_lens=buffers.seq_lens,
            seq_lens_np=np.full(num_reqs, self.config.max_model_len, dtype=np.int32),
            block_table=self.input_batch.block_table.gpu,
            slot_mapping=buffers.slot_mapping[:num_tokens],
            num_decodes=num_reqs if num_tokens == num_reqs else 0,
        )

    # -- one step ------------------------------------------------------------------------------------------------------

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        """State, inputs and forward of one step; `sample_tokens` must follow."""
        self.update_states(scheduler_output)
        self.prepare_inputs(scheduler_output)
        self.forward()

    def update_states(self, scheduler_output: SchedulerOutput) -> None:
        self._wait_for_inputs()
        self.states.update(scheduler_output)

    def finish_requests(self, scheduler_output: SchedulerOutput) -> None:
        """What a step without tokens does: forget the requests that ended. A preempted one leaves when the next step
        runs."""
        if scheduler_output.finished_req_ids:
            # Rows are about to move in buffers that a step in flight may not have copied yet.
            self._wait_for_inputs()
            self.states.finish(scheduler_output.finished_req_ids)

    def _wait_for_inputs(self) -> None:
        if self.use_async_scheduling and self.input_buffers.copied is not None:
            self.device.wait(self.input_buffers.copied, "prepare_inputs", inside_step=True)  # A

    def prepare_inputs(self, scheduler_output: SchedulerOutput) -> None:
        batch, buffers = self.input_batch, self.input_buffers
        r = batch.num_reqs
        req_ids = tuple(r for r in batch.req_ids if r is not None)
        batch.block_table.copy_to_gpu(r)  # first, so that the copy runs while the host does the rest
        scheduled = np.array([scheduler_output.num_scheduled_tokens[req_id] for req_id in req_ids], dtype=np.int32)
        drafts = tuple(scheduler_output.scheduled_spec_decode_tokens.get(req_id, []) for req_id in req_ids)
        if self.speculation is not None:
            self.speculation.write_drafts(batch, drafts)
        buffers.write(batch, scheduled)
        query_start_loc_np = buffers.query_start_loc.np.copy()
        ends, made_by = query_start_loc_np[1 : r + 1], MADE_BY
        if self.use_async_scheduling and self.unseen.scatter(req_ids, ends, buffers.input_ids.gpu):
            made_by = MADE_BY_ASYNC
        t, seq_lens = int(query_start_loc_np[-1]), batch.num_computed_tokens_cpu[:r] + scheduled
        # A request still inside its prompt is sampled too, and its token thrown away.
        discarded = frozenset(np.flatnonzero(seq_lens < batch.num_tokens[:r]).tolist())
        metadata = self.model_state.prepare_attn(
            num_reqs=r,
            num_tokens=t,
            num_tokens_padded=t,
            query_start_loc=buffers.query_start_loc.gpu,
            query_start_loc_np=query_start_loc_np,
            seq_lens=buffers.seq_lens,
            seq_lens_np=seq_lens,
            block_table=batch.block_table.gpu,
            slot_mapping=buffers.slot_mapping[:t],
            num_decodes=int((scheduled == 1).sum()),
            has_admitted=bool(
                scheduler_output.scheduled_new_reqs or scheduler_output.scheduled_cached_reqs.resumed_req_ids
            ),
        )
        size = self.graphs.find(metadata)
        self._inputs = StepInputs(req_ids, scheduled, query_start_loc_np, t, discarded, metadata, drafts, size)
        self._values = DeviceValues()
        self.last_inputs = self._inputs
        if InputsPrepared in self.hooks.wanted:
            self.hooks.emit(InputsPrepared(*self.hooks.stamp(), r, t, t, made_by))

    def forward(self) -> None:
        assert self._inputs is not None, "forward: prepare_inputs comes first"
        t, metadata, values = self._inputs.num_tokens, self._inputs.metadata, self._values
        if self._inputs.size is not None:
            self._submit_replay(self._inputs.size, t, values)
            return
        inputs = self.model_state.prepare_inputs(self.input_buffers.input_ids.gpu[:t], self.input_buffers.positions[:t])

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
            self.unseen.wait_and_write(batch)
        drafted, propose = self._drafted_sampling(inputs, grammar_output), self._device_drafts(inputs)
        # Of a step with drafts `drafted` has all this, for each row of logits.
        grammar_output = grammar_output if drafted is None else None
        metadata, step = batch.sampling_metadata, make_step_sampling(batch, inputs.discarded, grammar_output)
        assert metadata is not None
        r, query_start_loc = len(inputs.req_ids), self.input_buffers.query_start_loc.gpu
        chunks = prompt_chunks(batch, inputs.query_start_loc_np)
        traced, watched = SamplingTraced in self.hooks.wanted, self.hooks.wants(DRAFT_EVENTS)

        def run() -> None:
            assert values.hidden is not None
            last = query_start_loc[1 : r + 1].long() - 1 if drafted is None else drafted.spec.logits_indices
            logits = self.model.compute_logits(values.hidden[last])
            if drafted is not None:
                token_ids = self.input_buffers.input_ids.gpu[last]
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
            return self.unseen.keep(rows, values)
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
            self.input_buffers, inputs.size,
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

    def _bookkeeping_sync(self, rows: OutputRows, tensors: Callable[[], dict[str, torch.Tensor]]) -> ReadyOutput:
        """Waits for the tokens and writes each into the batch: the next step's input is made from them on the host."""
        host: dict[str, torch.Tensor] = {}
        self.device.compute.submit("copy sampled", copy_to_host, self.device, tensors, host)
        self.device.wait(self.device.compute.record_event(), "sampled tokens", inside_step=True)  # B
        output = rows.build(host)
        tokens = output.sampled_token_ids.tolist()
        for row, (req_id, count) in enumerate(zip(output.req_ids, output.num_sampled.tolist(), strict=True)):
            for token in tokens[row][:count]:
                self.states.append_token(row, req_id, token)
        if self.speculation is not None:
            sampled = {req_id: row for row, req_id in enumerate(rows.req_ids) if row not in rows.discarded}
            if "drafts" in host:
                self._draft_token_ids = DeviceDrafts.to_lists(host["drafts"].numpy(), sampled)
            else:
                self._draft_token_ids = self.speculation.propose(self.input_batch, sampled)
        return ReadyOutput(output)
