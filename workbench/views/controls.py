"""The bar above the views: where the cursor is, the buttons with their keys, and the form."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from engine.hooks import HostWait

from ..conditions import NAMED
from ..html import Html, Markup, h
from ..recording import RunnerStep, StepRecord
from ..widget import LiveView


def view_model(record: StepRecord) -> dict[str, Any]:
    """Where the cursor is. What only a dashboard knows (the form, an error) is added by `ControlsView.tell`."""
    meta = record.history.meta
    return {
        "chip": [str(meta[key]) for key in ("model", "device", "kernel_backend") if meta.get(key)],
        "step": record.step,
        "phase": _phase(record),
        "loop": next((done.snapshot.loop for done in record.runners.values()), ""),
        "waits": [_waits(name, done) for name, done in record.runners.items()],
    }


def figure(record: StepRecord) -> Html:
    """One line of text: step, phase, and each runner's waits."""
    model = view_model(record)
    quiet = "color:#667078"
    parts: list[Markup] = [
        h("b", f"step {model['step']}"),
        h("span", f" · {model['phase']} · {model['loop']} loop", style=quiet),
    ]
    for wait in model["waits"]:
        parts.append(h("span", f" · {wait['runner']} {wait['text']}", title=wait["title"]))
    parts.append(h("span", f" · {' · '.join(model['chip'])}", style=quiet))
    return Html(f"Controls step {record.step}", h("div", parts))


def _phase(record: StepRecord) -> str:
    if record.step == 0:
        return "before the first step"
    phases = {name: done.phase for name, done in record.runners.items()}
    if all(phase == "output" for phase in phases.values()):
        return "whole step"
    if len(set(phases.values())) == 1:
        return f"after {next(iter(phases.values()))}"
    return ", ".join(f"{name.upper()} after {phase}" for name, phase in phases.items())


def _waits(name: str, done: RunnerStep) -> dict[str, Any]:
    """How often and how long the host stood still inside this step, and for what."""
    inside = [wait for wait in done.of(HostWait) if wait.inside_step]
    outside = sum(not wait.inside_step for wait in done.of(HostWait))
    ms = sum(wait.end_ns - wait.begin_ns for wait in inside) / 1e6
    reasons = Counter(wait.reason for wait in inside)
    detail = "; ".join(f"{reason} ×{count}" for reason, count in reasons.items()) or "the host never stood still"
    text = f"{len(inside)} wait{'' if len(inside) == 1 else 's'}"
    if inside:
        text += f" {ms:.1f} ms" if ms >= 0.05 else " <0.1 ms"
    return {
        "runner": name.upper(),
        "count": len(inside),
        "text": text,
        "title": f"{name.upper()} inside this step: {detail}. Outside, fetching finished output: {outside}.",
    }


class ControlsView(LiveView, static="controls"):
    """The bar. Buttons and keys arrive as custom messages `{"command": …, "seq": …}`; the dashboard answers them."""

    view_model = staticmethod(view_model)

    def tell(self, record: StepRecord, **more: Any) -> None:
        """Shows the record's place together with what the dashboard adds: form, error, steps, finished, ack."""
        self._step = record.step
        conditions = [[name, text] for name, (_, text) in NAMED.items()] + [["end", "everything is done"]]
        model: Mapping[str, Any] = {**view_model(record), "conditions": conditions, **more}
        self.model = dict(model)
