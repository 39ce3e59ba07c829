"""Runner V2's sampler."""

from .sampler import Sampler

__all__ = ["Sampler"]
