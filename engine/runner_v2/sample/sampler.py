"""Runner V2's sampler: the logits are changed in the documented order, then a token is drawn by Gumbel-max.

A sampled token is a pure function of (logits, seed, absolute position, purpose). Each feature is left out of a batch in
which no request uses it, which the host knows from numpy mirrors; the device is never asked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from kernels import MaxLengths, Purpose, apply_temperature, gumbel_sample, mask_top_k_top_p, sample_top_k_top_p

from ...sched_output import NewRequestData
from .bad_words import BadWords
from .logits_processors import LogitsProcessors, ProcessorCall
from .logprobs import NO_LOGPROBS_PLAN, LogprobsPlan, SampledLogprobs, compute_logprobs, plan_logprobs
from .penalties import Penalties
from .prompt_logprobs import PromptLogprobsStates
from .states import SamplingStates
from .structured_outputs import GrammarBitmask
from .tables import DraftRows, TokenTable

Stage = tuple[str, ...]
STAGES: tuple[Stage, ...] = (
    GRAMMAR := ("structured_outputs",),
    LOGPROBS := ("logprobs",),
    BIAS := ("allowed_token_ids", "logit_bias", "min_tokens"),
    PENALTIES := ("penalties",),
    BAD_WORDS := ("bad_words",),
    PROCESSORS := ("logits_processors",),
    TEMPERATURE := ("temperature",),
    FILTERS := ("min_p", "top_k", "top_p"),
    DRAW := ("draw",),
)
"""`ORDER` of engine/sample/order.py as V2 does it: what stands together is one kernel. Temperature and filters belong
to the draw's own kernels, unless somebody wants to see the logits behind them."""


@dataclass(frozen=True)
class SamplerOutput:
    """`sampled` i64 [l, 1]; `logprobs` None unless a request of the batch asked."""

    sampled: torch.Tensor
    logprobs: SampledLogprobs | None


@dataclass(frozen=True)
class SamplerPlan:
    """What a batch needs of the sampler, as the host knows it from its mirrors."""

    all_greedy: bool = False
    filters: bool = False
    """Some row has a top_k, top_p or min_p."""
    structured_outputs: bool = False
    """Some row has a grammar, whose bitmap comes when the step is under way."""
    logit_bias: MaxLengths | None = None
    penalties: bool = False
    max_bad_words: int = 0
    processors: tuple[ProcessorCall, ...] = ()
    logprobs: LogprobsPlan = NO_LOGPROBS_PLAN

    @property
    def looks_at_drafts(self) -> bool:
        """Some feature wants to know which tokens stand before a row."""
        return self.penalties or self.max_bad_words > 0 or bool(self.processors)

    @property
    def stages(self) -> tuple[Stage, ...]:
        """Those of `STAGES` that this batch goes through."""
        used = {
            GRAMMAR: self.structured_outputs,
            LOGPROBS: self.logprobs.wanted,
            BIAS: self.logit_bias is not None,
            PENALTIES: self.penalties,
            BAD_WORDS: self.max_bad_words > 0,
            PROCESSORS: bool(self.processors),
            TEMPERATURE: not self.all_greedy,
            FILTERS: self.filters,
            DRAW: True,
        }
        return tuple(stage for stage in STAGES if used[stage])


@dataclass(frozen=True)
class SampleRows:
    """l rows of logits: `idx_mapping` i32 [l], the state row of each; `positions` i64 [l], where the tokens to be
    sampled will stand; `drafts`, where the batch has some; `grammar`, where the batch has one."""

    idx_mapping: torch.Tensor
    positions: torch.Tensor
    drafts: DraftRows
    grammar: GrammarBitmask | None = None


