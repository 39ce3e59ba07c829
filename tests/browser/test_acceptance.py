"""The acceptance view as a person meets it: open it, step, choose a request, in the light and in the dark theme."""

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
ngram = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
dash = open_workbench(
    ["one two three one two three one two", "The cat sat on the mat. The cat sat on the"], speculative_config=ngram,
    async_scheduling=False, sampling_params=SamplingParams(temperature=0.5, seed=1, max_tokens=40, ignore_eos=True))
dash"""


def test_drafts_are_opened_chosen_and_closed(page: Page, lab: LabServer, shots: Path) -> None:
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.set_viewport_size({"width": 1600, "height": 1900})
    dashboard = made(page, lab, "drafts", CODE).dashboard()
    view = dashboard.root.locator(".rs-acceptance")
    dashboard.press("step")
    expect(view.locator("table")).to_have_count(0)
    view.get_by_role("button", name="show").click()
    expect(view).to_contain_text("no drafts are traced yet")
    dashboard.press("run")
    expect(view.locator("td.rs-accepted").first).to_be_visible()
    expect(view.locator("section")).to_have_count(2)
    view.screenshot(path=shots / "acceptance-light.png")
    before = view.locator("table").first.inner_text()
    view.locator("[data-request=B]").click()
    expect(view.locator(".rs-heading")).to_contain_text("request B")
    assert view.locator("table").first.inner_text() != before
    choose_theme(page, "Dark")
    view.screenshot(path=shots / "acceptance-dark.png")
    choose_theme(page, "Light")  # the setting outlives the page
    view.get_by_role("button", name="hide").click()
    expect(view.locator("table")).to_have_count(0)
    assert errors == []


def choose_theme(page: Page, name: str) -> None:
    """Settings ▸ Theme ▸ JupyterLab <name>, and waits until the page has it and the splash that hides the change is
    gone."""
    page.locator(".lm-MenuBar-itemLabel", has_text="Settings").first.click()
    page.locator(".lm-Menu-itemLabel", has_text="Theme").first.hover()
    page.locator(".lm-Menu-itemLabel", has_text=f"JupyterLab {name}").first.click()
    page.locator(f"body[data-jp-theme-name='JupyterLab {name}']").wait_for(state="attached")
    expect(page.locator("#jupyterlab-splash")).to_have_count(0)
