"""Makes the requests of one prompt: checked, in token ids, with parameters as this model has them, and one for each of
n completions."""

from __future__ import annotations

import dataclasses
import itertools
import time

from .core import EngineCore
from .models import LoadedModel
from .output_processor import ParentRequest
from .prompts import Prompt, read_prompt
from .request import Request
from .sample.front_door import settle_params
from .sample.structured_output import StructuredOutputRequest
from .sampling_checks import is_whole
from .sampling_params import SamplingParams


class RequestMaker:
    """For `core`, which runs `loaded`; it queues nothing there."""

    def __init__(self, core: EngineCore, loaded: LoadedModel) -> None:
        self._core, self._loaded = core, loaded
        self._counter = itertools.count()

    def make(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None,
        request_id: str | None,
        priority: int = 0,
        final_only: bool = False,
    ) -> tuple[ParentRequest, list[Request]]:
        """Raises ValueError or TypeError for a prompt, parameters or an id that can't be taken."""
        params = sampling_params if sampling_params is not None else SamplingParams()
        if not isinstance(params, SamplingParams):
            raise TypeError(f"sampling_params must be a SamplingParams, got {type(params).__name__}")
        if not is_whole(priority) or not -(2**63) <= priority < 2**63:
            raise ValueError(f"priority={priority!r}: must be a 64-bit whole number (the smaller, the earlier)")
        if request_id is None:
            request_id = self._free_id(params.n)
        elif not isinstance(request_id, str) or not request_id:
            raise TypeError(f"request_id={request_id!r}: must be a string that is not empty")
        elif self._core.output_processor.has_parent(request_id):
            raise ValueError(f"request id {request_id!r} is in use by an unfinished request; choose another")
        text, token_ids = read_prompt(prompt, self._loaded)
        params, stop_ids = self._settle(params)
        max_tokens = params.max_tokens
        if max_tokens is None:
            max_tokens = max(1, self._core.scheduler.max_new_tokens(len(token_ids)))
        parent = ParentRequest(request_id, text, token_ids, params, time.monotonic(), final_only)
        requests = [
            Request(
                request_id=child_id,
                prompt_token_ids=token_ids,
                sampling_params=child_params(params, index),
                max_tokens=max_tokens,
                stop_token_ids=stop_ids,
                priority=priority,
                structured_output=self._grammar(params, stop_ids),
            )
            for index, child_id in enumerate(_child_ids(request_id, params.n))
        ]
        return parent, requests

    def _free_id(self, n: int) -> str:
        """The next number that names no unfinished request, nor any of its `n` completions one."""
        taken = self._core.output_processor
        while True:
            request_id = str(next(self._counter))
            if not taken.has_parent(request_id) and not any(map(taken.has_child, _child_ids(request_id, n))):
                return request_id

    def _settle(self, params: SamplingParams) -> tuple[SamplingParams, frozenset[int]]:
        """The parameters as this model has them, and the ids that end an answer."""
        tokenizer, config = self._loaded.tokenizer, self._loaded.config
        eos_token_ids = tokenizer.eos_token_ids if tokenizer else config.eos_token_ids
        settled, stop_ids = settle_params(params, config.vocab_size, tokenizer, eos_token_ids)
        if settled.structured_outputs is not None:
            spec = self._core.config.speculative_config
            if spec is not None and not spec.is_lossless:
                raise ValueError(
                    "structured_outputs can't be kept with rejection_sample_method='synthetic', which accepts drafts "
                    "whatever the grammar forbids; use 'standard' or 'block', or an engine without speculative_config"
                )
            self._core.structured_output.check(settled.structured_outputs)
        return settled, stop_ids

    def _grammar(self, params: SamplingParams, stop_ids: frozenset[int]) -> StructuredOutputRequest | None:
        if params.structured_outputs is None:
            return None
        return self._core.structured_output.start(params.structured_outputs, stop_ids)


def _child_ids(request_id: str, n: int) -> list[str]:
    """The scheduler's ids of n completions."""
    return [request_id] if n == 1 else [f"{index}_{request_id}" for index in range(n)]


def child_params(params: SamplingParams, index: int) -> SamplingParams:
    """Completion `index` of n has its own seed, or all would be the same; the first one sees to the prompt's
    logprobs."""
    if params.n == 1:
        return params
    seed = None if params.seed is None else (params.seed + index + 2**63) % 2**64 - 2**63
    prompt_logprobs = params.prompt_logprobs if index == 0 else None
    return dataclasses.replace(params, n=1, seed=seed, prompt_logprobs=prompt_logprobs)
