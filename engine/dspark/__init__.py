"""DSpark: a draft of parallel blocks over the target's own hidden states, its training, and what decides how many of
its tokens are verified. After arXiv 2607.05147, in the format of the published checkpoints.
"""

from __future__ import annotations

from .checkpoint import Weights, init_weights, read_draft, write_draft
from .config import DraftConfigError, DSparkConfig, read_draft_config

__all__ = [
    "DSparkConfig",
    "DraftConfigError",
    "Weights",
    "init_weights",
    "read_draft",
    "read_draft_config",
    "write_draft",
]
