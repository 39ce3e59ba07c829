"""Runner V1's sampler in a step with drafts: V1's own processing of logits and its own generators, then the rule.

l rows of logits: of each of r requests one for its last known token and one for each draft; N drafts at most.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kernels import flatten_sampled
from kernels.rejection_torch import DraftLaws, count_accepted, prefix_masses

from ..device import Device
from ..sample.filters import apply_grammar_bitmask, apply_min_p, apply_top_k_top_p
from ..sample.logprobs import LogprobsTensors, compute_logprobs
from .input_batch import CachedRequestState, InputBatch
from .sampler import divide_by_temperature, process_logits
from .sampling_metadata import SamplingMetadata
from .step_sampling import StepSampling, make_step_sampling


@dataclass(frozen=True)
class SpecDecodeMetadata:
    """Which rows of a step's hidden states need logits, and whose they are.

    num_draft_tokens i32 [r] on the host; cu_num_logits i32 [r + 1]; logits_indices i64 [l], the last rows of each
    request's query; owner i64 [l], the request of each.
    """

    num_draft_tokens: np.ndarray
    cu_num_logits: torch.Tensor
    logits_indices: torch.Tensor
    owner: torch.Tensor

    @property
    def max_drafts(self) -> int:
        return int(self.num_draft_tokens.max(initial=0))


def make_spec_decode_metadata(
    device: Device, query_start_loc: np.ndarray, num_draft_tokens: Sequence[int]
) -> SpecDecodeMetadata:
    """query_start_loc i32 [>= r + 1]; a request's drafts are the last tokens of its query."""
    drafts = np.array(num_draft_tokens, dtype=np.int32)
    num_logits, r = drafts + 1, len(drafts)
    cu = np.zeros(r + 1, dtype=np.int32)
    np.cumsum(num_logits, out=cu[1:])
    owner = np.repeat(np.arange(r, dtype=np.int64), num_logits)
    first = query_start_loc[1 : r + 1] - num_logits
    indices = (first - cu[:-1]).astype(np.int64)[owner] + np.arange(cu[-1])
    return SpecDecodeMetadata(drafts, *(device.to_device(x) for x in (cu, indices, owner)))


