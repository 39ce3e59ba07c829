"""Model runner V1: the dense, moving batch."""

from .runner import ModelRunnerV1

__all__ = ["ModelRunnerV1"]
