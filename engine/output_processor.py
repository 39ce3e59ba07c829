"""Sampled tokens to RequestOutputs: text, stop strings, logprobs, times, and the gathering of n completions."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from .detokenizer import Detokenizer
from .hooks import DRAFT_EVENTS, DraftProposed, DraftVerified, Hooks, OutputDelivered, Sampled, SamplingTraced
from .models import Tokenizer
from .request import CompletionOutput, Logprob, Request, RequestMetrics, RequestOutput
from .sample.draft_trace import DraftTrace
from .sample.logprobs import RequestLogprobs
from .sample.trace import SamplingTrace
from .sampling_params import SamplingParams


@dataclass(eq=False)
class ParentRequest:
    """What the caller asked for: `children[i]` makes completion i."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    arrival_time: float
    final_only: bool = False
    """The caller wants the output when it is finished, not after each token."""
    children: list[_Child] = field(default_factory=list)
    first_scheduled_time: float | None = None
    prompt_logprobs: tuple[dict[int, Logprob] | None, ...] | None = None
    """Made when all of them have come."""

    @property
    def finished(self) -> bool:
        return all(child.request.is_finished for child in self.children)


@dataclass(eq=False)
class _Child:
    parent: ParentRequest
    index: int
    request: Request
    detokenizer: Detokenizer | None
    logprobs: list[dict[int, Logprob]] | None
    num_detokenized: int = 0

    @property
    def is_quiet(self) -> bool:
        """Its tokens need no work until it is finished: then its text is made of all of them."""
        return self.parent.final_only and not self.request.sampling_params.stop and self.logprobs is None


