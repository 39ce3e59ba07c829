"""The budget view as a person meets it: steps of a drafter under a budget, light, dark and narrow."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("playwright.sync_api", reason="playwright isn't installed (pip install playwright)")

from playwright.sync_api import expect

from tests.browser.notebook import made
from tests.browser.test_acceptance import choose_theme
from tests.engine.dspark.golden import ROOT

if TYPE_CHECKING:
    from playwright.sync_api import Page

    from workbench.lab import LabServer

pytestmark = [pytest.mark.browser, pytest.mark.slow]

HEAD = ROOT / "vanilla"
CODE = f"""from engine import SamplingParams
spec = {{"method": "dspark", "model": {str(HEAD / "draft")!r}, "verification_schedule": "budgeted"}}
prompts = [{{"prompt_token_ids": [(7 * i + k) % 250 for k in range(5)], "arrive_at_step": 1 + 4 * i}} for i in range(6)]
dash = open_workbench(
    prompts, runners="v2", model={str(HEAD / "target")!r}, dtype="float32", skip_tokenizer_init=True,
    speculative_config=spec, max_num_seqs=8, max_num_batched_tokens=64, num_gpu_blocks_override=120, max_model_len=96,
    sampling_params=SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True))
dash"""


def test_budgets_and_confidences_are_read(page: Page, lab: LabServer, shots: Path) -> None:
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.set_viewport_size({"width": 1600, "height": 2200})
    dashboard = made(page, lab, "budget", CODE).dashboard()
    view = dashboard.root.locator(".rs-budget")
    expect(view.locator("table")).to_have_count(0)
    dashboard.root.locator(".rs-acceptance").get_by_role("button", name="show").click()
    for _ in range(3):
        dashboard.press("run")
    expect(view.locator("section")).to_have_count(1)
    expect(view.locator("circle.rs-newest")).to_have_count(1)
    loads = view.locator("table").first.locator("tbody tr")
    assert loads.count() > 3, "the requests come one after the other"
    diagrams = dashboard.root.locator(".rs-reliability svg")
    expect(diagrams).to_have_count(1)
    both = dashboard.root.locator(".rs-acceptance, .rs-budget")
    for name, theme, width in (("light", "Light", 1600), ("dark", "Dark", 1600), ("narrow", "Light", 700)):
        choose_theme(page, theme)
        page.set_viewport_size({"width": width, "height": 2200})
        page.wait_for_timeout(300)
        for i in range(2):
            both.nth(i).screenshot(path=shots / f"budget-{name}-{i}.png")
        wide = view.evaluate("node => node.scrollWidth - node.clientWidth")
        assert wide <= 1, f"the view is wider than its place at {width} pixels"
    assert errors == []
