"""A run as typed records: what each runner did in each step, kept, saved, loaded and exported.

Only data is here: a recording knows neither an engine nor a widget, so it opens on a machine that has none.
"""

from __future__ import annotations

import functools
import gzip
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from engine.hooks import (
    DraftProposed,
    DraftVerified,
    Event,
    HostWait,
    Sampled,
    SamplingTraced,
    SpanEnded,
    VerificationBudgeted,
)
from engine.snapshot import Snapshot

from .codec import RecordingError, decode, decode_event, encode, encode_event
from .sharing import Prefix, shared_in_turn
from .trace import chrome_trace

FORMAT = "runnerscope-recording"
VERSION = 1
DATA = Path(__file__).parent / "data"
"""Recordings for people without the device that made them; `steady_recording` writes them."""
COLORS = ("#56B4E9", "#E69F00", "#009E73", "#CC79A7", "#0072B2", "#D55E00", "#F0E442", "#999999")
"""Okabe and Ito's colours, told apart by colour-blind eyes too; the n-th request has the n-th, in turn."""


@dataclass(frozen=True)
class RunnerStep:
    """What one runner did in one step.

    `step` counts from 1. `phase` is the phase after which the session paused, "output" for a whole step. A runner that
    had nothing to do has no events and `snapshot is before`. Times are those of `time.perf_counter_ns()`.
    """

    runner: Literal["v1", "v2"]
    step: int
    snapshot: Snapshot
    before: Snapshot
    events: tuple[Event, ...]
    phase: str = "output"
    begin_ns: int = 0
    end_ns: int = 0
    pauses: tuple[tuple[int, int], ...] = ()
    """Stretches just before or within this step in which the session stood still and every lane was idle. They are no
    time of the runner: a timeline takes them out and marks the place."""

    def of(self, *types: type[Event]) -> Iterator[Any]:
        """The events of these types, in order."""
        return (event for event in self.events if isinstance(event, types))

    @functools.cached_property
    def measured(self) -> tuple[SpanEnded | HostWait, ...]:
        """The events that stand for a stretch of time, in order."""
        return tuple(self.of(SpanEnded, HostWait))

    @functools.cached_property
    def draws(self) -> tuple[SamplingTraced, ...]:
        """How the tokens that came in this step were drawn, where that was traced."""
        return tuple(self.of(SamplingTraced))

    @functools.cached_property
    def rounds(self) -> tuple[tuple[DraftProposed, DraftVerified], ...]:
        """The drafts whose judgement came in this step, where that was traced."""
        return tuple(zip(self.of(DraftProposed), self.of(DraftVerified), strict=True))

    @functools.cached_property
    def budgeted(self) -> tuple[VerificationBudgeted, ...]:
        """How many drafts the host chose to have verified in this step, where a budget was to be chosen."""
        return tuple(self.of(VerificationBudgeted))

    @functools.cached_property
    def num_sampled(self) -> Counter[int]:
        """Of the tokens that came in this step, how many were sampled in which of the engine's steps."""
        return Counter(event.sampled_in_step for event in self.of(Sampled))

    @functools.cached_property
    def engine_step(self) -> int:
        """The engine's own number of a step with events: an engine that idled counts fewer than the session."""
        return max(event.step for event in self.events)

    def __repr__(self) -> str:
        return f"<RunnerStep {self.runner} step {self.step} after {self.phase}: {len(self.events)} events>"

    @property
    def waits(self) -> int:
        """How often the host stood still inside the step."""
        return sum(wait.inside_step for wait in self.of(HostWait))


@dataclass(frozen=True)
class StepRecord:
    """One step of both runners: all that a view draws. The mappings are shared by every record of a recording."""

    step: int
    """From 1; 0 is the state before the first step."""
    runners: Mapping[str, RunnerStep]
    token_text: Mapping[int, str] = field(repr=False)
    prompts: Mapping[str, str] = field(repr=False)
    colors: Mapping[str, str] = field(repr=False)
    history: Recording = field(repr=False, compare=False)
    """The steps up to this one, this one the last."""

    def __repr__(self) -> str:
        return f"<StepRecord step {self.step} of {' and '.join(self.runners)}>"

    def text(self, token_id: int) -> str:
        """The token's own text, or its id in angle brackets when there is no tokenizer."""
        return self.token_text.get(token_id, f"<{token_id}>")