class Sampler:
    def __init__(self, states: SamplingStates, form: str, tokens: TokenTable) -> None:
        device, num_rows, ring_depth = states.device, states.num_rows, states.ring_depth
        self.states = states
        self.penalties = Penalties(device, num_rows, states.vocab_size, ring_depth, form, tokens)
        self.bad_words = BadWords(device, num_rows, ring_depth, form, tokens)
        self.processors = LogitsProcessors(device, num_rows, tokens)
        self.prompt_logprobs = PromptLogprobsStates(device, num_rows, form, tokens)
        self.form = form
        # Without drafts every row is its request's first: [R] i32 of zeros, never written.
        self._zeros = device.zeros(num_rows, dtype=torch.int32)
        self._counters = device.zeros(num_rows, dtype=torch.int32)

    def add_request(self, row: int, new: NewRequestData) -> None:
        params = new.sampling_params
        self.states.add_request(row, params, new.num_prompt_tokens, new.stop_token_ids, new.request_seed_index)
        self.penalties.add_request(row, params, len(new.prefill_token_ids))
        self.bad_words.add_request(row, params)
        self.processors.add_request(row, params)
        self.prompt_logprobs.add_request(row, params, new.num_prompt_tokens, len(new.prefill_token_ids))

    def apply_staged_writes(self) -> list[str]:
        """Sends what `add_request` staged, after the requests' tokens; returns the names of the launches."""
        features = (self.states, self.penalties, self.bad_words)
        return [name for feature in features for name in feature.apply_staged_writes()]

    def plan(self, rows: np.ndarray, num_logits: np.ndarray | None = None) -> SamplerPlan:
        """For the batch of these state rows, i32 [r], each with `num_logits` i32 [r] rows of logits (None: with one).

        Decided on the host; the device is never asked. It holds for as long as the batch is the same.
        """
        states = self.states
        all_greedy = bool((states.temperature.np[rows] == 0).all())
        filters = not all_greedy and bool(
            (states.top_k.np[rows] < states.vocab_size).any()
            or (states.top_p.np[rows] < 1).any()
            or (states.min_p.np[rows] > 0).any()
        )
        asked = states.num_logprobs[rows]
        return SamplerPlan(
            all_greedy=all_greedy,
            filters=filters,
            structured_outputs=bool(states.structured_outputs[rows].any()),
            logit_bias=states.logit_bias.max_lengths(rows),
            penalties=self.penalties.in_use(rows),
            max_bad_words=self.bad_words.max_words(rows),
            processors=self.processors.calls(rows, num_logits),
            logprobs=plan_logprobs(states.device, asked if num_logits is None else asked.repeat(num_logits)),
        )

    def sample(
        self,
        plan: SamplerPlan,
        logits: torch.Tensor,
        idx_mapping: torch.Tensor,
        positions: torch.Tensor,
        *,
        drafts: DraftRows | None = None,
        grammar: GrammarBitmask | None = None,
    ) -> SamplerOutput:
        """Called on the stream; see `SampleRows` for the arguments.

        logits f32 [l, V]: a grammar changes them in place, nothing else does.
        """
        rows = self.rows(idx_mapping, positions, drafts, grammar)
        raw = logits
        if grammar is not None:
            grammar.apply(raw, self.form)
        changes = self._changes(plan, rows)
        if changes:
            logits = raw.clone()
            for change in changes.values():
                change(logits)
        sampled = self._draw(plan, logits, rows)
        return SamplerOutput(sampled.unsqueeze(1), compute_logprobs(plan.logprobs, raw, sampled, self.form))

    def rows(
        self,
        idx_mapping: torch.Tensor,
        positions: torch.Tensor,
        drafts: DraftRows | None = None,
        grammar: GrammarBitmask | None = None,
    ) -> SampleRows:
        """The rows of a step; without `drafts` each request has one."""
        if drafts is None:
            zeros = self._zeros[: idx_mapping.shape[0]]
            drafts = DraftRows(zeros, zeros, 0)
        return SampleRows(idx_mapping, positions, drafts, grammar)

    def stages(
        self, plan: SamplerPlan, logits: torch.Tensor, rows: SampleRows, *, in_place: bool = False
    ) -> Iterator[tuple[Stage, torch.Tensor]]:
        """Called on the stream, for who wants to see or needs the logits before the draw: each stage of this batch that
        changes them, with the logits f32 [l, V] behind it: the same tensor every time. `logits` stay as they are,
        unless they are to be changed `in_place`."""
        logits, grammar, states = logits if in_place else logits.clone(), rows.grammar, self.states
        changes = self._changes(plan, rows)
        if grammar is not None:
            changes[GRAMMAR] = lambda x: grammar.apply(x, self.form)
        changes[TEMPERATURE] = lambda x: apply_temperature(x, rows.idx_mapping, states.temperature.gpu, form=self.form)
        changes[FILTERS] = lambda x: mask_top_k_top_p(
            x, rows.idx_mapping, states.top_k.gpu, states.top_p.gpu, states.min_p.gpu, form=self.form
        )
        for stage in plan.stages:
            if stage in changes:
                changes[stage](logits)
                yield stage, logits

    def _changes(self, plan: SamplerPlan, rows: SampleRows) -> dict[Stage, Callable[[torch.Tensor], None]]:
        """What changes the logits of this batch between the logprobs and the temperature, in order."""
        index, positions, drafts, lengths = rows.idx_mapping, rows.positions, rows.drafts, plan.logit_bias
        changes: dict[Stage, Callable[[torch.Tensor], None]] = {}
        if lengths is not None:
            changes[BIAS] = lambda x: self.states.logit_bias.apply(x, index, positions, lengths)
        if plan.penalties:
            changes[PENALTIES] = lambda x: self.penalties.apply(x, index, drafts)
        if plan.max_bad_words:
            changes[BAD_WORDS] = lambda x: self.bad_words.apply(x, index, positions, drafts, plan.max_bad_words)
        if plan.processors:
            changes[PROCESSORS] = lambda x: self.processors.apply(plan.processors, x, index, positions, drafts)
        return changes

    def _draw(self, plan: SamplerPlan, logits: torch.Tensor, rows: SampleRows) -> torch.Tensor:
        """A token of each row, i64 [l]; the kernels divide by the temperature and filter on the way."""
        states = self.states
        draw = (states.temperature.gpu, states.seeds.gpu, rows.positions)
        if plan.filters:
            filters = (states.top_k.gpu, states.top_p.gpu, states.min_p.gpu)
            return sample_top_k_top_p(
                logits, rows.idx_mapping, *filters, *draw, purpose=Purpose.SAMPLE, apply_temperature=True,
                form=self.form,
            )  # fmt: skip
        return gumbel_sample(
            logits, rows.idx_mapping, *draw, purpose=Purpose.SAMPLE, all_greedy=plan.all_greedy,
            apply_temperature=True, counters=self._counters, form=self.form,
        )  # fmt: skip
