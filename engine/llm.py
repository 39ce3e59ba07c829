"""LLM: the front door. Named and behaving as vLLM's."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from os import PathLike
from typing import Any

from huggingface_hub.utils import tqdm

from .config import ConfigError, EngineConfig
from .core import EngineCore
from .cpu_stream import run_on_compute_worker
from .hooks import Hooks
from .interrupts import deferred_interrupt
from .models import LoadedModel, load_model, resolve_model
from .one_thread import OneThread
from .output_processor import ParentRequest
from .prompts import Prompt, as_params, as_prompts, as_token_ids, check_prompt
from .request import Request, RequestOutput
from .sample.front_door import settle_params
from .sample.structured_output import StructuredOutputRequest
from .sampling_checks import is_whole
from .sampling_params import SamplingParams

Message = Mapping[str, str]


class LLM:
    """A model, a scheduler and a runner.

    Args:
        model: a folder or file of a Llama, Qwen2 or Qwen3 checkpoint (safetensors or GGUF), a hub name, or the name
            of a built-in config with `load_format="dummy"`. Left out: SmolLM2-135M-Instruct.
        loaded: another engine's `llm.loaded`, to share its weights; then `model`, `tokenizer` and `load_format` stay
            out.
        keep_finished: finished requests stay visible in snapshots (the workbench's wish).
        **kwargs: every field of `EngineConfig`; an unknown one raises ConfigError and names the closest.
    """

    def __init__(
        self,
        model: str | PathLike[str] | None = None,
        *,
        loaded: LoadedModel | None = None,
        keep_finished: bool = False,
        **kwargs: Any,
    ) -> None:
        if model is not None:
            kwargs["model"] = model
        if loaded is not None:
            kwargs = _with_loaded(kwargs, loaded)
        config = EngineConfig.from_kwargs(**kwargs)
        if loaded is None:
            loaded = _load(config)
        self.loaded = loaded
        self.core = EngineCore(config, loaded, keep_finished)
        self._counter = itertools.count()
        # Outputs of requests that somebody is reading one by one.
        self._streams: dict[str, list[RequestOutput]] = {}
        self._one_thread = OneThread()

    @property
    def config(self) -> EngineConfig:
        """The settled configuration."""
        return self.core.config

    @property
    def hooks(self) -> Hooks:
        return self.core.hooks

    def get_tokenizer(self) -> Any:
        """The checkpoint's tokenizer; ConfigError if the engine was made without one."""
        if self.loaded.tokenizer is None:
            raise ConfigError(
                f"{self.loaded.name!r} runs without a tokenizer (skip_tokenizer_init, or a dummy model): give "
                'prompts as {"prompt_token_ids": [...]}, or load a tokenizer'
            )
        return self.loaded.tokenizer

    # -- whole answers

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Completes every prompt; the results are in the prompts' order.

        A prompt is a string or `{"prompt_token_ids": [...]}`. All prompts are checked before any is run. When it is
        interrupted or fails, its requests are aborted and the engine can be used again.
        """
        batch = as_prompts(prompts)
        params = as_params(sampling_params, len(batch))
        with self._one_thread:
            return self._generate(batch, params, use_tqdm)

    def _generate(self, batch: list[Prompt], params: list[SamplingParams], use_tqdm: bool) -> list[RequestOutput]:
        ids: list[str] = []
        results: dict[str, RequestOutput] = {}
        bar = tqdm(total=len(batch), desc="Processed prompts", disable=not use_tqdm)
        try:
            for prompt, one in zip(batch, params, strict=True):
                with deferred_interrupt():
                    ids.append(self.add(prompt, one, final_only=True))
            own = frozenset(ids)
            with deferred_interrupt() as interrupt, self.core.device.scope():
                while len(results) < len(ids):
                    for output in self.step():
                        if output.finished and output.request_id in own:
                            results[output.request_id] = output
                            bar.update()
                    interrupt.raise_if_received()
        finally:
            bar.close()
            self.abort([request_id for request_id in ids if request_id not in results])
        self._settle()
        return [results[request_id] for request_id in ids]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """As `generate`, for one conversation or a list of them, through the checkpoint's chat template."""
        if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
            raise TypeError(
                f"chat takes a list of {{'role': ..., 'content': ...}}, or a list of such lists, got "
                f"{type(messages).__name__}"
            )
        if not messages:
            raise ValueError("chat: no messages; give a list of {'role': ..., 'content': ...}")
        conversations = [messages] if isinstance(messages[0], Mapping) else messages
        prompts = [
            self.chat_prompt(m, add_generation_prompt, chat_template_kwargs)  # type: ignore[arg-type]
            for m in conversations
        ]
        return self.generate(prompts, sampling_params, use_tqdm)

    def chat_prompt(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """The prompt that `chat` would run. The template writes its own special tokens, so none are added."""
        tokenizer = self.get_tokenizer()
        text = tokenizer.apply_chat_template(
            messages, add_generation_prompt=add_generation_prompt, **(chat_template_kwargs or {})
        )
        return {"prompt": text, "prompt_token_ids": tokenizer.encode(text, add_special_tokens=False)}

    # -- token by token

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """Yields the growing output after each step that gave the request a token. Closing the iterator aborts the
        request."""
        request_id, finished = None, False
        try:
            with deferred_interrupt():
                request_id = self.add(prompt, sampling_params)
                buffer = self._streams[request_id] = []
            while not finished:
                while not buffer:
                    self.step()
                output = buffer.pop(0)
                finished = output.finished
                yield output
        finally:
            if request_id is not None:
                del self._streams[request_id]
                if not finished:
                    self.abort([request_id])
        self._settle()

    def add(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        final_only: bool = False,
    ) -> str:
        """Queues one request for the next `step()` and returns its id. With `final_only` a step returns its output
        when it is finished, and nothing before. Raises ValueError, with nothing queued, if it can't run."""
        parent, requests = self._requests(prompt, sampling_params, request_id, priority, final_only)
        with self._one_thread:
            self.core.add_request(parent, requests)
        return parent.request_id

    def check(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, request_id: str, priority: int = 0
    ) -> None:
        """Raises what `add` would raise, and queues nothing."""
        _, requests = self._requests(prompt, sampling_params, request_id, priority)
        self.core.check_requests(requests)

    def _requests(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None,
        request_id: str | None,
        priority: int = 0,
        final_only: bool = False,
    ) -> tuple[ParentRequest, list[Request]]:
        params = sampling_params if sampling_params is not None else SamplingParams()
        if not isinstance(params, SamplingParams):
            raise TypeError(f"sampling_params must be a SamplingParams, got {type(params).__name__}")
        if request_id is None:
            request_id = str(next(self._counter))
        if not isinstance(request_id, str) or not request_id:
            raise TypeError(f"request_id={request_id!r}: must be a string that is not empty")
        if not is_whole(priority) or not -(2**63) <= priority < 2**63:
            raise ValueError(f"priority={priority!r}: must be a 64-bit whole number (the smaller, the earlier)")
        if self.core.output_processor.has_parent(request_id):
            raise ValueError(f"request id {request_id!r} is in use by an unfinished request; choose another")
        text, token_ids = self._tokenize(prompt)
        params, stop_ids = self._settle_params(params)
        max_tokens = params.max_tokens
        if max_tokens is None:
            max_tokens = max(1, self.core.scheduler.max_new_tokens(len(token_ids)))
        parent = ParentRequest(request_id, text, token_ids, params, time.monotonic(), final_only)
        requests = [
            Request(
                request_id=request_id if params.n == 1 else f"{index}_{request_id}",
                prompt_token_ids=token_ids,
                sampling_params=_child_params(params, index),
                max_tokens=max_tokens,
                stop_token_ids=stop_ids,
                priority=priority,
                structured_output=self._grammar(params, stop_ids),
            )
            for index in range(params.n)
        ]
        return parent, requests

    def step(self) -> list[RequestOutput]:
        """One engine step; the outputs that arrived in it."""
        with self._one_thread:
            outputs = self.core.step()
            self._pass_on(outputs)
        return outputs

    def abort(self, request_ids: str | Sequence[str]) -> None:
        """Ends one request or several; unknown and finished ids are ignored. A stream of one ends with finish_reason
        "abort"."""
        request_ids = [request_ids] if isinstance(request_ids, str) else request_ids
        with self._one_thread:
            self._pass_on(self.core.abort(request_ids))

    def close(self) -> None:
        """Ends the engine's threads and lets go of its memory; the weights stay with who shares them."""
        self.core.close()

    def __repr__(self) -> str:
        config = self.config
        return f"<LLM {self.loaded.name}, {'V2' if self.core.use_v2 else 'V1'} on {config.torch_device}>"

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- helpers

    def _pass_on(self, outputs: Sequence[RequestOutput]) -> None:
        for output in outputs:
            if output.request_id in self._streams:
                self._streams[output.request_id].append(output)

    def _settle(self) -> None:
        """Nothing to do any more: fetches the step that ran ahead and has the runner drop its rows, so that the engine
        rests empty."""
        core = self.core
        while not core.has_unfinished() and (core.in_flight or core.scheduler.has_requests()):
            self.step()

    def _tokenize(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        check_prompt(prompt)
        vocab_size = self.loaded.config.vocab_size
        if isinstance(prompt, str):
            text: str | None = prompt
        else:
            text = prompt.get("prompt")
            if prompt.get("prompt_token_ids") is not None:
                return text, as_token_ids(prompt["prompt_token_ids"], vocab_size)
        assert text is not None, "checked"
        token_ids = as_token_ids(self.get_tokenizer().encode(text), vocab_size)
        if not token_ids:
            raise ValueError("the prompt is empty: give some text, or prompt_token_ids with at least one id")
        return text, token_ids

    def _grammar(self, params: SamplingParams, stop_ids: frozenset[int]) -> StructuredOutputRequest | None:
        if params.structured_outputs is None:
            return None
        return self.core.structured_output.start(params.structured_outputs, stop_ids)

    def _settle_params(self, params: SamplingParams) -> tuple[SamplingParams, frozenset[int]]:
        tokenizer, config = self.loaded.tokenizer, self.loaded.config
        eos_token_ids = tokenizer.eos_token_ids if tokenizer else config.eos_token_ids
        settled, stop_ids = settle_params(params, config.vocab_size, tokenizer, eos_token_ids)
        if settled.structured_outputs is not None:
            spec = self.config.speculative_config
            if spec is not None and not spec.is_lossless:
                raise ValueError(
                    "structured_outputs can't be kept with rejection_sample_method='synthetic', which accepts drafts "
                    "whatever the grammar forbids; use 'standard' or 'block', or an engine without speculative_config"
                )
            self.core.structured_output.check(settled.structured_outputs)
        return settled, stop_ids


def _with_loaded(kwargs: dict[str, Any], loaded: LoadedModel) -> dict[str, Any]:
    """The keywords of an engine on the weights of `loaded`; ConfigError if they ask for another model, dtype or
    device."""
    taken = [key for key in ("model", "tokenizer", "load_format") if key in kwargs]
    if taken:
        raise ConfigError(
            f"{', '.join(taken)} can't be given together with loaded=, which brings the model {loaded.name!r}"
        )
    weight = loaded.model.embed_tokens.weight
    own = {"dtype": str(weight.dtype).removeprefix("torch."), "device": str(weight.device)}
    asked = {key: kwargs.get(key, "auto") for key in own}
    merged = kwargs | {key: own[key] for key, value in asked.items() if value == "auto"}
    config = EngineConfig.from_kwargs(**merged)
    if config.torch_dtype != weight.dtype or config.torch_device != weight.device:
        raise ConfigError(
            f"dtype={asked['dtype']!r}, device={asked['device']!r} with loaded=: "
            f"the weights of {loaded.name!r} are {own['dtype']} on "
            f"{own['device']}; leave dtype and device out, or load the model anew"
        )
    return merged | {"model": loaded.name, "load_format": loaded.load_format}


def _load(config: EngineConfig) -> LoadedModel:
    def load() -> LoadedModel:
        return load_model(
            config.model, tokenizer=config.tokenizer, dtype=config.torch_dtype, device=config.torch_device,
            load_format=config.load_format, seed=config.seed, skip_tokenizer_init=config.skip_tokenizer_init,
        )  # fmt: skip

    if config.torch_device.type == "cuda":
        return load()
    if config.load_format == "auto":
        resolve_model(config.model)  # here, where a Ctrl-C ends a download
    return run_on_compute_worker(load)


def _child_params(params: SamplingParams, index: int) -> SamplingParams:
    """Completion `index` of n has its own seed, or all would be the same; the first one sees to the prompt's
    logprobs."""
    if params.n == 1:
        return params
    seed = None if params.seed is None else (params.seed + index + 2**63) % 2**64 - 2**63
    prompt_logprobs = params.prompt_logprobs if index == 0 else None
    return dataclasses.replace(params, n=1, seed=seed, prompt_logprobs=prompt_logprobs)