@dataclass
class Recording:
    """A run. `meta` names the model, device, kernel backend, commit, date and configuration that made it."""

    meta: dict[str, Any] = field(default_factory=dict)
    steps: Sequence[StepRecord] = field(default_factory=list)
    token_text: dict[int, str] = field(default_factory=dict, repr=False)
    prompts: dict[str, str] = field(default_factory=dict, repr=False)
    colors: dict[str, str] = field(default_factory=dict, repr=False)

    @property
    def runners(self) -> tuple[str, ...]:
        return tuple(self.steps[-1].runners) if self.steps else ()

    def append(self, runners: Mapping[str, RunnerStep]) -> StepRecord:
        """Adds the next step, which both runners have done."""
        assert isinstance(self.steps, list)
        number = len(self.steps) + 1
        record = self._record(number, runners, Prefix(self.steps, number))
        self.steps.append(record)
        return record

    def start(self, states: Mapping[str, Snapshot]) -> StepRecord:
        """Step 0, the state before the first step: no events, no inputs, and no part of this recording."""
        runners = {name: RunnerStep(_runner(name), 0, state, state, ()) for name, state in states.items()}
        return self._alone(0, runners, [])

    def partial(self, runners: Mapping[str, RunnerStep]) -> StepRecord:
        """A record of a step that is still going on: it ends its own history, but is no part of this recording."""
        return self._alone(len(self.steps) + 1, runners, list(self.steps))

    def _alone(self, step: int, runners: Mapping[str, RunnerStep], past: list[StepRecord]) -> StepRecord:
        record = self._record(step, runners, past)
        past.append(record)
        return record

    def _record(self, step: int, runners: Mapping[str, RunnerStep], history: Sequence[StepRecord]) -> StepRecord:
        past = Recording(self.meta, history, self.token_text, self.prompts, self.colors)
        return StepRecord(step, dict(runners), self.token_text, self.prompts, self.colors, past)

    def to_json(self) -> dict[str, Any]:
        """The recording in plain JSON values. A snapshot that ends one step and begins the next is written once."""
        snapshots: list[Any] = []
        places: dict[int, int] = {}

        def place(snapshot: Snapshot) -> int:
            if id(snapshot) not in places:
                places[id(snapshot)] = len(snapshots)
                snapshots.append(encode(snapshot))
            return places[id(snapshot)]

        steps = [
            {
                name: {
                    "before": place(done.before),
                    "snapshot": place(done.snapshot),
                    "phase": done.phase,
                    "begin_ns": done.begin_ns,
                    "end_ns": done.end_ns,
                    "pauses": encode(done.pauses),
                    "events": [encode_event(event) for event in done.events],
                }
                for name, done in record.runners.items()
            }
            for record in self.steps
        ]
        return {
            "format": FORMAT,
            "version": VERSION,
            "meta": self.meta,
            "token_text": self.token_text,
            "prompts": self.prompts,
            "colors": self.colors,
            "snapshots": snapshots,
            "steps": steps,
        }

    @classmethod
    def from_json(cls, data: Any) -> Recording:
        """Raises RecordingError, naming the place, for what `to_json` would not have written."""
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise RecordingError(
                f"this is no recording: it does not say format={FORMAT!r}; `Recording.save` writes one"
            )
        if data.get("version") != VERSION:
            raise RecordingError(
                f"this build reads recordings of version {VERSION}, not {data.get('version')!r}: record the run again"
            )
        try:
            text = {int(token): str(piece) for token, piece in data["token_text"].items()}
            recording = cls(dict(data["meta"]), [], text, dict(data["prompts"]), dict(data["colors"]))
            read = (decode(Snapshot, value, f"snapshots[{i}]") for i, value in enumerate(data["snapshots"]))
            snapshots = shared_in_turn(read)
            for number, step in enumerate(data["steps"], start=1):
                recording.append({name: _runner_step(name, number, value, snapshots) for name, value in step.items()})
        except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
            if isinstance(error, RecordingError):
                raise
            raise RecordingError(
                f"the recording is damaged ({type(error).__name__}: {error}): record the run again"
            ) from error
        return recording

    def save(self, path: str | Path) -> Path:
        """Writes JSON, gzipped where the name ends in .gz. The file is there whole or not at all."""
        target = Path(path)
        payload = json.dumps(self.to_json(), separators=(",", ":"), ensure_ascii=False).encode()
        part = target.with_name(target.name + ".part")
        part.write_bytes(gzip.compress(payload, 6, mtime=0) if target.suffix == ".gz" else payload)
        part.replace(target)
        return target

    @classmethod
    def load(cls, path: str | Path) -> Recording:
        """Reads what `save` wrote. Raises RecordingError for a file that is none."""
        raw = Path(path).read_bytes()
        try:
            data = json.loads(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw)
        except (ValueError, EOFError, OSError) as error:
            raise RecordingError(f"{path} is damaged or cut off ({error}): record the run again") from error
        return cls.from_json(data)

    @classmethod
    def shipped(cls, name: str) -> Recording:
        """A recording that comes with the project, in workbench/data. RecordingError if there is none of that name."""
        path = DATA / f"{name}.json.gz"
        if not path.is_file():
            there = ", ".join(sorted(p.name.removesuffix(".json.gz") for p in DATA.glob("*.json.gz")))
            raise RecordingError(f"no recording {name!r} comes with this project; there are: {there}")
        return cls.load(path)

    def to_chrome_trace(self) -> dict[str, Any]:
        """The measured spans and waits as Chrome's trace events; see `trace.chrome_trace`."""
        return chrome_trace(self)


def _runner_step(name: str, step: int, value: dict[str, Any], snapshots: list[Snapshot]) -> RunnerStep:
    where = f"steps[{step - 1}].{name}"
    return RunnerStep(
        runner=_runner(name),
        step=step,
        snapshot=snapshots[value["snapshot"]],
        before=snapshots[value["before"]],
        events=tuple(decode_event(event, f"{where}.events[{i}]") for i, event in enumerate(value["events"])),
        phase=str(value["phase"]),
        begin_ns=int(value["begin_ns"]),
        end_ns=int(value["end_ns"]),
        pauses=tuple((int(b), int(e)) for b, e in value["pauses"]),
    )


def _runner(name: str) -> Literal["v1", "v2"]:
    if name == "v1" or name == "v2":
        return name  # type: ignore[return-value]
    raise RecordingError(f"runner {name!r} is neither 'v1' nor 'v2'")
