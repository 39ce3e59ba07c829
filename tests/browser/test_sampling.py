"""The sampling view as a person meets it: open it, step, and choose tokens with the mouse and the keys."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("playwright.sync_api", reason="playwright isn't installed (pip install playwright)")

from playwright.sync_api import expect

from tests.browser.notebook import made

if TYPE_CHECKING:
    from playwright.sync_api import Page

    from workbench.lab import LabServer

pytestmark = [pytest.mark.browser, pytest.mark.slow]

CODE = """from engine import SamplingParams
params = SamplingParams(temperature=0.8, top_p=0.9, top_k=30, frequency_penalty=0.5, seed=1, max_tokens=24)
dash = open_workbench(["The three primary colours are", "Once upon a time,"], sampling_params=params)
dash"""


def test_a_draw_is_opened_chosen_and_closed(page: Page, lab: LabServer, shots: Path) -> None:
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.set_viewport_size({"width": 1600, "height": 1900})
    dashboard = made(page, lab, "draws", CODE).dashboard()
    view = dashboard.root.locator(".rs-sampling")
    chosen = view.locator("[data-list=position] [aria-selected=true]")
    dashboard.press("step")
    view.get_by_role("button", name="show").click()
    expect(view).to_contain_text("no draw is traced yet")
    dashboard.press("run")
    expect(view.locator("tbody tr.rs-win").first).to_be_visible()
    newest = chosen.get_attribute("data-value")
    before = view.locator("table").first.inner_text()
    step = dashboard.step_number()
    view.locator("[data-list=position]").focus()
    page.keyboard.press("ArrowLeft")
    expect(chosen).to_have_attribute("data-value", str(int(newest or 0) - 1))
    page.keyboard.press("Home")
    expect(view.locator("[data-list=position] [data-value]").first).to_have_attribute("aria-selected", "true")
    assert dashboard.step_number() == step, "the keys belong to the list"
    assert view.locator("table").first.inner_text() != before
    dashboard.root.screenshot(path=shots / "sampling.png")
    view.locator("[data-list=request] [data-value=B]").click()
    expect(view.locator(".rs-heading")).to_contain_text("request B")
    view.get_by_role("button", name="hide").click()
    expect(view.locator("table")).to_have_count(0)
    assert errors == []
