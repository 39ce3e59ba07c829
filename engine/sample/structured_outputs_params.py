"""What a request's output must look like: vLLM's StructuredOutputsParams."""

from __future__ import annotations

import dataclasses
import json as json_module
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..config import closest

KINDS = ("json", "regex", "choice", "grammar", "json_object")
"""The ways to constrain an output; a request uses exactly one."""


@dataclass(frozen=True)
class StructuredOutputsParams:
    """The language that an output must belong to. Raises ValueError unless exactly one kind is given.

    json: a JSON schema, as text or as a dict (kept as text). regex: a regular expression for the whole output. choice:
    the possible outputs. grammar: EBNF in GBNF's notation, with a rule `root`. json_object: any JSON object.
    disable_any_whitespace: JSON is written compactly, instead of with as many blanks as the model likes.

    The output is complete when it ends by a stop token; max_tokens may cut it before that.
    """

    json: str | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    json_object: bool = False
    disable_any_whitespace: bool = False

    def __new__(cls, *args: Any, **kwargs: Any) -> StructuredOutputsParams:
        names = [f.name for f in dataclasses.fields(cls)]
        for key in kwargs:
            if key not in names:
                known = ", ".join(names)
                raise ValueError(f"unknown structured_outputs key {key!r}{closest(key, names)} Known: {known}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for name in ("json_object", "disable_any_whitespace"):
            if getattr(self, name) is None:
                object.__setattr__(self, name, False)
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"structured_outputs {name}={getattr(self, name)!r}: must be True or False")
        object.__setattr__(self, "json", _schema_text(self.json))
        for name in ("regex", "grammar"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise ValueError(f"structured_outputs {name}={value!r}: must be a non-empty string")
        if self.choice is not None:
            if not isinstance(self.choice, list | tuple) or not self.choice:
                raise ValueError(f"structured_outputs choice={self.choice!r}: must be a list of at least one string")
            if any(not isinstance(text, str) or not text for text in self.choice):
                raise ValueError(f"structured_outputs choice={self.choice!r}: must be non-empty strings")
            object.__setattr__(self, "choice", tuple(self.choice))
        given = [name for name in KINDS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise ValueError(
                f"structured_outputs has {' and '.join(given) or 'nothing'}: give exactly one of {', '.join(KINDS)}"
            )
        if self.disable_any_whitespace and given[0] not in ("json", "json_object"):
            raise ValueError(f"structured_outputs disable_any_whitespace is for JSON and means nothing for {given[0]}")

    @property
    def kind(self) -> str:
        """The one of `KINDS` that is given."""
        return next(name for name in KINDS if getattr(self, name) not in (None, False))


def _schema_text(schema: Any) -> str | None:
    if schema is None:
        return None
    if not isinstance(schema, str | Mapping):
        raise ValueError(f"structured_outputs json={schema!r}: must be a JSON schema, as a dict or as JSON text")
    try:
        # Text goes through too, so that what is no JSON is found here.
        return json_module.dumps(json_module.loads(schema) if isinstance(schema, str) else dict(schema))
    except (TypeError, ValueError) as error:
        raise ValueError(f"structured_outputs json={schema!r}: is no JSON ({error})") from None
