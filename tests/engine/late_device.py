"""A device that is as late as a device may be: it finds what the host overwrites too early, every time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import engine.device
from engine.hooks import Hooks, Lane


class LateEvent:
    def __init__(self, stream: LateStream) -> None:
        self._stream = stream
        self.done = False
        self.error: BaseException | None = None

    def synchronize(self) -> None:
        self._stream.run_until(self)
        if self.error is not None:
            raise self.error

    def query(self) -> bool:
        return self.done


class LateStream:
    """Runs nothing until somebody waits, and then no more than he waits for: the latest that a device may be.

    A host that overwrites what a step in flight still has to read gives wrong tokens here every time, not once in a
    thousand runs.
    """

    def __init__(self, lane: Lane, hooks: Hooks) -> None:
        self.lane = lane
        self._tasks: deque[Any] = deque()
        self._error: BaseException | None = None

    def submit(self, name: str, fn: Callable[..., Any], *args: Any) -> None:
        self._tasks.append((fn, args))

    def record_event(self, *, for_host: bool = True) -> LateEvent:
        event = LateEvent(self)
        self._tasks.append(event)
        return event

    def wait_event(self, event: LateEvent) -> None:
        def wait() -> None:
            event.synchronize()

        self._tasks.append((wait, ()))

    def run_until(self, event: LateEvent) -> None:
        while not event.done:
            task = self._tasks.popleft()
            if isinstance(task, LateEvent):
                task.done, task.error = True, self._error
            elif self._error is None:
                fn, args = task
                try:
                    with torch.inference_mode():
                        fn(*args)
                except BaseException as error:  # noqa: BLE001 - as on a real stream, it is raised to who waits
                    self._error = error

    def take_spans(self) -> list[Any]:
        return []

    def reset(self) -> None:
        self._error = None

    def close(self) -> None:
        self._tasks.clear()


@contextmanager
def device_timing(timing: str) -> Iterator[None]:
    """Engines made inside have a device that is `"threads"` (the real one) or `"late"`."""
    with pytest.MonkeyPatch.context() as patch:
        if timing == "late":
            patch.setattr(engine.device, "CpuStream", LateStream)
        yield
