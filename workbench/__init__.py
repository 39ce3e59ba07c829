"""The workbench: sessions that step the engine's two runners, recordings of what they did, and views of each step."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .dashboard import Dashboard, open_workbench
    from .recording import Recording, RunnerStep, StepRecord
    from .session import Session
    from .views.acceptance import AcceptanceView
    from .views.block_tables import BlockTablesView
    from .views.budget import BudgetView
    from .views.sampling import SamplingView
    from .views.state_rows import StateRowsView
    from .views.step_inputs import StepInputsView
    from .views.timeline import TimelineView
    from .views.tokens import TokensView

__all__ = [
    "AcceptanceView",
    "BlockTablesView",
    "BudgetView",
    "Dashboard",
    "Recording",
    "RunnerStep",
    "SamplingView",
    "Session",
    "StateRowsView",
    "StepInputsView",
    "StepRecord",
    "TimelineView",
    "TokensView",
    "open_workbench",
]

# Imported at first use: sessions and recordings work, and `runnerscope lab` can say what is missing, without Jupyter.
_HOME = {
    "AcceptanceView": "views.acceptance",
    "BlockTablesView": "views.block_tables",
    "BudgetView": "views.budget",
    "Dashboard": "dashboard",
    "Recording": "recording",
    "RunnerStep": "recording",
    "SamplingView": "views.sampling",
    "Session": "session",
    "StateRowsView": "views.state_rows",
    "StepInputsView": "views.step_inputs",
    "StepRecord": "recording",
    "TimelineView": "views.timeline",
    "TokensView": "views.tokens",
    "open_workbench": "dashboard",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value
