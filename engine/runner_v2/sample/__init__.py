"""Runner V2's sampler."""

from .sampler import Sampler, SamplerPlan

__all__ = ["Sampler", "SamplerPlan"]
