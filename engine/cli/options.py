"""Command-line options for the keywords of `LLM` and `SamplingParams`, made from the dataclasses themselves."""

from __future__ import annotations

import argparse
import dataclasses
import json
import types
import typing
from typing import Any

from engine.config import EngineConfig
from engine.sampling_params import SamplingParams

from .terminal import UserError

_RENAMED = {"seed": "engine_seed"}
"""`--seed` is the request's seed, as in SamplingParams."""
_BY_RUNNER = "use_v2_model_runner"
"""Said by `--runner`."""
_SAMPLING = (
    "n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "seed", "max_tokens", "min_tokens", "stop", "bad_words", "ignore_eos", "structured_outputs",
)  # fmt: skip


def add_engine_options(parser: argparse.ArgumentParser, without: tuple[str, ...] = ()) -> None:
    """One option for each field of EngineConfig but those of `without`; one that isn't given keeps the field's
    default."""
    group = parser.add_argument_group("engine", "the keywords of LLM(...); what isn't given keeps its default")
    hints = typing.get_type_hints(EngineConfig)
    for field in dataclasses.fields(EngineConfig):
        if field.name in (_BY_RUNNER, *without):
            continue
        name = _RENAMED.get(field.name, field.name)
        text = f"default: {field.default}" if isinstance(field.default, str | int | float) else None
        _add(group, f"--{name.replace('_', '-')}", f"engine.{field.name}", hints[field.name], text)


def add_sampling_options(parser: argparse.ArgumentParser, *, max_tokens: int, temperature: float) -> None:
    """Options for the fields of SamplingParams that one command line can sensibly carry."""
    group = parser.add_argument_group("sampling")
    hints = typing.get_type_hints(SamplingParams)
    given = {"max_tokens": max_tokens, "temperature": temperature}
    for name in _SAMPLING:
        flag, dest = f"--{name.replace('_', '-')}", f"sampling.{name}"
        if name in ("stop", "bad_words"):
            group.add_argument(flag, dest=dest, action="append", metavar="TEXT", default=argparse.SUPPRESS)
        elif name == "structured_outputs":
            text = 'what the answer must be, as JSON: {"choice": ["yes", "no"]}, {"regex": ...}, {"json": ...}'
            group.add_argument(flag, dest=dest, metavar="JSON", default=argparse.SUPPRESS, help=text)
        else:
            extra = {"default": given[name]} if name in given else {}
            _add(group, flag, dest, hints[name], "default: %(default)s" if extra else None, **extra)


def engine_keywords(arguments: argparse.Namespace) -> dict[str, Any]:
    """The keywords for `LLM` that were given."""
    keywords = _of("engine", arguments)
    if (spec := keywords.get("speculative_config")) is not None:
        keywords["speculative_config"] = _json("--speculative-config", spec, '{"method": "ngram", ...}')
    return keywords


def _json(flag: str, text: str, example: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"{flag} {text!r} is not JSON ({error}); write it like '{example}'") from None


def without_model(keywords: dict[str, Any]) -> dict[str, Any]:
    """The keywords for a second engine that shares the first one's weights."""
    return {key: value for key, value in keywords.items() if key not in ("model", "tokenizer", "load_format")}


def sampling_params(arguments: argparse.Namespace) -> SamplingParams:
    """The SamplingParams that were asked for. Raises ValueError on a bad one."""
    keywords = _of("sampling", arguments)
    if (spec := keywords.get("structured_outputs")) is not None:
        keywords["structured_outputs"] = _json("--structured-outputs", spec, '{"choice": ["yes", "no"]}')
    return SamplingParams(**keywords)


def _of(group: str, arguments: argparse.Namespace) -> dict[str, Any]:
    prefix = f"{group}."
    return {key.removeprefix(prefix): value for key, value in vars(arguments).items() if key.startswith(prefix)}


def _add(group: Any, flag: str, dest: str, hint: Any, text: str | None, **extra: Any) -> None:
    """Adds one option whose parser follows from the field's type."""
    kinds = [kind for kind in typing.get_args(hint) if kind is not types.NoneType] if _optional(hint) else [hint]
    kind = kinds[0]
    common: dict[str, Any] = {"dest": dest, "default": argparse.SUPPRESS, "help": text} | extra
    if kind is bool:
        group.add_argument(flag, action=argparse.BooleanOptionalAction, **common)
    elif typing.get_origin(kind) is tuple:
        group.add_argument(flag, type=int, nargs="+", metavar="N", **common)
    elif kind in (int, float):
        group.add_argument(flag, type=kind, metavar="N" if kind is int else "X", **common)
    elif typing.get_origin(kind) is typing.Literal:
        group.add_argument(flag, choices=typing.get_args(kind), **common)
    else:
        group.add_argument(flag, metavar="TEXT", **common)


def _optional(hint: Any) -> bool:
    return typing.get_origin(hint) in (typing.Union, types.UnionType)