def make_drafted_sampling(
    batch: InputBatch,
    spec: SpecDecodeMetadata,
    drafts: Sequence[Sequence[int]] | None,
    discarded: frozenset[int],
    grammar: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[SamplingMetadata, StepSampling]:
    """What the sampler needs of each of the l rows of logits; `of_logits` makes it so on the stream.

    A row behind j drafts is that of a request which has those tokens.

    Args:
        drafts: None where the host doesn't know them, which it must if `batch.needs_output_tokens`.
        grammar: rows of the logits i64 [n] and bitmask i32 [n, ceil(V / 32)].
    """
    metadata = batch.sampling_metadata
    assert metadata is not None
    if _differs_by_row(batch, metadata):
        if drafts is None and batch.needs_output_tokens:
            raise ValueError(
                "penalties, bad words and logits processors look at the drafts: fetch them to the host first"
            )
        if drafts is None:  # how many there are is enough
            drafts = [[0] * int(count) for count in spec.num_draft_tokens]
        rows = _with_drafts(batch, drafts)
        assert rows.sampling_metadata is not None
        step = dataclasses.replace(make_step_sampling(rows, frozenset()), discarded=discarded, grammar=grammar)
        return dataclasses.replace(rows.sampling_metadata, generators=metadata.generators), step
    return metadata, StepSampling(discarded=discarded, grammar=grammar)


def of_logits(metadata: SamplingMetadata, spec: SpecDecodeMetadata) -> SamplingMetadata:
    """Called on the stream, for the values are copied there: metadata of r requests becomes that of their l rows of
    logits; that of l rows stays."""
    if metadata.temperature.shape == spec.owner.shape:
        return metadata

    def of_rows(values: torch.Tensor | None) -> torch.Tensor | None:
        return None if values is None else values[spec.owner]

    return dataclasses.replace(
        metadata,
        temperature=metadata.temperature[spec.owner],
        top_p=of_rows(metadata.top_p),
        top_k=of_rows(metadata.top_k),
        min_p=of_rows(metadata.min_p),
    )


def _differs_by_row(batch: InputBatch, metadata: SamplingMetadata) -> bool:
    return bool(
        batch.needs_output_tokens
        or metadata.allowed_token_ids is not None
        or metadata.logit_bias is not None
        or any(batch.params[row].min_tokens for row in range(batch.num_reqs))
    )


def _with_drafts(batch: InputBatch, drafts: Sequence[Sequence[int]]) -> InputBatch:
    """A batch of l requests: each of `batch`, and again with its first draft, its first two, ..."""
    num_rows = sum(len(own) + 1 for own in drafts)
    rows = InputBatch(batch.device, num_rows, batch.max_model_len + max(map(len, drafts)), 1, batch.vocab_size)
    for row, own in enumerate(drafts):
        tokens = batch.token_ids_cpu[row, : batch.num_tokens[row]].tolist()
        prompt_len = int(batch.num_prompt_tokens[row])
        for j in range(len(own) + 1):
            rows.add_request(
                CachedRequestState(
                    req_id=f"{row}+{j}",
                    prompt_token_ids=tokens[:prompt_len],
                    output_token_ids=[*tokens[prompt_len:], *own[:j]],
                    block_ids=[],
                    num_computed_tokens=0,
                    sampling_params=batch.params[row],
                    stop_token_ids=batch.stop_ids[row],
                    generator=None,
                )
            )
    rows.refresh_metadata()
    return rows


@dataclass(frozen=True)
class RejectionSamplerOutput:
    """`sampled` i64 [r, N + 1]: accepted drafts and one token more, then -1. `num_sampled` i32 [r] of them. `logprobs`
    row by row of the logits: those of request i begin at `cu_num_logits[i]`. p, q and u of each draft f32 [r, N]."""

    sampled: torch.Tensor
    num_sampled: torch.Tensor
    logprobs: LogprobsTensors | None
    target_probs: torch.Tensor
    draft_probs: torch.Tensor
    uniforms: torch.Tensor


def rejection_sample(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    spec: SpecDecodeMetadata,
    metadata: SamplingMetadata,
    step: StepSampling,
    generator: torch.Generator,
    *,
    draft_logits: torch.Tensor | None = None,
    method: str = "standard",
    acceptance_rates: torch.Tensor | None = None,
) -> RejectionSamplerOutput:
    """Called on the stream: accept a prefix of each request's drafts and draw one token more.

    Args:
        logits: f32 [l, V], narrowed in place by grammars.
        token_ids: i64 or i32 [l], the input token of each row; a draft that is -1 ends its request's drafts.
        metadata, step: of `make_drafted_sampling`. A discarded request's own generator is not advanced.
        generator: for requests without a seed.
        draft_logits: f32 [r, N, V], what each request's drafts were drawn from; None for drafts that were not drawn.
        method, acceptance_rates: as in `kernels.rejection_sample`.
    """
    metadata = of_logits(metadata, spec)
    if step.grammar is not None:
        apply_grammar_bitmask(logits, *step.grammar)
    raw = logits
    logits = _processed(logits, metadata, step)
    begin, last = spec.cu_num_logits[:-1].long(), spec.cu_num_logits[1:].long() - 1
    greedy = metadata.temperature[begin] == 0
    k = torch.arange(spec.max_drafts, device=logits.device)
    row = torch.minimum(begin.unsqueeze(1) + k, last.unsqueeze(1))
    drafts = torch.where(row < last.unsqueeze(1), token_ids[(row + 1).clamp_(max=len(token_ids) - 1)].long(), -1)
    is_draft = (drafts >= 0).cumprod(dim=1).bool()
    laws = DraftLaws(logits, row, draft_logits, metadata.all_greedy)
    p, q = laws.probabilities(torch.where(is_draft, drafts, 0), greedy)
    u = torch.empty_like(p).uniform_(generator=generator)
    for index, own in metadata.generators.items():
        if index not in step.discarded:
            u[index, : int(spec.num_draft_tokens[index])].uniform_(generator=own)
    masses, left = torch.ones_like(p), None
    if method == "block":
        masses = prefix_masses(p, q)[:, :-1]
        left = laws.residual_masses(masses, p, greedy)
    accepted = count_accepted(is_draft, p, q, u, method, left, acceptance_rates)
    own_token = laws.best[begin + accepted]
    if not metadata.all_greedy:
        logits = logits[begin + accepted]
        if spec.max_drafts:
            is_rejected = accepted < is_draft.sum(dim=1)
            logits = laws.residual(logits, drafts, masses, accepted, is_rejected & ~greedy)
        probs = logits.softmax(dim=-1)
        noise = torch.empty_like(probs).exponential_(generator=generator)
        for index, own in metadata.generators.items():
            if index not in step.discarded:
                noise[index].exponential_(generator=own)
        own_token = torch.where(greedy, own_token, probs.div_(noise).argmax(dim=-1))
    number = torch.arange(spec.max_drafts + 1, device=logits.device)
    padded = torch.cat([drafts, own_token.unsqueeze(1)], dim=1)
    sampled = torch.where(number < accepted.unsqueeze(1), padded, -1)
    sampled.scatter_(1, accepted.unsqueeze(1), own_token.unsqueeze(1))
    logprobs = None
    if metadata.max_num_logprobs is not None:
        tokens = flatten_sampled(sampled, spec.cu_num_logits, raw.shape[0], form="torch")
        logprobs = compute_logprobs(raw, tokens, metadata.max_num_logprobs)
    return RejectionSamplerOutput(sampled, (accepted + 1).int(), logprobs, p, q, u)


def _processed(logits: torch.Tensor, metadata: SamplingMetadata, step: StepSampling) -> torch.Tensor:
    """The logits of the law that is to come out: behind temperature and filters."""
    logits = process_logits(logits, metadata, step)
    if metadata.all_greedy:
        return logits
    logits = divide_by_temperature(logits, metadata)
    if metadata.min_p is not None:
        apply_min_p(logits, metadata.min_p)
    return apply_top_k_top_p(logits, metadata.top_k, metadata.top_p)
