"""What the steps of a run share, so that a long one costs the memory of its changes and no more."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar, get_args, get_origin, get_type_hints, overload

from engine.snapshot import Snapshot

T = TypeVar("T")


def shared(new: T, old: object) -> T:
    """A value equal to `new`, made of the very objects of `old` wherever the two are equal.

    Frozen dataclasses are compared field by field, tuples place by place; anything else is taken whole. `new` itself
    comes back where nothing is alike. `old` may be of any type, None too.
    """
    if new is old or type(new) is not type(old):
        return new
    if isinstance(new, tuple) and isinstance(old, tuple):
        return _shared_tuple(new, old)
    if new == old:
        return old
    kind: Any = type(new)
    kept: dict[str, Any] = {}
    for name in _worth(kind):
        value = getattr(new, name)
        own = shared(value, getattr(old, name))
        if own is not value:
            kept[name] = own
    return dataclasses.replace(new, **kept) if kept else new  # type: ignore[type-var]


def shared_in_turn(snapshots: Iterable[Snapshot]) -> list[Snapshot]:
    """The snapshots of one or more runners, each sharing with the runner's one before it."""
    out: list[Snapshot] = []
    last: dict[str, Snapshot] = {}
    for snapshot in snapshots:
        last[snapshot.runner] = shared(snapshot, last.get(snapshot.runner))
        out.append(last[snapshot.runner])
    return out


def _shared_tuple(new: tuple[Any, ...], old: tuple[Any, ...]) -> Any:
    kind: Any = type(new[0]) if new else None
    if not new or not old or not (kind is tuple or _worth(kind)):
        return old if new == old else new
    parts = tuple(map(shared, new, old)) + new[len(old) :]
    if len(parts) == len(old) and all(map(operator.is_, parts, old)):
        return old
    return new if all(map(operator.is_, parts, new)) else parts


@functools.cache
def _worth(kind: Any) -> tuple[str, ...]:
    """The fields of a dataclass that may be large: tuples and dataclasses. A number's copy costs less than asking."""
    if not dataclasses.is_dataclass(kind):
        return ()
    hints = get_type_hints(kind).items()
    return tuple(name for name, hint in hints if _large(hint) or any(map(_large, get_args(hint))))


def _large(hint: Any) -> bool:
    return get_origin(hint) is tuple or dataclasses.is_dataclass(hint)


class Prefix(Sequence[T]):
    """The first `length` steps of a growing list, without a copy."""

    def __init__(self, steps: Sequence[T], length: int) -> None:
        self._steps = steps
        self._length = length

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[T]: ...
    def __getitem__(self, index: int | slice) -> T | Sequence[T]:
        places = range(self._length)[index]
        return self._steps[places] if isinstance(places, int) else [self._steps[i] for i in places]
