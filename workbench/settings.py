"""What the dashboard's form holds: plain values, and their way into a session's arguments and back."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from typing import Any

from engine import SamplingParams

from .prompts import parse_prompts

PROMPTS = (
    "The three primary colours are",
    {"prompt": "def fibonacci(n):", "max_tokens": 7},
    {"prompt": "The three primary colours of light are", "arrive_at_step": 4},
    "Once upon a time,\n",
)
"""What `open_workbench()` runs. C comes later and begins as A does, so its beginning is found in the prefix cache; B
ends early, so V1 fills its row with another request while V2 leaves it free."""
SAMPLING = SamplingParams(temperature=0.0, max_tokens=24, seed=0)
ENGINE: dict[str, Any] = {
    "block_size": 4,
    "num_gpu_blocks_override": 64,
    "max_num_batched_tokens": 16,
    "max_num_seqs": 6,
    "max_model_len": 256,
}
"""Small, so that a step shows chunks, blocks and free rows at a glance. A keyword of `open_workbench` comes first."""

SAMPLING_FIELDS = {"temperature": float, "top_p": float, "seed": int, "max_tokens": int}
_MARKS = {"@": "arrive_at_step", "#": "max_tokens"}
_MARK = re.compile(r"([@#])(\d+) ")
ENGINE_FIELDS = ("block_size", "num_gpu_blocks_override", "max_num_batched_tokens", "max_num_seqs")


def engine_defaults(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """`ENGINE` with these keywords over it; a budget that is left out covers the rows that are asked for."""
    merged = {**ENGINE, **keywords}
    if "max_num_batched_tokens" not in keywords and isinstance(merged["max_num_seqs"], int):
        merged["max_num_batched_tokens"] = max(ENGINE["max_num_batched_tokens"], merged["max_num_seqs"])
    return merged


def to_form(
    prompts: Any, runners: Any, sampling: SamplingParams, chat: bool, engine: Mapping[str, Any]
) -> dict[str, Any]:
    """The form's values for these arguments of a session."""
    items = [prompts] if isinstance(prompts, str | Mapping) else list(prompts)
    names = (runners,) if isinstance(runners, str) else tuple(runners)
    form: dict[str, Any] = {
        "prompts": "\n".join(_line(item) for item in items),
        "runners": names[0] if len(names) == 1 else "both",
        "chat": "chat" if chat else "text",
        "loop": "overlapped" if engine.get("async_scheduling", True) else "plain",
    }
    form |= {name: getattr(sampling, name) for name in SAMPLING_FIELDS}
    form |= {name: engine.get(name) for name in ENGINE_FIELDS}
    return form


def from_form(form: Mapping[str, Any], sampling: SamplingParams) -> dict[str, Any]:
    """The arguments of `Session.reset` for this form. Raises ValueError that names the field."""
    prompts = [_item(line) for line in str(form.get("prompts", "")).split("\n") if line.strip()]
    if not prompts:
        raise ValueError("no prompt: write one in each line of the prompts field")
    if form.get("loop") not in ("plain", "overlapped"):
        raise ValueError(f"loop={form.get('loop')!r}: possible are 'plain' and 'overlapped'")
    if form.get("chat") not in ("text", "chat"):
        raise ValueError(f"chat={form.get('chat')!r}: possible are 'text' (as it stands) and 'chat' (by the template)")
    changes = {name: _number(name, form.get(name), kind) for name, kind in SAMPLING_FIELDS.items()}
    if changes["max_tokens"] is None or changes["temperature"] is None or changes["top_p"] is None:
        raise ValueError("temperature, top_p and max_tokens need a number")
    params = dataclasses.replace(sampling, **changes)
    parse_prompts(prompts, params)  # a bad line is refused before an engine is made
    engine = {name: _number(name, form.get(name), int) for name in ENGINE_FIELDS}
    return {
        "prompts": prompts,
        "runners": form.get("runners", "both"),
        "sampling_params": params,
        "chat": form["chat"] == "chat",
        "async_scheduling": form["loop"] == "overlapped",
        **engine,
    }


def _number(name: str, value: Any, kind: type) -> Any:
    """An empty field is None: the engine's own default."""
    if value is None or (isinstance(value, str) and not value.strip()):
        return None
    try:
        return kind(value)
    except (TypeError, ValueError):
        what = "a whole number" if kind is int else "a number"
        raise ValueError(f"{name}={value!r}: must be {what}") from None


def _line(item: Any) -> str:
    """A prompt as one line: a text with its line ends written \\n; "@4 " in front if it comes in step 4, "#8 " if its
    max_tokens is 8; JSON if there is more to say."""
    plain = {"prompt": item} if isinstance(item, str) else dict(item)
    text = plain.get("prompt")
    marks = {key: plain.get(key) for key in _MARKS.values() if key in plain}
    simple = set(plain) <= {"prompt", *marks} and all(isinstance(value, int) for value in marks.values())
    if simple and isinstance(text, str) and not text.startswith("{") and not _MARK.match(text):
        front = "".join(f"{sign}{plain[key]} " for sign, key in _MARKS.items() if key in marks)
        return front + text.replace("\\", "\\\\").replace("\n", "\\n")
    params = plain.get("sampling_params")
    if isinstance(params, SamplingParams):
        if params.logits_processors:
            raise ValueError(
                f"prompt {str(text)[:40]!r} has logits_processors, which are Python objects: they can't stand in the "
                "dashboard's prompts field; give such prompts to Session"
            )
        plain["sampling_params"] = _changed(params)
    return json.dumps(plain, ensure_ascii=False)


def _changed(params: Any) -> dict[str, Any]:
    """The fields of a dataclass that aren't at their defaults, in JSON values."""
    values = {
        f.name: getattr(params, f.name) for f in dataclasses.fields(params) if getattr(params, f.name) != f.default
    }
    return {name: _changed(value) if dataclasses.is_dataclass(value) else value for name, value in values.items()}


def _item(line: str) -> Any:
    marks: dict[str, Any] = {}
    while mark := _MARK.match(line):
        marks[_MARKS[mark[1]]] = int(mark[2])
        line = line[mark.end() :]
    if marks or not line.startswith("{"):
        text = re.sub(r"\\([\\n])", lambda m: "\n" if m[1] == "n" else "\\", line)
        return {"prompt": text, **marks} if marks else text
    try:
        item = json.loads(line)
    except ValueError as error:
        raise ValueError(f"the prompt line {line[:40]!r} begins with {{ but is no JSON: {error}") from None
    if isinstance(item.get("sampling_params"), Mapping):
        item["sampling_params"] = SamplingParams(**item["sampling_params"])
    return item["prompt"] if set(item) == {"prompt"} else item
