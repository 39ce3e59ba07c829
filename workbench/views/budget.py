"""The verification budget against the load: how many drafts a step verifies, of how many, and what decided it.

Under `verification_schedule="budgeted"` the host chooses a number of drafts for each step, from what a step costs
(measured at start) and from confidences of an earlier round. What it expected stands here beside what came.
budget_figure.py draws the static twin, static/budget.js the live view.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from engine.dspark.costs import CostTable
from engine.dspark.schedule import step_costs_of
from engine.hooks import VerificationBudgeted

from ..html import Html
from ..recording import StepRecord
from ..widget import LiveView
from .budget_figure import draw as draw_figure

STEPS = 8
"""So many steps are shown one by one, the newest."""
CLOSED: dict[str, Any] = {"open": False, "note": "for verification_schedule='budgeted'", "panels": []}
WITHOUT = (
    "no budget was chosen here: it takes a speculative_config of method 'dspark' with a model and "
    "verification_schedule='budgeted', and steps with drafts"
)
LOADS = ["requests", "steps", "drafts", "verified", "of a request", "expected", "came"]
EACH = ["step", "requests", "drafts", "verified", "expected", "came", "ms none", "ms chosen", "ms all"]


class Budgeted(NamedTuple):
    """A step for which a budget was chosen."""

    step: int
    """The session's step."""
    event: VerificationBudgeted
    came: int | None
    """Tokens of the step that requests kept; None until they arrive."""

    @property
    def verified(self) -> int:
        """A captured step may have room for more drafts than there are."""
        return min(self.event.budget, self.event.num_drafts)


def view_model(record: StepRecord) -> dict[str, Any]:
    """All that was budgeted up to this record, by load, and the newest steps one by one; `CLOSED` without any."""
    panels = [_panel(name, found, record) for name in record.runners if (found := list(budgeted(record, name)))]
    return {"open": True, "note": "against the load", "panels": panels} if panels else CLOSED


def figure(record: StepRecord) -> Html:
    """The static twin. Raises ValueError, saying what there must be, where no budget was chosen."""
    model = view_model(record)
    if not model["open"]:
        raise ValueError(WITHOUT)
    return Html(f"verification budget up to step {record.step}", draw_figure(model))


def budgeted(record: StepRecord, runner: str) -> Iterator[Budgeted]:
    """The steps of a runner for which a budget was chosen, up to this record."""
    steps = [step.runners[runner] for step in record.history.steps]
    chosen = [(done.step, event) for done in steps for event in done.budgeted]
    came: dict[int, int] = {}
    for done in steps if chosen else ():
        for step, number in done.num_sampled.items():
            came[step] = came.get(step, 0) + number
    return (Budgeted(step, event, came.get(event.step)) for step, event in chosen)


class BudgetView(LiveView, static="budget"):
    """The live view of verification budgets."""

    view_model = staticmethod(view_model)


def _panel(runner: str, found: Sequence[Budgeted], record: StepRecord) -> dict[str, Any]:
    costs = step_costs(record.history.meta.get("speculation") or {})
    settled = [one for one in found if one.event.expected_tokens is not None and one.came is not None]
    expected, came = _means(settled)
    say = (
        f"{len(found):,} steps: {fmean(one.verified for one in found):.1f} of "
        f"{fmean(one.event.num_drafts for one in found):.1f} drafts verified"
    )
    if settled:
        say += f"; where confidences were known, {expected:.1f} tokens expected and {came:.1f} came"
    loads = sorted({one.event.num_reqs for one in found})
    by_load = {load: [one for one in found if one.event.num_reqs == load] for load in loads}
    return {
        "title": runner.upper(),
        "say": say,
        "loads": {"head": LOADS, "rows": [_load(load, own) for load, own in by_load.items()]},
        "steps": {"head": EACH, "rows": [_step(one, costs) for one in found[: -STEPS - 1 : -1]]},
        "shares": _shares(by_load),
        "costs": _costs(found, costs),
    }


