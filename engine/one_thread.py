"""An engine belongs to one thread at a time; another is told so before anything is changed."""

from __future__ import annotations

import threading


class OneThread:
    """A context that one thread may enter, as often as it likes; RuntimeError for any other while it is inside."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise RuntimeError(
                "another thread is using this LLM, which steps all requests together: use it from one thread at a "
                "time, or give each thread an engine of its own on the same weights: LLM(loaded=llm.loaded)"
            )

    def __exit__(self, *exc: object) -> None:
        self._lock.release()
