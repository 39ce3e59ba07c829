"""Records whose drafts are traced, made by hand: random drafts, judged by the standard rule in plain Python."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from engine.dspark.calibration import Calibration, PositionQuality
from engine.hooks import DraftProposed, DraftVerified, Sampled
from engine.snapshot import SpeculationView
from tests.workbench.records import make_recording
from tests.workbench.vocabulary import PIECES
from workbench.codec import encode
from workbench.recording import Recording, StepRecord

MAX_DRAFTS = 4
CALIBRATION = Calibration(
    (1.5, 0.8, 2.0, 1.0),
    321,
    tuple(PositionQuality(0.1 + k / 100, 0.8, 0.2, 0.5) for k in range(MAX_DRAFTS)),
    tuple(PositionQuality(0.01 + k / 100, 0.8, 0.1, 0.5) for k in range(MAX_DRAFTS)),
)


def make_round(
    runner: str, request_id: str, position: int, step: int, method: str = "standard", confident: bool = False
) -> tuple[DraftProposed, DraftVerified]:
    """1 to `MAX_DRAFTS` drafts; a confidence is p's share of q, as a trained one would be."""
    rng = random.Random(f"{runner} {request_id} {position}")
    k = rng.randint(1, MAX_DRAFTS)
    tokens = tuple(rng.randrange(len(PIECES)) for _ in range(k + 1))
    p, q, u = (tuple(round(rng.uniform(0.05, 1), 4) for _ in range(k)) for _ in range(3))
    u = tuple(x * 0.99 for x in u)
    confidences = tuple(round(min(1.0, a / b), 4) for a, b in zip(p, q, strict=True)) if confident else None
    accepted = next((j for j in range(k) if u[j] * q[j] >= p[j]), k)
    place = (request_id, position, step)
    return (
        DraftProposed(step, runner, 0, *place, tokens[:k], q, confidences),
        DraftVerified(step, runner, 0, *place, method, p, u, accepted, tokens[k]),
    )


def make_drafted_recording(
    method: str = "standard", confident: bool = False, calibrated: bool = False, **kwargs: Any
) -> Recording:
    """`make_recording`, with a round before every token; the tokens themselves stay as they are."""
    plain = make_recording(**kwargs)
    view = SpeculationView("dspark", MAX_DRAFTS, "fixed", CALIBRATION if calibrated else None, ())
    drafted = Recording({**plain.meta, "speculation": encode(view)}, [], plain.token_text, plain.prompts, plain.colors)
    for record in plain.steps:
        runners = {}
        for name, done in record.runners.items():
            events: list[Any] = []
            for event in done.events:
                if isinstance(event, Sampled):
                    place = (event.request_id, event.position, event.sampled_in_step)
                    events += make_round(name, *place, method, confident)
                events.append(event)
            runners[name] = replace(done, events=tuple(events))
        drafted.append(runners)
    return drafted


def make_drafted_record(**kwargs: Any) -> StepRecord:
    """The last step of `make_drafted_recording`."""
    return make_drafted_recording(**kwargs).steps[-1]