def _load(load: int, own: Sequence[Budgeted]) -> list[str]:
    expected, came = _means([one for one in own if one.event.expected_tokens is not None and one.came is not None])
    verified = fmean(one.verified for one in own)
    drafts = fmean(one.event.num_drafts for one in own)
    shown = [f"{verified:.1f}", f"{verified / load:.2f}", *("–" if x is None else f"{x:.1f}" for x in (expected, came))]
    return [str(load), str(len(own)), f"{drafts:g}", *shown]


def _step(one: Budgeted, costs: Mapping[int, CostTable]) -> list[str]:
    event = one.event
    expected = "–" if event.expected_tokens is None else f"{event.expected_tokens:.1f}"
    row = [str(one.step), str(event.num_reqs), str(event.num_drafts), str(one.verified), expected]
    row.append("–" if one.came is None else str(one.came))
    if not costs:
        return [*row, "–", "–", "–"]
    table = step_costs_of(costs, event.num_reqs)
    return [*row, *(f"{table(event.num_tokens + n) / 1e3:.2f}" for n in (0, event.budget, event.num_drafts))]


def _means(settled: Sequence[Budgeted]) -> tuple[float | None, float | None]:
    """Of steps whose budget knew confidences and whose tokens came: the tokens expected, and those that came."""
    if not settled:
        return None, None
    return fmean(one.event.expected_tokens or 0.0 for one in settled), fmean(one.came or 0 for one in settled)


def _shares(by_load: Mapping[int, Sequence[Budgeted]]) -> dict[str, Any]:
    """`points`: of each load the mean, the least and the most drafts of a request that were verified, and the steps.
    `ends`: what stands at the ends of the axes."""
    points = []
    for load, own in by_load.items():
        each = [one.verified / load for one in own]
        points.append([load, round(fmean(each), 3), round(min(each), 3), round(max(each), 3), len(own)])
    most = max(one.event.num_drafts // one.event.num_reqs for own in by_load.values() for one in own)
    widest = max(by_load)
    return {
        "points": points,
        "most": most,
        "max": widest,
        "ends": [_counted(widest, "request"), _counted(most, "draft")],
    }


def step_costs(speculation: Mapping[str, Any]) -> dict[int, CostTable]:
    """The cost tables of a recording's meta; none where no step was measured."""
    return {
        of["num_reqs"]: CostTable(tuple(of["table"]["sizes"]), tuple(of["table"]["costs"]), of["table"]["step_limit"])
        for of in speculation.get("step_costs", ())
    }


def _costs(found: Sequence[Budgeted], costs: Mapping[int, CostTable]) -> dict[str, Any] | None:
    """`curves`: of each table the requests it was measured with and its points [tokens, ms]; `chosen`: [tokens, ms,
    steps] of every size that was chosen, the newest last; `max`: the largest of both."""
    if not costs:
        return None
    curves: list[list[Any]] = [[size, _curve(table)] for size, table in costs.items()]
    steps: dict[tuple[int, float], int] = {}
    for one in found:
        tokens = one.event.num_tokens + one.event.budget
        at = tokens, round(step_costs_of(costs, one.event.num_reqs)(tokens) / 1e3, 3)
        steps[at] = steps.pop(at, 0) + 1
    places = [place for _, points in curves for place in points] + [[*at] for at in steps]
    widest, highest = max(x for x, _ in places), max(y for _, y in places)
    return {
        "curves": curves,
        "chosen": [[*at, number] for at, number in steps.items()],
        "max": [widest, highest],
        "ends": [_counted(widest, "token"), f"{highest:.1f} ms" if highest < 100 else f"{highest:.0f} ms"],
    }


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _curve(table: CostTable) -> list[list[float]]:
    """Stairs where a step runs at the next captured size, straight lines elsewhere."""
    points: list[list[float]] = []
    for size, cost in zip(table.sizes, table.costs, strict=True):
        if points and size <= table.step_limit:
            points.append([points[-1][0], round(cost / 1e3, 3)])
        points.append([size, round(cost / 1e3, 3)])
    return points
