"""Runner V2 with a drafter above it: a step verifies the drafts of the one before, and then asks for the next.

How many of its drafts a request keeps is known on the device alone. The host goes on as if all were kept: its counts
are upper bounds, which the scheduler corrects when the tokens arrive.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kernels import DraftedRows, expand_idx_mapping

from ..attention import AttentionMetadata
from ..config import ConfigError, EngineConfig
from ..device import Device
from ..hooks import Hooks
from ..models import CausalLM
from ..models.layer_outputs import LayerOutputs
from ..sample.draft_trace import draft_tensors, padded_drafts, padded_rows
from ..spec_decode import FinishedStep, RowTables, SpecDecoder
from .async_output import CONFIDENCES, empty_tokens
from .output_turns import OutputTurns
from .sample import Sampler, SamplerPlan
from .sample.rejection_sampler import DraftedStep, RejectionSampler, RejectionSamplerOutput
from .sample.structured_outputs import GrammarBitmask
from .step_work import StepWork
from .verification import Verification, with_lengths_read

if TYPE_CHECKING:
    from .runner import ModelRunnerV2


class Speculation:
    """The drafter of an engine, and the rule that judges its drafts. `layer_outputs`: where the target leaves what the
    drafter listens to; None if that is the last norm alone."""

    def __init__(
        self,
        decoder: SpecDecoder,
        rejection_sampler: RejectionSampler,
        verification: Verification,
        layer_outputs: LayerOutputs | None,
    ) -> None:
        self.decoder = decoder
        self.rejection_sampler = rejection_sampler
        self.verification = verification
        self.layer_outputs = layer_outputs
        self.num_drafts = decoder.num_drafts


def make_speculation(
    config: EngineConfig,
    model: CausalLM,
    decoder: SpecDecoder | None,
    sampler: Sampler,
    device: Device,
    hooks: Hooks,
    before: Speculation | None = None,
) -> Speculation | None:
    """None without a decoder. `before`: what the engine had until now, whose measurements stay true."""
    spec = config.speculative_config
    if spec is None or decoder is None:
        return None
    assert config.max_num_seqs is not None
    verification = before.verification if before else None
    verification = verification or Verification(
        spec, decoder, device, hooks, config.max_num_seqs, config.kernel_backend
    )
    if verification.is_budgeted and device.is_cuda and model.triton_attention is None:
        raise ConfigError(
            f"verification_schedule='budgeted' with kernel_backend={config.kernel_backend!r} on {device.torch_device}: "
            "lengths that the device makes need its own attention; use kernel_backend='auto' or 'fixed' verification"
        )
    rates = spec.conditional_acceptance_rates(decoder.num_drafts)
    outputs = None
    if layer_ids := decoder.target_layer_ids:
        hidden_size, max_tokens = model.config.hidden_size, config.max_num_batched_tokens
        outputs = LayerOutputs(layer_ids, hidden_size, max_tokens, model.dtype, model.device)
    rejection_sampler = RejectionSampler(sampler, spec.rejection_sample_method, rates)
    return Speculation(decoder, rejection_sampler, verification, outputs)


class DraftedWork(StepWork):
    """The work of a step in which requests may have drafts: l = r + drafts rows of logits, or fewer.

    Args:
        idx_mapping, num_reqs_padded, num_tokens_padded, metadata: as in StepWork.
        num_logits: l, or more where only the device knows.
        budget: how many drafts are verified in all; None verifies every one.
        watched: what becomes of the drafts is part of the output.
    """

    def __init__(
        self,
        runner: ModelRunnerV2,
        idx_mapping: torch.Tensor,
        num_reqs_padded: int,
        num_tokens_padded: int,
        metadata: AttentionMetadata,
        speculation: Speculation,
        *,
        num_logits: int,
        budget: int | None = None,
        watched: bool = False,
    ) -> None:
        super().__init__(runner, idx_mapping, num_reqs_padded, num_tokens_padded, metadata, num_logits)
        self._speculation = speculation
        self._budget = budget
        self.has_drafts = num_logits > idx_mapping.shape[0] or budget is not None
        self._watched = watched
        self.width = 1 + speculation.num_drafts if self.has_drafts else 1
        cu_num_logits = (runner.input_buffers if budget is None else speculation.verification).cu_num_logits
        self.cu_num_logits = cu_num_logits[: idx_mapping.shape[0] + 1]
        self._input_tokens: torch.Tensor | None = None
        self._hidden_states: torch.Tensor | None = None

    @property
    def is_budgeted(self) -> bool:
        return self._budget is not None

    def allot_verification(self) -> None:
        """Gives the step's rows to the drafts that will most likely be accepted; needed under a budget alone."""
        if self._budget is None:
            return
        verification = self._speculation.verification
        verification.allot(self.idx_mapping, self._buffers.query_start_loc, self._budget)
        if not self._runner.device.is_cuda:
            self.metadata = with_lengths_read(self.metadata)

    def combine_sampled_and_draft_tokens(self) -> None:
        """4, and notes the drafts: what stands for none is no input of the model."""
        super().combine_sampled_and_draft_tokens()
        if self.has_drafts:
            input_ids = self._buffers.input_ids[: self.num_tokens_padded]
            self._input_tokens = input_ids[self.logits_indices]
            input_ids.clamp_(min=0)

    def input_tokens(self) -> torch.Tensor:
        """Called behind 4: the input token of each row of logits, i32 [l]; a request's drafts stand behind its last
        known token, -1 is none."""
        assert self._input_tokens is not None
        return self._input_tokens

    def forward(self) -> None:
        """The model over the flat input; with the outputs of the layers that the drafter listens to, if it does."""
        runner, t, outputs = self._runner, self.num_tokens_padded, self._speculation.layer_outputs
        inputs = runner.model_state.prepare_inputs(self._buffers.input_ids[:t], self._buffers.positions[:t])
        self._hidden = runner.model(**inputs, metadata=self.metadata, kv_cache=runner.kv_cache, layer_outputs=outputs)
        self._hidden_states = self._hidden if outputs is None else outputs.states[:t]

    def sample(self, plan: SamplerPlan, grammar: GrammarBitmask | None = None, traced: bool = False) -> None:
        """5 and 23 to 29: judges the drafts, and draws a token behind those that are accepted.

        How the tokens of a step with drafts are drawn is not `traced`; what becomes of the drafts is, if watched.
        """
        if not self.has_drafts:
            super().sample(plan, grammar, traced)
            return
        step, output = self._verify(plan, grammar)
        sampled = output.verified.sampled
        num_rows, width = sampled.shape
        tokens, self._sampled, self._num_sampled = empty_tokens(num_rows, width, sampled.device)
        self._sampled.copy_(sampled)
        self._num_sampled.copy_(output.verified.num_sampled)
        self.output = {"tokens": tokens}
        if output.logprobs is not None:
            self.output |= output.logprobs.as_dict()
        if self._watched:
            self.output |= self._draft_tensors(step, output)
        if (confidences := self._confidences_wanted()) is not None:
            self.output[CONFIDENCES] = confidences[self.idx_mapping.long()]  # still those of the drafts just judged
        self._hidden = None

    def draw(self, plan: SamplerPlan) -> None:
        if not self.has_drafts:
            super().draw(plan)
            return
        verified = self._verify(plan, insert=False)[1].verified
        self._sampled, self._num_sampled, self._race = verified.sampled, verified.num_sampled, verified.race
        self._hidden = None

    def _verify(
        self, plan: SamplerPlan, grammar: GrammarBitmask | None = None, insert: bool = True
    ) -> tuple[DraftedStep, RejectionSamplerOutput]:
        logits, positions = self._logits()
        drafted = None if self._logits_rows is None else self._logits_rows.drafted
        if drafted is None:
            expanded = expand_idx_mapping(self.idx_mapping, self.num_logits, self.cu_num_logits, form=self._form)
            drafted = DraftedRows(self.input_tokens(), *expanded)
        step = DraftedStep(
            self.idx_mapping, self.cu_num_logits, drafted.idx_mapping, drafted.local_pos, drafted.token_ids, positions,
            max_drafts=self._speculation.num_drafts,
        )  # fmt: skip
        draft_logits = self._speculation.decoder.draft_logits
        sampler = self._speculation.rejection_sampler
        return step, sampler.sample(
            plan, logits, step, draft_logits=draft_logits, grammar=grammar, insert=insert
        )  # fmt: skip

    def _draft_tensors(self, step: DraftedStep, output: RejectionSamplerOutput) -> dict[str, torch.Tensor]:
        cu, n, verified = step.cu_num_logits, step.max_drafts, output.verified
        confidences = self._speculation.decoder.confidences
        if confidences is not None:  # by state row, and still those of the drafts that were judged
            confidences = confidences[self.idx_mapping.long()]
        return draft_tensors(
            self._speculation.rejection_sampler.method, padded_drafts(step.token_ids, cu, n),
            padded_rows(verified.target_probs, cu, n), padded_rows(verified.draft_probs, cu, n),
            padded_rows(verified.uniforms, cu, n), confidences,
        )  # fmt: skip

    def propose(self) -> None:
        """Drafts for the next step, into the state table."""
        assert self._num_sampled is not None and self._num_rejected is not None
        states = self._states
        rows = RowTables(
            last_sampled_tokens=states.last_sampled_tokens, num_blocks=self._tables.num_blocks.gpu,
            temperature=self._runner.sampling_states.temperature.gpu, seeds=self._runner.sampling_states.seeds.gpu,
            all_token_ids=states.all_token_ids.gpu, total_len=states.total_len.gpu,
            next_prefill_tokens=states.next_prefill_tokens, draft_tokens=states.draft_tokens,
        )  # fmt: skip
        step = FinishedStep(
            idx_mapping=self.idx_mapping, input_ids=self._buffers.input_ids, positions=self._buffers.positions,
            num_sampled=self._num_sampled, num_rejected=self._num_rejected, metadata=self.metadata, rows=rows,
            hidden_states=self._hidden_states,
        )  # fmt: skip
        decoder = self._speculation.decoder
        drafts = decoder.propose(step)
        cut = self._speculation.verification.cut(drafts, self.idx_mapping)
        if cut is not drafts or not decoder.keeps_drafts:
            states.draft_tokens.index_copy_(0, self.idx_mapping.long(), cut)
        self._hidden_states = None

    def output_turns(self) -> OutputTurns:
        return OutputTurns(self.idx_mapping.shape[0], self.width, self.idx_mapping.device, self._confidences_wanted())

    def _confidences_wanted(self) -> torch.Tensor | None:
        """f32 [R, N], by state row, those which the host goes by for later steps."""
        is_wanted = self.has_drafts and self._speculation.verification.is_budgeted
        return self._speculation.decoder.confidences if is_wanted else None

    def whole_step(self, plan: SamplerPlan, with_prompts: bool, turns: OutputTurns) -> None:
        self.allot_verification()
        super().whole_step(plan, with_prompts, turns)
        self.propose()
