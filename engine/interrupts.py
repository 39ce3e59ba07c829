"""Ctrl-C without half-done steps."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class deferred_interrupt:
    """Holds a Ctrl-C back until the block has ended, so that no state is left between two changes that belong together.

    Signals reach Python's main thread only; elsewhere this does nothing. Nor does it inside another such block, so
    that a phase costs nothing within a step, nor a step within a loop that asks `raise_if_received` itself.
    """

    _active = False

    def __init__(self) -> None:
        self._mine = False
        self._received: list[tuple[int, FrameType | None]] = []
        self._previous: Any = None

    def raise_if_received(self) -> None:
        """Raises a Ctrl-C that was held back, at a place where nothing is half done."""
        if self._received and callable(self._previous):
            self._previous(*self._received.pop(0))

    def __enter__(self) -> deferred_interrupt:
        if deferred_interrupt._active or threading.current_thread() is not threading.main_thread():
            return self
        self._previous = signal.signal(signal.SIGINT, lambda signum, frame: self._received.append((signum, frame)))
        self._mine = deferred_interrupt._active = True
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if not self._mine:
            return
        deferred_interrupt._active = False
        signal.signal(signal.SIGINT, self._previous)
        if kind is None:
            self.raise_if_received()
