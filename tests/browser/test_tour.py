"""The tour as a person meets it: JupyterLab in Chromium, run all cells, press Step, look."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("playwright.sync_api", reason="playwright isn't installed (pip install playwright)")

from tests.browser.notebook import Notebook, made

if TYPE_CHECKING:
    from playwright.sync_api import Page

    from workbench.lab import LabServer

pytestmark = [pytest.mark.browser, pytest.mark.slow]

VIEWS = ("tokens", "state_rows", "step_inputs", "block_tables", "timeline")
NASTY = "<img src=x onerror=document.title='pwned'><script>document.title='pwned'</script>"


@pytest.fixture
def complaints(page: Page) -> Iterator[list[str]]:
    """What the page's console and its scripts call an error; a test that leaves any fails."""
    found: list[str] = []
    page.on("console", lambda message: found.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: found.append(str(error)))
    yield found
    assert not found


def test_the_tour_runs_and_step_moves_every_view(
    page: Page, lab: LabServer, shots: Path, complaints: list[str]
) -> None:
    tour = Notebook(page, lab.url("00_tour.ipynb"))
    tour.run_all()
    assert tour.errors() == []
    dashboard = tour.dashboard()
    before = {view: dashboard.shows(view) for view in VIEWS}
    step = dashboard.step_number()
    page.screenshot(path=shots / "tour_before.png")
    dashboard.press("step")
    assert dashboard.step_number() == step + 1
    after = {view: dashboard.shows(view) for view in VIEWS}
    page.screenshot(path=shots / "tour_after.png")
    page.set_viewport_size({"width": 1600, "height": 2000})  # all of it on one picture
    dashboard.root.screenshot(path=shots / "dashboard.png")
    unchanged = [view for view in ("tokens", "state_rows", "step_inputs", "timeline") if before[view] == after[view]]
    assert not unchanged


def test_keys_step_and_go_back(page: Page, lab: LabServer, complaints: list[str]) -> None:
    dashboard = made(page, lab, "keys", "open_workbench('The capital of France is')").dashboard()
    dashboard.root.focus()
    texts = [dashboard.shows("tokens")]
    for key, step in (("ArrowRight", 1), ("ArrowRight", 2), ("ArrowLeft", 1), ("Home", 0)):
        page.keyboard.press(key)
        dashboard.wait_for_step(step)
        texts.append(dashboard.shows("tokens"))
    assert texts[1] == texts[3] and texts[0] == texts[4] and len({texts[0], texts[1], texts[2]}) == 3
    page.keyboard.press("r")
    dashboard.wait_for_step(10)


def test_text_of_a_prompt_is_text_on_the_page(page: Page, lab: LabServer, shots: Path, complaints: list[str]) -> None:
    dashboard = made(page, lab, "nasty", f"open_workbench([{NASTY!r}], max_num_batched_tokens=64)").dashboard()
    dashboard.press("step")
    page.screenshot(path=shots / "nasty.png")
    assert "<imgsrc=xonerror=" in re.sub(r"\s|␣|·", "", dashboard.reads("tokens"))
    assert dashboard.root.locator("img, script, [onerror]").count() == 0
    assert "pwned" not in page.title()


def test_a_bad_setting_is_said_and_harms_nothing(page: Page, lab: LabServer, complaints: list[str]) -> None:
    dashboard = made(page, lab, "bad", "open_workbench('The capital of France is')").dashboard()
    dashboard.press("step")
    dashboard.root.locator("[name=block_size]").fill("0")
    dashboard.root.locator("button[type=submit]").click()
    dashboard.root.locator(".rs-error", has_text="block_size=0").wait_for(timeout=30_000)
    dashboard.press("step")
    assert dashboard.step_number() == 2
