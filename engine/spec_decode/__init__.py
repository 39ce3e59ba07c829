"""Drafts from above the runner: n-gram lookup, a smaller model, one more head. What is fused into V2's step is in
engine/dspark."""

from .draft_model import DraftModelDecoder, check_draft_model
from .draw import DraftSampler
from .interface import NO_DRAFT, FinishedStep, RowTables, SpecDecoder
from .ngram import NgramDecoder

__all__ = [
    "NO_DRAFT",
    "DraftModelDecoder",
    "DraftSampler",
    "FinishedStep",
    "NgramDecoder",
    "RowTables",
    "SpecDecoder",
    "check_draft_model",
]
