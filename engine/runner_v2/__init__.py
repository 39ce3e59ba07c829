"""Model runner V2: the state table."""

from .runner import ModelRunnerV2

__all__ = ["ModelRunnerV2"]
