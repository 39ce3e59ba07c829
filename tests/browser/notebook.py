"""A notebook and its dashboard on a page, driven as a person drives them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import nbformat
from playwright.sync_api import Locator, Page, expect

if TYPE_CHECKING:
    from workbench.lab import LabServer

START_MS = 60_000
RUN_MS = 180_000


class Notebook:
    """A notebook, opened and ready to run."""

    def __init__(self, page: Page, url: str) -> None:
        self._page = page
        page.goto(f"{url}&reset", timeout=START_MS)  # without what an earlier test had open
        page.locator(".jp-NotebookPanel:visible .jp-Notebook").wait_for(timeout=START_MS)
        page.get_by_text("| Idle").wait_for(timeout=START_MS)  # the status bar: the kernel is there

    def run_all(self) -> None:
        """Run ▸ Run All Cells, and waits until every cell has run, or one has failed."""
        self._page.locator(".lm-MenuBar-itemLabel", has_text="Run").first.click()
        self._page.get_by_text("Run All Cells", exact=True).click()
        last = self._page.locator(".jp-CodeCell .jp-InputPrompt").last
        expect(last.filter(has_text=re.compile(r"\[\d+\]")).or_(self._failed).first).to_be_attached(timeout=RUN_MS)

    @property
    def _failed(self) -> Locator:
        return self._page.locator(".jp-OutputArea-output[data-mime-type*=error]")

    def errors(self) -> list[str]:
        """The tracebacks under its cells."""
        return self._failed.all_inner_texts()

    def dashboard(self) -> Dashboard:
        """The first dashboard on it."""
        root = self._page.locator(".rs-dashboard").first
        root.wait_for(timeout=START_MS)
        root.scroll_into_view_if_needed()
        return Dashboard(root)


class Dashboard:
    """The live dashboard on the page."""

    def __init__(self, root: Locator) -> None:
        self.root = root
        self._place = root.locator(".rs-place b")
        self._place.wait_for(timeout=START_MS)

    def step_number(self) -> int:
        """The step under the cursor."""
        return int(self._place.inner_text())

    def wait_for_step(self, step: int) -> None:
        """Until the cursor stands there."""
        expect(self._place).to_have_text(str(step), timeout=RUN_MS)
        expect(self.root.locator("[aria-busy]")).to_have_count(0)

    def press(self, command: str) -> None:
        """A button of the bar; returns when the step it leads to is shown, in the views out of sight too."""
        before = self.step_number()
        self.root.locator(f"button[data-command={command}]").click()
        expect(self._place).not_to_have_text(str(before), timeout=RUN_MS)
        expect(self.root.locator("[aria-busy]")).to_have_count(0)

    def reads(self, view: str) -> str:
        """The text that a person reads in a view."""
        return self.root.locator(f".rs-at-{view}").first.inner_text()

    def shows(self, view: str) -> str:
        """What a view draws: its text and its shapes."""
        return self.root.locator(f".rs-at-{view}").first.inner_html()


def made(page: Page, lab: LabServer, name: str, code: str) -> Notebook:
    """A notebook of one cell, run; `open_workbench` is imported."""
    cell = nbformat.v4.new_code_cell(f"from workbench import open_workbench\n{code}")
    notebook = nbformat.v4.new_notebook(cells=[cell])
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(notebook, lab.root / f"{name}.ipynb")
    opened = Notebook(page, lab.url(f"{name}.ipynb"))
    opened.run_all()
    assert opened.errors() == []
    return opened
