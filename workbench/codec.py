"""Frozen dataclasses to plain JSON values and back, checked by their annotations. Nothing is unpickled."""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from typing import Any, TypeVar

from engine import hooks

T = TypeVar("T")


class RecordingError(ValueError):
    """A recording that can't be read: says where and why."""


def encode(value: Any) -> Any:
    """Dataclasses become dicts by field name, tuples become lists; other values stay."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {name: encode(getattr(value, name)) for name in _names(type(value))}
    if isinstance(value, tuple | list):
        if value and isinstance(value[0], int | float | str):
            return list(value)
        return [encode(item) for item in value]
    if isinstance(value, dict):
        return {key: encode(item) for key, item in value.items()}
    return value


def decode(kind: type[T], value: Any, where: str) -> T:
    """The `kind` that `encode` made `value` of. Raises RecordingError naming `where`."""
    return _decode(kind, value, where)


def encode_event(event: hooks.Event) -> dict[str, Any]:
    """As `encode`, with the class's name under "type"."""
    return {"type": type(event).__name__, **encode(event)}


def decode_event(value: Any, where: str) -> hooks.Event:
    """Raises RecordingError for a type that this build does not know."""
    name = value.get("type") if isinstance(value, dict) else None
    kind = event_types().get(name) if isinstance(name, str) else None
    if kind is None:
        raise RecordingError(
            f"{where}: {name!r} is no event of this build, which knows {', '.join(sorted(event_types()))}"
        )
    return _decode(kind, {key: item for key, item in value.items() if key != "type"}, where)


@functools.cache
def event_types() -> dict[str, type[hooks.Event]]:
    """The event classes by name."""
    return {kind.__name__: kind for kind in hooks.Event.__subclasses__()}


@functools.cache
def _names(kind: type) -> tuple[str, ...]:
    return tuple(f.name for f in dataclasses.fields(kind))


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _decode(kind: Any, value: Any, where: str) -> Any:
    origin = typing.get_origin(kind)
    if dataclasses.is_dataclass(kind):
        return _decode_dataclass(typing.cast(type, kind), value, where)
    if origin is tuple:
        return _decode_tuple(typing.get_args(kind), value, where)
    if origin is dict:
        if not isinstance(value, dict):
            raise _wrong(where, "an object", value)
        return {key: _decode(typing.get_args(kind)[1], item, f"{where}.{key}") for key, item in value.items()}
    if origin in (typing.Union, types.UnionType):
        return _decode_union(typing.get_args(kind), value, where)
    if origin is typing.Literal:
        if value not in typing.get_args(kind):
            raise _wrong(where, f"one of {typing.get_args(kind)}", value)
        return value
    if kind is Any:
        return value
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise _wrong(where, kind.__name__, value)
    return value


def _decode_dataclass(kind: type, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise _wrong(where, f"a {kind.__name__}", value)
    names = _names(kind)
    if set(value) != set(names):
        odd = sorted(set(value) ^ set(names))
        raise RecordingError(f"{where}: the fields of {kind.__name__} are {', '.join(names)}; {odd} do not fit")
    return kind(**{name: _decode(_hints(kind)[name], value[name], f"{where}.{name}") for name in names})


def _decode_tuple(args: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise _wrong(where, "a list", value)
    item = args[0]
    if item in (int, str):
        if all(type(v) is item for v in value):
            return tuple(value)
        raise _wrong(where, f"a list of {item.__name__}", value)
    return tuple(_decode(item, v, f"{where}[{i}]") for i, v in enumerate(value))


def _decode_union(kinds: tuple[Any, ...], value: Any, where: str) -> Any:
    for kind in kinds:
        plain = typing.get_origin(kind) or kind
        if kind is type(None):
            if value is None:
                return None
        elif type(value) is _written_as(plain):
            return _decode(kind, value, where)
    raise _wrong(where, " or ".join(getattr(kind, "__name__", str(kind)) for kind in kinds), value)


def _written_as(kind: Any) -> type:
    """The JSON type that `encode` makes of a kind."""
    if dataclasses.is_dataclass(kind):
        return dict
    return list if kind is tuple else kind


def _wrong(where: str, wanted: str, value: Any) -> RecordingError:
    return RecordingError(f"{where}: expected {wanted}, found {str(value)[:60]!r}")
