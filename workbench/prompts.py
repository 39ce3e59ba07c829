"""What a session is asked to run: prompts in any of their forms, settled into requests with names."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine import SamplingParams

KEYS = ("prompt", "prompt_token_ids", "max_tokens", "priority", "sampling_params", "arrive_at_step", "chat")


@dataclass(frozen=True)
class SessionRequest:
    """One request of a session, the same for every runner. `arrive_at_step` counts from 1."""

    request_id: str
    prompt: str | dict[str, Any]
    """As `LLM.add` takes it: a text, or `{"prompt_token_ids": [...]}`."""
    sampling_params: SamplingParams
    priority: int = 0
    arrive_at_step: int = 1
    chat: bool = False
    """Whether the text is a user's message, to go through the model's chat template."""


def request_name(index: int) -> str:
    """The id of the index-th request: A, B, … Z, A2, B2, …"""
    return chr(ord("A") + index % 26) + ("" if index < 26 else str(index // 26 + 1))


def parse_prompts(
    prompts: Any,
    sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    first: int = 0,
    chat: bool = False,
) -> list[SessionRequest]:
    """A text, a dict, or a list of either as requests named from the `first`-th name on.

    Raises TypeError or ValueError that names the prompt and what is possible.
    """
    if not isinstance(prompts, str | Mapping | Sequence):
        raise TypeError(f"prompts are {type(prompts).__name__}: give a text, a dict, or a list of either")
    items = [prompts] if isinstance(prompts, str | Mapping) else list(prompts)
    given = list(sampling_params) if isinstance(sampling_params, Sequence) else [sampling_params] * len(items)
    if len(given) != len(items):
        raise ValueError(f"{len(given)} sampling_params for {len(items)} prompts: give one for all, or one each")
    return [_parse(item, params, first + i, chat) for i, (item, params) in enumerate(zip(items, given, strict=True))]


def _parse(item: Any, params: SamplingParams | None, index: int, chat: bool) -> SessionRequest:
    name = request_name(index)
    if isinstance(item, str):
        item = {"prompt": item}
    elif isinstance(item, Sequence) and all(isinstance(token, int) for token in item):
        raise TypeError(f'prompt {name} is a list of ids: write it as {{"prompt_token_ids": [...]}}')
    if not isinstance(item, Mapping):
        raise TypeError(f"prompt {name} is {type(item).__name__}: give a text, or a dict with {', '.join(KEYS)}")
    for key in item:
        if key not in KEYS:
            near = difflib.get_close_matches(str(key), KEYS, n=1)
            hint = f", did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"prompt {name}: unknown key {key!r}{hint} Possible are {', '.join(KEYS)}")
    if ("prompt" in item) == ("prompt_token_ids" in item):
        raise ValueError(f"prompt {name}: give either 'prompt' (a text) or 'prompt_token_ids' (a list of ids)")
    arrive = item.get("arrive_at_step", 1)
    if not isinstance(item.get("prompt", ""), str):
        raise TypeError(f"prompt {name}: 'prompt' is {type(item['prompt']).__name__}, but must be a text")
    if isinstance(arrive, bool) or not isinstance(arrive, int) or arrive < 1:
        raise ValueError(
            f"prompt {name}: arrive_at_step={arrive!r} must be a whole number of at least 1, the first step"
        )
    chosen = item.get("sampling_params") or params or SamplingParams(temperature=0.0, max_tokens=32)
    if not isinstance(chosen, SamplingParams):
        raise TypeError(f"prompt {name}: sampling_params must be a SamplingParams, got {type(chosen).__name__}")
    if "max_tokens" in item:
        chosen = dataclasses.replace(chosen, max_tokens=item["max_tokens"])
    if chosen.n != 1:
        raise ValueError(f"prompt {name}: n={chosen.n}, but a session follows single texts; repeat the prompt instead")
    prompt = item["prompt"] if "prompt" in item else {"prompt_token_ids": list(item["prompt_token_ids"])}
    return SessionRequest(name, prompt, chosen, item.get("priority", 0), arrive, bool(item.get("chat", chat)))
