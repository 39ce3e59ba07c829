"""Runs the tests of the ES modules, *.test.mjs, under node: on the modules as widgets load them."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

import workbench
from tests.workbench.budgeted import make_budgeted_record
from tests.workbench.drafted import make_drafted_record
from tests.workbench.drawn import make_drawn_record
from tests.workbench.records import make_record
from workbench.views import acceptance, budget, sampling
from workbench.widget import load_module

HERE = Path(__file__).parent
VIEWS = ("tokens", "state_rows", "step_inputs", "block_tables", "timeline")
NODE = shutil.which("node")


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of self-contained modules, and models.json: per view a small step and one of 64 requests."""
    place = tmp_path_factory.mktemp("modules")
    records = {"small": make_record(steps=3), "many": make_record(requests=64, blocks=512, rows=64, steps=4)}
    models = {}
    for path in (Path(workbench.__file__).parent / "static").glob("*.js"):
        (place / f"{path.stem}.mjs").write_text(load_module(path.stem), encoding="utf-8")
    for name in VIEWS:
        view_model = importlib.import_module(f"workbench.views.{name}").view_model
        models[name] = {size: view_model(record) for size, record in records.items()}
    drawn = {
        "closed": make_record(),
        "small": make_drawn_record(steps=4),
        "many": make_drawn_record(requests=64, blocks=512, rows=64, steps=4),
        "greedy": make_drawn_record(greedy=True, runners=("v1",)),
    }
    models["sampling"] = {name: sampling.view_model(record) for name, record in drawn.items()}
    drafted = {
        "closed": make_record(),
        "small": make_drafted_record(confident=True, calibrated=True, requests=2, steps=30, max_tokens=24, blocks=128),
        "many": make_drafted_record(requests=64, blocks=512, rows=64, steps=6),
        "synthetic": make_drafted_record(method="synthetic", runners=("v1",)),
    }
    models["acceptance"] = {name: acceptance.view_model(record) for name, record in drafted.items()}
    budgets = {
        "closed": make_record(),
        "small": make_budgeted_record(steps=20),
        "unmeasured": make_budgeted_record(measured=False),
    }
    models["budget"] = {name: budget.view_model(record) for name, record in budgets.items()}
    (place / "models.json").write_text(json.dumps(models), encoding="utf-8")
    return place


@pytest.mark.skipif(
    NODE is None, reason="node is not on this machine; the modules are plain ES modules tested under node"
)
@pytest.mark.parametrize("path", sorted(HERE.glob("*.test.mjs")), ids=lambda path: path.name)
def test_module(path: Path, modules: Path) -> None:
    command = [NODE or "node", "--test", "--test-reporter=tap", str(path)]
    environment = {**os.environ, "RUNNERSCOPE_JS": str(modules)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\n# pass 0" not in done.stdout, f"{path.name} ran no test"
