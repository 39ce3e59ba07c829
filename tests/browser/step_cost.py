"""What a step costs beyond the model's own time: on Python's side, and on the page until it is painted.

Times are processor time of the one thread that does the work, so that other programs on the machine count little. The
kernel's clock and the browser's trace are both CLOCK_MONOTONIC, so the two sides can be laid together.
"""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from playwright.sync_api import Page

from tests.browser.notebook import Dashboard

REQUESTS, BLOCKS = 64, 512
KERNEL = f"""
import json, time
from engine import SamplingParams
from engine.core import EngineCore
from workbench import open_workbench

spent = ended = 0.0

def timed(method):
    def call(core):
        global spent, ended
        begin = time.thread_time()
        try:
            return method(core)
        finally:
            spent += time.thread_time() - begin
            ended = time.monotonic()
    return call

EngineCore.step, EngineCore.drain = timed(EngineCore.step), timed(EngineCore.drain)
dashboard = open_workbench(
    [{{"prompt_token_ids": [(i * 11 + k * 7) % 300 for k in range(8)]}} for i in range({REQUESTS})],
    model="tiny-llama", load_format="dummy", max_num_seqs={REQUESTS}, num_gpu_blocks_override={BLOCKS}, block_size=4,
    max_num_batched_tokens=256, max_model_len=96,
    sampling_params=SamplingParams(temperature=0.0, max_tokens=80, ignore_eos=True),
)
dashboard.run(4)
do = dashboard._do

def measured(action):
    global spent
    spent, begin = 0.0, time.thread_time()
    do(action)
    with open("costs.jsonl", "a") as file:
        print(json.dumps([(time.thread_time() - begin - spent) * 1e3, ended * 1e6]), file=file)

dashboard._do = measured
dashboard
"""
"""A notebook's cell: the dashboard of a run in which every request decodes a token a step. Each step adds a line to
costs.jsonl: milliseconds of the kernel's thread beyond the engines' own, and when the last engine was done, in µs."""

COUNT = """() => {
  const dashboard = document.querySelector(".rs-dashboard");
  const seen = new MutationObserver((found) => { window.rsTouched += found.length; });
  seen.observe(dashboard, { subtree: true, childList: true, attributes: true, characterData: true });
  dashboard.addEventListener("rs-done", () => {
    window.rsTouched = 0;
    requestAnimationFrame(() => setTimeout(() => window.rsSteps.push(window.rsTouched)));
  }, true);
  window.rsSteps = [];
}"""
"""Counts, for each step, what changes on the page before it is painted."""

KINDS = {
    "FunctionCall": "script", "FireAnimationFrame": "script", "v8.callFunction": "script", "EventDispatch": "script",
    "UpdateLayoutTree": "layout", "Document::updateStyle": "layout", "Layout": "layout",
    "LocalFrameView::performLayout": "layout",
    "PrePaint": "paint", "Paint": "paint", "Layerize": "paint", "Commit": "paint",
}  # fmt: skip


@dataclass(frozen=True)
class StepCost:
    """Medians over the steps: milliseconds of processor time, and how many nodes and attributes changed."""

    python: float
    script: float
    layout: float
    paint: float
    page: float
    """All of the page's main thread from the model's end to the painted page: script, layout, paint, and the rest."""
    wall: float
    """Milliseconds from the model's end to the painted page. Other programs count in it."""
    touched: int
    most_touched: int

    @property
    def total(self) -> float:
        return self.python + self.page


def measure(page: Page, dashboard: Dashboard, costs: Path, steps: int = 16) -> StepCost:
    """Presses Step so often, each time once the page has come to rest. `costs` is the file that `KERNEL` writes."""
    for _ in range(3):
        dashboard.press("step")
    page.evaluate(COUNT)
    browser = page.context.browser
    assert browser is not None
    categories = ["devtools.timeline", "disabled-by-default-devtools.timeline", "toplevel", "v8", "blink"]
    browser.start_tracing(page=page, categories=categories)
    for _ in range(steps):
        dashboard.press("step")
        page.wait_for_timeout(250)
    trace = json.loads(browser.stop_tracing())["traceEvents"]
    kernel = [json.loads(line) for line in costs.read_text().splitlines()][-steps:]
    touched = page.evaluate("window.rsSteps")
    assert len(touched) == steps
    tasks = list(_tasks(trace))
    pages = [_until_painted(tasks, end) for _, end in kernel]

    def median(name: str) -> float:
        return statistics.median(one[name] for one in pages)

    return StepCost(
        python=statistics.median(cost for cost, _ in kernel),
        script=median("script"), layout=median("layout"), paint=median("paint"), page=median("all"),
        wall=median("wall"), touched=int(statistics.median(touched)), most_touched=max(touched),
    )  # fmt: skip


def _tasks(trace: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """The tasks of the page's main thread, in order: each with all that it did, outer events first."""
    named = {(e["pid"], e["tid"]): e["args"]["name"] for e in trace if e["ph"] == "M" and e["name"] == "thread_name"}
    ours = [e for e in trace if e["ph"] == "X" and named.get((e["pid"], e["tid"])) == "CrRendererMain"]
    clicked = next(e["pid"] for e in ours if _is(e, "click"))
    task: list[dict[str, Any]] = []
    for event in sorted((e for e in ours if e["pid"] == clicked), key=lambda e: (e["ts"], -e["dur"])):
        if task and event["ts"] < task[0]["ts"] + task[0]["dur"]:
            task.append(event)
            continue
        if task:
            yield task
        task = [event]
    if task:
        yield task


def _is(event: dict[str, Any], kind: str) -> bool:
    return event["name"] == "EventDispatch" and event["args"].get("data", {}).get("type") == kind


def _until_painted(tasks: list[list[dict[str, Any]]], begin_us: float) -> dict[str, float]:
    """What the tasks from here on cost, up to the first one that paints after every view has its new model."""
    spent: Counter[str] = Counter()
    done = False
    for task in tasks:
        if task[0]["ts"] < begin_us:
            continue
        spent["all"] += task[0].get("tdur", 0) / 1e3
        for name, own in _own_times(task):
            spent[KINDS.get(name, "rest")] += own / 1e3
        done = done or any(_is(event, "rs-done") for event in task)
        if done and any(event["name"] == "FireAnimationFrame" for event in task):
            spent["wall"] = (task[0]["ts"] + task[0]["dur"] - begin_us) / 1e3
            return dict(spent)
    raise AssertionError("the trace ends before the step is painted")


def _own_times(task: list[dict[str, Any]]) -> Iterator[tuple[str, float]]:
    """Each event of a kind of ours with its time less that of those within it; other events count for theirs."""
    stack: list[list[Any]] = []
    for event in task:
        while stack and stack[-1][0] <= event["ts"]:
            _, name, own = stack.pop()
            yield name, own
        if event["name"] not in KINDS and stack:
            continue
        cost = event.get("tdur", 0)
        if stack:
            stack[-1][2] -= cost
        stack.append([event["ts"] + event["dur"], event["name"], cost])
    yield from ((name, own) for _, name, own in stack)
