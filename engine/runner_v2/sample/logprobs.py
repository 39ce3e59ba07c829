"""Logprobs of the sampled tokens: kernel 19, for no more rows and no more tokens than were asked for.

l rows of logits, V vocabulary. Most requests ask for a few tokens: one pass over the whole batch serves them all, and
needs no index. Those that ask for many, or for all, get a pass of their own, so that one of them in a batch does not
make [l, V] of everybody's.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from kernels import topk_logprobs

from ...device import Device
from ...sample.logprobs import LogprobsTensors, RequestLogprobs, rows_to_dicts

NO_LOGPROBS = -1
FEW_LOGPROBS = 32
"""The most that a request may ask for to be served with all others."""


@dataclass(frozen=True, eq=False)
class WideLogprobs:
    """The rows of logits that are worth a pass of their own.

    `rows` maps a row of the logits to its row of the pass, which finds the `k` best. `index` i64 [n] are the rows of
    the logits. Equal to nothing but itself: a batch with one is never like a captured one.
    """

    k: int
    rows: dict[int, int]
    index: torch.Tensor


@dataclass(frozen=True)
class LogprobsPlan:
    """`few` is the most that a request of the batch asks for among those that ask for few; NO_LOGPROBS if none does."""

    few: int = NO_LOGPROBS
    wide: WideLogprobs | None = None

    @property
    def wanted(self) -> bool:
        return self.few != NO_LOGPROBS or self.wide is not None


NO_LOGPROBS_PLAN = LogprobsPlan()


@dataclass(frozen=True)
class SampledLogprobs:
    """`few` of the whole batch, row by row of the logits; `wide` of the rows of `WideLogprobs`."""

    few: LogprobsTensors | None
    wide: LogprobsTensors | None

    def as_dict(self) -> dict[str, torch.Tensor]:
        """The tensors under the names that `row_to_dict` reads."""
        wide = self.wide.as_dict() if self.wide is not None else {}
        few = self.few.as_dict() if self.few is not None else {}
        return few | {f"wide_{name}": tensor for name, tensor in wide.items()}


def plan_logprobs(device: Device, num_logprobs: np.ndarray) -> LogprobsPlan:
    """For rows of logits that ask for `num_logprobs` i32 [l]. An index is uploaded here."""
    is_wide = num_logprobs > FEW_LOGPROBS
    if not is_wide.any():
        return LogprobsPlan(int(num_logprobs.max(initial=NO_LOGPROBS)))
    few = int(num_logprobs[~is_wide].max(initial=NO_LOGPROBS))
    indices = np.flatnonzero(is_wide)
    rows = {int(row): i for i, row in enumerate(indices)}
    return LogprobsPlan(few, WideLogprobs(int(num_logprobs.max()), rows, device.to_device(indices)))


def compute_logprobs(
    plan: LogprobsPlan, logits: torch.Tensor, sampled: torch.Tensor, form: str
) -> SampledLogprobs | None:
    """Called on the stream; None if no request of the batch asked. logits f32 [l, V], sampled i64 [l]."""
    few = wide = None
    if plan.few != NO_LOGPROBS:
        few = LogprobsTensors(*topk_logprobs(logits, sampled, plan.few, form=form))
    if plan.wide is not None:
        index = plan.wide.index
        wide = LogprobsTensors(*topk_logprobs(logits[index], sampled[index], plan.wide.k, form=form))
    return SampledLogprobs(few, wide) if few is not None or wide is not None else None


def row_to_dict(plan: LogprobsPlan, host: dict[str, np.ndarray], row: int, k: int) -> RequestLogprobs:
    """What a row of the logits gets that asked for `k`, from `SampledLogprobs.as_dict()`, copied to the host."""
    prefix = ""
    if plan.wide is not None and row in plan.wide.rows:
        prefix, row = "wide_", plan.wide.rows[row]
    token_ids, logprobs, ranks = (host[prefix + name] for name in ("token_ids", "logprobs", "ranks"))
    return rows_to_dicts(token_ids, logprobs, ranks, row, k)
