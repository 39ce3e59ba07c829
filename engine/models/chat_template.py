"""Chat templates: untrusted jinja2 programs of a checkpoint, run in jinja2's immutable sandbox."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment


class ChatTemplateError(ValueError):
    """The template is damaged, or refused these messages."""


def render_chat_template(template: str, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
    """The prompt text of a conversation, as transformers' ``apply_chat_template`` renders it.

    Args:
        template: jinja2 source.
        messages: ``{"role": ..., "content": ...}`` in order.
        variables: further names the template may use; like the messages, plain JSON values only.

    Raises:
        ChatTemplateError: messages that are not plain data, a damaged template, or one that raised.
    """
    try:
        # The template sees copies made of plain JSON types, never an object with methods of its own.
        plain = json.loads(json.dumps({"messages": list(messages), **variables}))
    except (TypeError, ValueError) as error:
        raise ChatTemplateError(f"messages and template variables must be plain JSON values: {error}") from None
    if not plain["messages"]:
        raise ChatTemplateError("the conversation is empty; give at least one message with 'role' and 'content'")
    for message in plain["messages"]:
        if not isinstance(message, dict) or "role" not in message:
            raise ChatTemplateError(f"each message must be a dict with 'role' and 'content', got {message!r}")
    plain["messages"] = [{k: v for k, v in message.items() if v is not None} for message in plain["messages"]]
    try:
        return _compile(template).render(**plain)
    except jinja2.TemplateSyntaxError as error:
        raise ChatTemplateError(f"the chat template is damaged: line {error.lineno}: {error.message}") from error
    except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError, RecursionError) as error:
        raise ChatTemplateError(f"the chat template refused these messages: {error}") from error


@lru_cache(maxsize=8)
def _compile(template: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["namespace"] = _Namespace
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(template)


class _Namespace(jinja2.utils.Namespace):
    """jinja2's own lets a template store names like ``__class__``, by which Python could take it for another type."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        attributes = dict(*args[1:], **kwargs)
        for name in attributes:
            _check_attribute(name)
        jinja2.utils.Namespace.__init__(args[0], attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_attribute(name)
        super().__setitem__(name, value)


def _check_attribute(name: Any) -> None:
    if not isinstance(name, str) or name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace attribute may not be called {name!r}")


class _Generation(Extension):
    """``{% generation %}`` marks what the assistant wrote, for training; here its body is simply rendered."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own spelling)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """The statements between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes HTML, which templates for models do not want.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
