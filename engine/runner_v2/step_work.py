"""The device's work in one step of runner V2, a method for each launch.

The runner submits these methods one after the other; a captured step is the same work, some of it in fewer launches.
Everything is read from buffers whose addresses never change, apart from the small index of the step. The number in a
comment is the kernel's in vLLM's table (ARCHITECTURE.md).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kernels import (
    LogitsRows,
    Race,
    RequestRows,
    SampledStep,
    StateRows,
    StepIndex,
    StepInputs,
    combine_sampled_and_draft_tokens,
    finish_step,
    get_num_sampled_and_rejected,
    post_update,
    prepare_pos_seq_lens,
    prepare_prefill_inputs,
    prepare_step,
)

from ..attention import AttentionMetadata
from .async_output import empty_tokens
from .output_turns import OutputTurns
from .sample import SamplerPlan
from .sample.prompt_logprobs import PromptLogprobsPlan
from .sample.structured_outputs import GrammarBitmask
from .sample.trace import trace_tensors

if TYPE_CHECKING:
    from .runner import ModelRunnerV2


class StepWork:
    """r requests in the step's index, t tokens with padding; l logits rows.

    Args:
        idx_mapping: i32 [r], batch position -> state row.
        num_reqs_padded: >= r, rows of the gathered block table that are made.
        num_tokens_padded: >= t, tokens that the model runs over.
        num_logits: l; None: one a request.
    """

    has_drafts = False
    """Requests may have some."""

    def __init__(
        self,
        runner: ModelRunnerV2,
        idx_mapping: torch.Tensor,
        num_reqs_padded: int,
        num_tokens_padded: int,
        metadata: AttentionMetadata,
        num_logits: int | None = None,
    ) -> None:
        self._runner = runner
        self._form = runner.form
        self._buffers = runner.input_buffers
        self._states = runner.req_states
        self._tables = runner.block_tables
        self.idx_mapping = idx_mapping
        self.num_reqs_padded = num_reqs_padded
        self.num_tokens_padded = num_tokens_padded
        self.metadata = metadata
        # cu_num_logits without drafts: one row a request, so a prefix of 0..R.
        self.num_logits = idx_mapping.shape[0] if num_logits is None else num_logits
        self.cu_num_logits = runner.arange[: idx_mapping.shape[0] + 1]
        # Outside prompts every token has a row of logits; behind padding's tokens stand padding's rows.
        self._each_has_logits = not metadata.has_admitted and self.num_logits == metadata.num_tokens
        self.width = 1
        """Tokens that a request may get."""
        self.logits_indices: torch.Tensor | None = None
        self.output: dict[str, torch.Tensor] = {}
        self._logits_rows: LogitsRows | None = None
        self._hidden: torch.Tensor | None = None
        self._sampled: torch.Tensor | None = None
        self._num_sampled: torch.Tensor | None = None
        self._race: Race | None = None
        self._num_rejected: torch.Tensor | None = None

    def prepare_prefill_inputs(self) -> None:
        """2: copies the prompts' tokens of this step into the flat input."""
        prepare_prefill_inputs(
            self._buffers.input_ids, self._states.next_prefill_tokens, self.idx_mapping, self.metadata.query_start_loc,
            self._states.all_token_ids.gpu, self._states.prefill_len.gpu, self._states.num_computed_tokens.gpu,
            form=self._form,
        )  # fmt: skip

    def prepare_pos_seq_lens(self) -> None:
        """3: positions and sequence lengths from the computed counts."""
        prepare_pos_seq_lens(
            self.idx_mapping, self.metadata.query_start_loc, self._states.num_computed_tokens.gpu,
            self._buffers.positions, self._buffers.seq_lens, form=self._form,
        )  # fmt: skip

    def combine_sampled_and_draft_tokens(self) -> None:
        """4: puts each decode's last sampled token into the flat input; names the rows to compute logits of."""
        self.logits_indices = combine_sampled_and_draft_tokens(
            self._buffers.input_ids, self.idx_mapping, self._states.last_sampled_tokens, self.metadata.query_start_loc,
            self._buffers.seq_lens, self._states.prefill_len.gpu, self._states.draft_tokens, self.cu_num_logits,
            self.num_logits, form=self._form,
        )  # fmt: skip

    def gather_block_tables(self) -> None:
        """6."""
        self._tables.gather(self.idx_mapping, self.num_reqs_padded)

    def compute_slot_mappings(self) -> None:
        """7."""
        self._tables.compute_slots(
            self.idx_mapping, self.metadata.query_start_loc, self._buffers.positions, self.num_tokens_padded
        )

    def prepare_step(self, with_prompts: bool) -> None:
        """2 to 7, in one launch."""
        states, buffers, tables = self._states, self._buffers, self._tables
        rows = RequestRows(
            states.num_computed_tokens.gpu, states.prefill_len.gpu, states.all_token_ids.gpu,
            states.last_sampled_tokens, states.draft_tokens, tables.block_table.gpu, tables.num_blocks.gpu,
        )  # fmt: skip
        inputs = StepInputs(
            buffers.input_ids, buffers.positions, buffers.seq_lens, tables.slot_mapping, tables.input_block_table,
            states.next_prefill_tokens,
        )  # fmt: skip
        index = StepIndex(self.idx_mapping, self.metadata.query_start_loc, self.cu_num_logits)
        self._logits_rows = prepare_step(
            index, rows, inputs, block_size=tables.block_size, num_tokens_padded=self.num_tokens_padded,
            num_logits=self.num_logits, with_prompts=with_prompts, with_drafts=self.has_drafts, form=self._form,
        )  # fmt: skip
        self.logits_indices = self._logits_rows.indices

    def forward(self) -> None:
        """The model over the flat input."""
        runner, t = self._runner, self.num_tokens_padded
        inputs = runner.model_state.prepare_inputs(self._buffers.input_ids[:t], self._buffers.positions[:t])
        self._hidden = runner.model(**inputs, metadata=self.metadata, kv_cache=runner.kv_cache)

    def prompt_logprobs(self, plan: PromptLogprobsPlan) -> None:
        """20, 19: logprobs of the prompts' own tokens, as far as this step has their hidden states."""
        assert self._hidden is not None
        self._runner.sampler.prompt_logprobs.compute(
            plan, self._hidden, self._runner.model.compute_logits, self.idx_mapping, self.metadata.query_start_loc,
            self._states.num_computed_tokens.gpu,
        )  # fmt: skip

    def sample(self, plan: SamplerPlan, grammar: GrammarBitmask | None = None, traced: bool = False) -> None:
        """Logits of the rows that end a request's tokens, and a token for each; `traced` tells how it was drawn."""
        logits, positions = self._logits()
        sampler = self._runner.sampler
        untouched = logits.clone() if traced and grammar is not None else logits
        output = sampler.sample(plan, logits, self.idx_mapping, positions, grammar=grammar)
        tokens, self._sampled, self._num_sampled = empty_tokens(self.idx_mapping.shape[0], 1, logits.device)
        self._sampled.copy_(output.sampled)
        self._num_sampled.fill_(1)
        self.output = {"tokens": tokens}
        if output.logprobs is not None:
            self.output |= output.logprobs.as_dict()
        if traced:
            rows = sampler.rows(self.idx_mapping, positions, grammar=grammar)
            self.output |= trace_tensors(sampler, plan, untouched, rows, output.sampled[:, 0])
        self._hidden = None

    def draw(self, plan: SamplerPlan) -> None:
        """As `sample`, of a plan that is captured: tokens and nothing else."""
        logits, positions = self._logits()
        self._sampled = self._runner.sampler.sample(plan, logits, self.idx_mapping, positions).sampled
        self._num_sampled = None
        self._hidden = None

    def _logits(self) -> tuple[torch.Tensor, torch.Tensor]:
        """f32 [l, V]; and i64 [l], where the token to be sampled will stand: behind the token that they are of."""
        assert self._hidden is not None and self.logits_indices is not None
        hidden, rows = self._hidden, self._logits_rows
        hidden = hidden[: self.num_logits] if self._each_has_logits else hidden[self.logits_indices]
        positions = self._buffers.positions[self.logits_indices] + 1 if rows is None else rows.positions
        return self._runner.model.compute_logits(hidden), positions

    def get_num_sampled_and_rejected(self) -> None:
        """9: a request still inside its prompt has sampled nothing."""
        assert self._num_sampled is not None
        self._num_rejected = get_num_sampled_and_rejected(
            self._num_sampled, self._buffers.seq_lens, self.cu_num_logits, self.idx_mapping,
            self._states.prefill_len.gpu, form=self._form,
        )  # fmt: skip

    def post_update(self, plan: SamplerPlan) -> None:
        """10: appends the tokens to the state table, counts them for penalties, and advances the computed counts."""
        assert self._sampled is not None and self._num_sampled is not None and self._num_rejected is not None
        post_update(
            self.idx_mapping, self._states.num_computed_tokens.gpu, self._states.last_sampled_tokens,
            self._states.total_len.gpu, self._states.all_token_ids.gpu, self._sampled,
            self._num_sampled, self._num_rejected, self.metadata.query_start_loc,
            self._runner.sampler.penalties.output_bin_counts if plan.penalties else None, form=self._form,
        )  # fmt: skip

    def finish(self, turns: OutputTurns) -> None:
        """9 and 10, and the output into its place, in one launch."""
        assert self._sampled is not None
        states = self._states
        rows = StateRows(
            states.num_computed_tokens.gpu, states.last_sampled_tokens, states.total_len.gpu, states.all_token_ids.gpu,
            states.prefill_len.gpu,
        )  # fmt: skip
        step = SampledStep(
            self.idx_mapping, self.metadata.query_start_loc, self._buffers.seq_lens, self.cu_num_logits, self._sampled,
            self._num_sampled, self._race,
        )  # fmt: skip
        self._num_sampled, self._num_rejected = finish_step(step, rows, turns.places, form=self._form)

    def output_turns(self) -> OutputTurns:
        """Of this step's size."""
        return OutputTurns(self.idx_mapping.shape[0], self.width, self.idx_mapping.device)

    def whole_step(self, plan: SamplerPlan, with_prompts: bool, turns: OutputTurns) -> None:
        """A whole step as one graph captures it; what the host wants of it goes to `turns`."""
        self.prepare_step(with_prompts)
        self.forward()
        self.draw(plan)
        self.finish(turns)
