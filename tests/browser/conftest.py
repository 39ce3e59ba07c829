"""JupyterLab on a copy of the notebooks, and a page of headless Chromium that looks at it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Page

    from workbench.lab import LabServer

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"
SHOTS = Path(__file__).resolve().parent / "shots"
CHROMIUM_ARGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip


@pytest.fixture(scope="session")
def chromium() -> str:
    """Path of the machine's Chromium; without one there is nothing to look with."""
    path = shutil.which("chromium")
    if path is None:
        pytest.skip("no chromium on this machine (apt-get install chromium)")
    return path


@pytest.fixture(scope="session")
def lab(chromium: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LabServer]:
    """JupyterLab on a copy of notebooks/: loopback, a free port, its token, and settings of its own."""
    from workbench.lab import LabServer

    base = tmp_path_factory.mktemp("lab")
    root = base / "notebooks"
    shutil.copytree(NOTEBOOKS, root, ignore=shutil.ignore_patterns(".ipynb_checkpoints"))
    own = {name: str(base / name.lower()) for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR")}
    with LabServer(root, environment=own) as server:
        yield server


@pytest.fixture
def page(chromium: str) -> Iterator[Page]:
    """A page of 1600 × 1000 with no history."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=CHROMIUM_ARGS)
        try:
            yield browser.new_page(viewport={"width": 1600, "height": 1000})
        finally:
            browser.close()


@pytest.fixture(scope="session")
def shots() -> Path:
    """Where screenshots are kept for a person to look at; ignored by git."""
    SHOTS.mkdir(exist_ok=True)
    return SHOTS