class OutputProcessor:
    def __init__(self, tokenizer: Tokenizer | None, hooks: Hooks) -> None:
        self._tokenizer = tokenizer
        self._hooks = hooks
        self._children: dict[str, _Child] = {}
        self._parents: dict[str, ParentRequest] = {}

    def has_parent(self, request_id: str) -> bool:
        return request_id in self._parents

    def has_child(self, request_id: str) -> bool:
        """Whether the scheduler's `request_id` makes a completion of an unfinished request."""
        return request_id in self._children

    def add(self, parent: ParentRequest, requests: list[Request]) -> None:
        self._parents[parent.request_id] = parent
        for index, request in enumerate(requests):
            params = request.sampling_params
            detokenize = self._tokenizer is not None and params.detokenize
            detokenizer = Detokenizer(self._tokenizer, params) if detokenize else None  # type: ignore[arg-type]
            child = _Child(parent, index, request, detokenizer, None if params.logprobs is None else [])
            parent.children.append(child)
            request.quiet = child.is_quiet
            self._children[request.request_id] = child

    @property
    def observed(self) -> bool:
        """Somebody wants every token of every request at once."""
        return self._hooks.wants((Sampled, SamplingTraced, OutputDelivered, *DRAFT_EVENTS))

    def child_ids(self, request_id: str) -> list[str]:
        """The scheduler's ids behind the caller's `request_id`; none if it is unknown or finished."""
        parent = self._parents.get(request_id)
        return [child.request.request_id for child in parent.children] if parent else []

    def mark_scheduled(self, request_ids: list[str]) -> None:
        """Notes the time of a request's first step."""
        for request_id in request_ids:
            parent = self._children[request_id].parent
            if parent.first_scheduled_time is None:
                parent.first_scheduled_time = time.monotonic()

    def process(
        self,
        updates: list[tuple[Request, list[int]]],
        logprobs: dict[str, list[RequestLogprobs]] | None,
        step: int,
        stop: Callable[[Request, str, int], None],
        traces: dict[str, SamplingTrace] | None = None,
        draft_traces: dict[str, DraftTrace] | None = None,
    ) -> list[RequestOutput]:
        """The outputs of `updates`, requests that got tokens in `step`; `stop(request, string, count)` ends one behind
        its first `count` tokens, in which a stop string came. A quiet request may come only when it is finished."""
        touched: dict[str, ParentRequest] = {}
        observed = self.observed
        for request, token_ids in updates:
            child = self._children[request.request_id]
            parent = child.parent
            touched[parent.request_id] = parent
            before = len(child.detokenizer.text) if child.detokenizer else 0
            if (found := self._detokenize(child)) is not None:
                begin = request.num_output_tokens - len(token_ids)
                stop(request, *found)
                token_ids = token_ids[: request.num_output_tokens - begin]
            if child.logprobs is not None and logprobs:
                # The step may have sampled more, behind the token that ends the request.
                entries = logprobs.get(request.request_id, [])[: len(token_ids)]
                child.logprobs.extend(map(self._with_text, entries))
            if request.is_finished and child.detokenizer:
                child.detokenizer.finish()
            if observed:
                self._emit_drafts(request, token_ids, step, (draft_traces or {}).get(request.request_id))
                self._emit(child, token_ids, before, step, (traces or {}).get(request.request_id))
        outputs = []
        for parent in touched.values():
            finished = parent.finished
            if finished or not parent.final_only:
                outputs.append(self.build(parent))
            if finished:
                self.forget(parent.request_id)
        return outputs

    def _detokenize(self, child: _Child) -> tuple[str, int] | None:
        """Makes text of the tokens that have come since the last time; returns the stop string that ends it, and the
        number of the output's tokens that make it."""
        if child.detokenizer is None:
            return None
        request, begin = child.request, child.num_detokenized
        child.num_detokenized = request.num_output_tokens
        # A stop token ends the text and is no part of it.
        end = request.num_output_tokens - (request.finish_reason == "stop")
        for count, token_id in enumerate(request.output_token_ids[begin:end], begin + 1):
            if (found := child.detokenizer.add(token_id)) is not None:
                return found, count
        return None

    def _with_text(self, entry: RequestLogprobs) -> dict[int, Logprob]:
        if self._tokenizer is None:
            return {token: Logprob(lp, rank) for token, (lp, rank) in entry.items()}
        # A model's vocabulary may go beyond the tokenizer's: such a token has no text.
        text, known = self._tokenizer.token_text, self._tokenizer.vocab_size
        return {token: Logprob(lp, rank, text(token) if token < known else None) for token, (lp, rank) in entry.items()}

    def _emit(self, child: _Child, token_ids: list[int], before: int, step: int, trace: SamplingTrace | None) -> None:
        request, hooks = child.request, self._hooks
        first = request.num_tokens - len(token_ids)
        for offset, token_id in enumerate(token_ids):
            hooks.emit(Sampled(*hooks.stamp(), request.request_id, token_id, first + offset, step))
        if trace is not None and token_ids and SamplingTraced in hooks.wanted:
            hooks.emit(SamplingTraced(*hooks.stamp(), request.request_id, first, step, trace))
        text = child.detokenizer.text[before:] if child.detokenizer else ""
        hooks.emit(OutputDelivered(*hooks.stamp(), request.request_id, tuple(token_ids), text, request.finish_reason))

    def _emit_drafts(self, request: Request, token_ids: list[int], step: int, trace: DraftTrace | None) -> None:
        if trace is None or not token_ids:
            return
        hooks, place = self._hooks, (request.request_id, request.num_tokens - len(token_ids), step)
        if DraftProposed in hooks.wanted:
            drafts = (trace.token_ids, trace.draft_probs, trace.confidences)
            hooks.emit(DraftProposed(*hooks.stamp(), *place, *drafts))
        if DraftVerified in hooks.wanted:
            stamp, probs = hooks.stamp(), (trace.target_probs, trace.uniforms)
            hooks.emit(DraftVerified(*stamp, *place, trace.method, *probs, trace.num_accepted, trace.next_token_id))

    def abort(self, request_id: str) -> RequestOutput | None:
        """Drops a request whose children have just been ended; its last output, or None if it is unknown or
        finished."""
        parent = self._parents.get(request_id)
        if parent is None:
            return None
        for child in parent.children:
            if child.detokenizer and not child.detokenizer.finished:
                self._detokenize(child)
                child.detokenizer.finish()
        self.forget(request_id)
        return self.build(parent)

    def forget(self, request_id: str) -> None:
        """Drops a request that has finished or was aborted."""
        parent = self._parents.pop(request_id, None)
        for child in parent.children if parent else ():
            self._children.pop(child.request.request_id, None)

    def _prompt_logprobs(self, parent: ParentRequest) -> tuple[dict[int, Logprob] | None, ...] | None:
        if parent.params.prompt_logprobs is None or parent.prompt_logprobs is not None:
            return parent.prompt_logprobs
        # The first completion's request sees to them.
        entries = parent.children[0].request.prompt_logprobs or [None]
        result = tuple(None if entry is None else self._with_text(entry) for entry in entries)
        if len(result) == len(parent.prompt_token_ids):
            parent.prompt_logprobs = result
        return result

    def build(self, parent: ParentRequest) -> RequestOutput:
        outputs = tuple(self._completion(child) for child in parent.children)
        requests = [child.request for child in parent.children]
        first = [request.first_token_time for request in requests if request.first_token_time is not None]
        accepted = tuple(count for request in requests for count in request.accepted_per_round)
        last = [request.last_token_time for request in requests if request.last_token_time is not None]
        return RequestOutput(
            request_id=parent.request_id,
            prompt=parent.prompt,
            prompt_token_ids=tuple(parent.prompt_token_ids),
            outputs=outputs,
            finished=parent.finished,
            num_cached_tokens=max(0, requests[0].num_cached_tokens),
            metrics=RequestMetrics(
                parent.arrival_time, parent.first_scheduled_time, min(first, default=None), max(last, default=None),
                sum(request.num_preemptions for request in requests),
                num_drafts=len(accepted), num_draft_tokens=sum(request.num_draft_tokens for request in requests),
                num_accepted_tokens=sum(accepted), accepted_per_round=accepted,
            ),
            prompt_logprobs=self._prompt_logprobs(parent),
        )  # fmt: skip

    def _completion(self, child: _Child) -> CompletionOutput:
        request = child.request
        return CompletionOutput(
            index=child.index,
            text=child.detokenizer.visible_text if child.detokenizer else "",
            token_ids=tuple(request.output_token_ids),
            logprobs=None if child.logprobs is None else tuple(child.logprobs),
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
        )
