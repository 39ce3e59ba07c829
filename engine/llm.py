"""LLM: the front door. Named and behaving as vLLM's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from os import PathLike
from typing import Any

from huggingface_hub.utils import tqdm

from .config import EngineConfig
from .core import EngineCore
from .hooks import Hooks
from .interrupts import deferred_interrupt
from .loading import load_for, sharing
from .models import LoadedModel
from .one_thread import OneThread
from .prompts import Prompt, as_params, as_prompts, tokenizer_of
from .request import RequestOutput
from .request_maker import RequestMaker
from .sampling_params import SamplingParams

Message = Mapping[str, str]


class LLM:
    """A model, a scheduler and a runner.

    Args:
        model: a folder or file of a Llama, Qwen2 or Qwen3 checkpoint (safetensors or GGUF), a hub name, or the name of
            a built-in config with `load_format="dummy"`. Left out: SmolLM2-135M-Instruct.
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
            kwargs = sharing(kwargs, loaded)
        config = EngineConfig.from_kwargs(**kwargs)
        if loaded is None:
            loaded = load_for(config)
        self.loaded = loaded
        self.core = EngineCore(config, loaded, keep_finished)
        self._maker = RequestMaker(self.core, loaded)
        # Outputs of requests that somebody is reading one by one.
        self._streams: dict[str, list[RequestOutput]] = {}
        self._untaken: dict[str, RequestOutput] = {}
        """The last output of each request that `generate` or a stream made in passing, for the next `step()`."""
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
        return tokenizer_of(self.loaded)

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
                    for output in self._step():
                        if output.request_id not in own:
                            self._keep(output)
                        elif output.finished:
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
                    self._step_for_others()
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
        with self._one_thread:
            parent, requests = self._maker.make(prompt, sampling_params, request_id, priority, final_only)
            self.core.add_request(parent, requests)
        return parent.request_id

    def check(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, request_id: str, priority: int = 0
    ) -> None:
        """Raises what `add` would raise, and queues nothing."""
        with self._one_thread:
            _, requests = self._maker.make(prompt, sampling_params, request_id, priority)
            self.core.check_requests(requests)

    def step(self) -> list[RequestOutput]:
        """One engine step; the outputs that arrived in it, behind the last one of each request of `add` that a call of
        `generate`, `chat` or `stream` has computed on its way since the last step."""
        with self._one_thread:
            outputs = self._step()
            untaken, self._untaken = self._untaken, {}
        return [*untaken.values(), *outputs] if untaken else outputs

    def abort(self, request_ids: str | Sequence[str]) -> None:
        """Ends one request or several; unknown and finished ids are ignored. A stream of one ends with finish_reason
        "abort"."""
        request_ids = [request_ids] if isinstance(request_ids, str) else request_ids
        with self._one_thread:
            aborted = self.core.abort(request_ids)
            for output in aborted:
                self._untaken.pop(output.request_id, None)
            self._pass_on(aborted)

    def close(self) -> None:
        """Ends the engine's threads and lets go of its memory; the weights stay with who shares them."""
        self.core.close()

    def __repr__(self) -> str:
        runner = "V2" if self.core.use_v2 else "V1"
        return f"<LLM {self.loaded.name}, {runner} on {self.config.torch_device}>"

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- helpers

    def _step(self) -> list[RequestOutput]:
        with self._one_thread:
            outputs = self.core.step()
            self._pass_on(outputs)
        return outputs

    def _step_for_others(self) -> None:
        """A step by who wants none of its outputs for himself: streams have theirs, `step()` will have the rest."""
        for output in self._step():
            self._keep(output)

    def _keep(self, output: RequestOutput) -> None:
        if output.request_id not in self._streams:
            self._untaken[output.request_id] = output

    def _pass_on(self, outputs: Sequence[RequestOutput]) -> None:
        for output in outputs:
            if output.request_id in self._streams:
                self._streams[output.request_id].append(output)

    def _settle(self) -> None:
        """Nothing to do any more: fetches the step that ran ahead and has the runner drop its rows, so that the engine
        rests empty."""
        core = self.core
        while not core.has_unfinished() and (core.in_flight or core.scheduler.has_requests()):
            self._step_for_others()
