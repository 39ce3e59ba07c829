"""What the engine answered, on disk as it came: an interrupted generation goes on behind its last finished answer."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub.utils import tqdm

from ..interrupts import deferred_interrupt
from ..request import RequestOutput
from ..sampling_params import SamplingParams

if TYPE_CHECKING:
    from ..llm import LLM

_WINDOW = 4
"""Requests that are queued at once, in rows of the engine: enough that a row never waits for the next."""
_FLUSH_SECONDS = 5.0


class Journal:
    """A file of JSON lines: first what was asked, then ``[index, value]`` for each answer that is known.

    Args:
        path: None keeps the answers in memory alone. What another question left there is overwritten.
        about: what was asked, so that only its own answers are taken up.
    """

    def __init__(self, path: Path | None, about: Mapping[str, str]) -> None:
        self.path, self.done = path, dict[int, Any]()
        self._unwritten: list[str] = []
        self._flushed = time.monotonic()
        self._header = json.dumps(dict(about), sort_keys=True)
        if path is not None and not self._read(path):
            part = path.with_name(f"{path.name}.part")
            part.write_text(self._header + "\n", encoding="utf-8")
            os.replace(part, path)

    def _read(self, path: Path) -> bool:
        if not path.is_file():
            return False
        lines = path.read_text(encoding="utf-8").split("\n")
        if lines[0] != self._header:
            return False
        # The last line is empty, or was cut off while it was written; then it is cut off here too.
        if lines.pop():
            path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        self.done = dict(json.loads(line) for line in lines[1:])
        return True

    def add(self, index: int, value: Any) -> None:
        """Keep an answer; it is on disk at the next `flush`, some seconds later at most."""
        self.done[index] = value
        self._unwritten.append(json.dumps([index, value], separators=(",", ":")))
        if time.monotonic() - self._flushed > _FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        if self.path is not None and self._unwritten:
            with self.path.open("a", encoding="utf-8") as file:
                file.write("\n".join(self._unwritten) + "\n")
        self._unwritten.clear()
        self._flushed = time.monotonic()

    def in_order(self) -> list[Any]:
        """The answers by index, those that are there."""
        return [self.done[i] for i in sorted(self.done)]


def generate_into(
    journal: Journal,
    llm: LLM,
    prompts: Sequence[Any],
    params: Sequence[SamplingParams],
    value: Callable[[RequestOutput], Any],
    desc: str,
    progress: bool = True,
) -> list[Any]:
    """As `LLM.generate`, for the prompts that ``journal`` has no answer to yet; ``value`` of every prompt's output.

    The engine stays full to the end: a new request is queued for each that finishes. When it is interrupted, all
    answers that have come are on disk.
    """
    missing = (i for i in range(len(prompts)) if i not in journal.done)
    window = _WINDOW * (llm.config.max_num_seqs or 1)
    running: dict[str, int] = {}
    bar = tqdm(total=len(prompts), initial=len(journal.done), desc=desc, disable=not progress)
    try:
        with deferred_interrupt() as interrupt, llm.core.device.scope():
            while True:
                while len(running) < window and (index := next(missing, None)) is not None:
                    running[llm.add(prompts[index], params[index], final_only=True)] = index
                if not running:
                    break
                for output in llm.step():
                    if output.finished and output.request_id in running:
                        journal.add(running.pop(output.request_id), value(output))
                        bar.update()
                interrupt.raise_if_received()
    finally:
        bar.close()
        journal.flush()
        llm.abort(list(running))
    # Nothing to do: the engine settles, as behind every `generate`.
    llm.generate([], use_tqdm=False)
    return journal.in_order()
