"""Records of steps with a budget, made by hand: loads, budgets and tokens that were chosen to be told apart."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from engine.dspark.costs import CostTable
from engine.hooks import Event, Sampled, VerificationBudgeted
from engine.snapshot import SpeculationView, StepCostsView
from tests.workbench.records import make_recording
from workbench.codec import encode
from workbench.recording import Recording, StepRecord

NUM_DRAFTS = 5
COSTS = {
    1: CostTable((1, 2, 4, 6), (1000.0, 1200.0, 1900.0, 2600.0), step_limit=6),
    8: CostTable((8, 16, 48), (2000.0, 2500.0, 9000.0)),
}


def make_budgeted_recording(steps: int = 12, measured: bool = True, **kwargs: Any) -> Recording:
    """Steps of 1 to 8 requests. A step's tokens come in the step behind it, those of the last one not yet; the first
    budget knows no confidences."""
    plain = make_recording(steps=steps, runners=("v2",), **kwargs)
    tables = tuple(StepCostsView(*of) for of in COSTS.items()) if measured else ()
    view = SpeculationView("dspark", NUM_DRAFTS, "budgeted", None, tables)
    recording = Recording(
        {**plain.meta, "speculation": encode(view)}, [], plain.token_text, plain.prompts, plain.colors
    )
    rng = random.Random(steps)
    came: list[Event] = []
    for record in plain.steps:
        done, stamp = record.runners["v2"], (record.step, "v2", 0)
        load = rng.randint(1, 8)
        budget = rng.randint(0, load * NUM_DRAFTS)
        expected = None if record.step == 1 else round(load + rng.random() * budget, 2)
        chosen = VerificationBudgeted(*stamp, load, load * NUM_DRAFTS, load, budget, expected)
        kept = [event for event in done.events if not isinstance(event, Sampled)]
        recording.append({"v2": replace(done, events=(*kept, chosen, *came))})
        tokens = load + rng.randint(0, budget)
        came = [Sampled(record.step + 1, "v2", 0, "A", 1, i, record.step) for i in range(tokens)]
    return recording


def make_budgeted_record(**kwargs: Any) -> StepRecord:
    """The last step of `make_budgeted_recording`."""
    return make_budgeted_recording(**kwargs).steps[-1]
