"""Records made by hand for the tests of the views, of runs of toy engines.

`make_record()` gives the last step of a run in which prompts are chunked, a request finishes, blocks are shared, and
one request's text holds markup.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from engine import hooks as ev
from tests.workbench.toy_engine import MS, ToyEngine, ToyRequest
from tests.workbench.toy_snapshots import snapshot
from tests.workbench.vocabulary import PIECES
from workbench.recording import COLORS, Recording, RunnerStep, StepRecord


def request_name(index: int) -> str:
    """A, B, … Z, A2, B2, …"""
    return chr(ord("A") + index % 26) + ("" if index < 26 else str(index // 26 + 1))


def make_recording(
    runners: Sequence[Any] = ("v1", "v2"),
    requests: int = 4,
    blocks: int = 64,
    steps: int = 6,
    block_size: int = 4,
    budget: int | None = None,
    rows: int | None = None,
    loop: Any = "plain",
    prompt_len: int = 6,
    max_tokens: int = 6,
) -> Recording:
    """A run of `steps` steps.

    Requests 0 and 2 share their prompt's beginning, 2 comes in step 3; 1 finishes in step 2; a pause before step 4.
    """
    recording = Recording(
        {
            "model": "made by hand",
            "device": "cpu",
            "kernel_backend": "torch",
            "commit": "0" * 12,
            "date": "2026-01-01",
            "config": {},
        },
        token_text=dict(enumerate(PIECES)),
    )
    engines: dict[Any, ToyEngine] = {}
    for runner in runners:
        made = []
        for i in range(requests):
            start = 0 if i in (0, 2) else i
            prompt = tuple((start * 3 + k) % len(PIECES) for k in range(prompt_len + i % 3))
            made.append(
                ToyRequest(request_name(i), prompt, 2 if i == 1 else max_tokens + i, arrives=3 if i == 2 else 1)
            )
        engines[runner] = ToyEngine(
            runner, made, blocks, block_size, budget or 4 * requests, rows or requests + 2, loop
        )
        for i, request in enumerate(made):
            recording.prompts[request.name] = "".join(PIECES[t] for t in request.prompt)
            recording.colors[request.name] = COLORS[i % len(COLORS)]
    before = {name: snapshot(engine) for name, engine in engines.items()}
    ends: dict[str, int] = {}
    for number in range(1, steps + 1):
        done = {}
        for name, engine in engines.items():
            if number == 4:
                engine.now += 40 * MS  # the session paused here
            events, begin, end = engine.step()
            after = snapshot(engine)
            pauses = ((ends[name], begin),) if number == 4 else ()
            done[name] = RunnerStep(name, number, after, before[name], events, "output", begin, end, pauses)
            before[name], ends[name] = after, end
        recording.append(done)
    return recording


def make_record(
    runners: Sequence[Any] = ("v1", "v2"), requests: int = 4, blocks: int = 64, steps: int = 6, **kwargs: Any
) -> StepRecord:
    """The last step of `make_recording(...)`; with `steps=0` the state before the first step."""
    if steps == 0:
        recording = make_recording(runners, requests, blocks, 1, **kwargs)
        return recording.start({name: done.before for name, done in recording.steps[0].runners.items()})
    return make_recording(runners, requests, blocks, steps, **kwargs).steps[-1]


def with_events(record: StepRecord, runner: str, *events: ev.Event) -> StepRecord:
    """`record` with `events` added to what `runner` did in it."""
    done = record.runners[runner]
    return replace(record, runners={**record.runners, runner: replace(done, events=(*done.events, *events))})
