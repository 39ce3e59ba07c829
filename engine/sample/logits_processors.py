"""A caller's own change of the logits: the interface of `SamplingParams.logits_processors`, the same on both runners.

    class NoRepeat(LogitsProcessor):
        '''Never the same token twice in a row.'''

        def apply(self, logits, rows):
            last = rows.token_ids.gather(1, rows.lens.unsqueeze(1) - 1)
            return logits.scatter(1, last, float("-inf"))

    llm.generate("Once", SamplingParams(logits_processors=[NoRepeat()]))

`ORDER` in sample/order.py says when it runs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class LogitsRows:
    """What is known of the rows of logits that a processor gets. n rows, all tensors on the logits' device.

    `token_ids` i64 [n, L']: prompt, then output, then anything. `lens` i64 [n]: tokens that count; the logits are of
    the token at this position. `prompt_lens` i64 [n].
    """

    token_ids: torch.Tensor
    lens: torch.Tensor
    prompt_lens: torch.Tensor


class LogitsProcessor(ABC):
    """Changes the logits of every request that lists this object, in one call a step.

    It runs on the compute stream between the penalties and the temperature, for greedy requests too. Whatever
    makes the host look at a tensor (`.item()`, `.tolist()`, `if tensor`, a boolean index) would make every step wait.
    It is called again for the same position when a step is repeated after a failure or a preemption, so it should keep
    no state of its own: all that it needs is in `rows`. An error in it makes the step fail, and `generate` raises it.
    """

    @abstractmethod
    def apply(self, logits: torch.Tensor, rows: LogitsRows) -> torch.Tensor:
        """logits f32 [n, V], a copy that may be changed in place -> f32 [n, V]. -inf forbids a token."""


def run_processor(processor: LogitsProcessor, logits: torch.Tensor, rows: LogitsRows) -> torch.Tensor:
    """`processor.apply` on a copy of `logits`; TypeError if it doesn't give back what it must."""
    result = processor.apply(logits.clone(), rows)
    right = isinstance(result, torch.Tensor) and result.shape == logits.shape and result.dtype == logits.dtype
    if not right:
        got = f"{result.dtype} {list(result.shape)}" if isinstance(result, torch.Tensor) else type(result).__name__
        raise TypeError(
            f"{type(processor).__name__}.apply must return logits, {logits.dtype} {list(logits.shape)}; it gave {got}"
        )
    return result


def rows_of_processors(
    processors: Sequence[tuple[LogitsProcessor, ...]],
) -> list[tuple[LogitsProcessor, list[int]]]:
    """Row i of a batch lists `processors[i]` -> each processor with its rows, such that every row's own order is kept.

    Processors that several rows list are called once for all of them where their orders allow.
    """
    calls: list[tuple[LogitsProcessor, list[int]]] = []
    at_call = [0] * len(processors)  # a row's next processor may join this call or a later one
    for row, listed in enumerate(processors):
        for processor in listed:
            call = next((i for i in range(at_call[row], len(calls)) if calls[i][0] is processor), len(calls))
            if call == len(calls):
                calls.append((processor, []))
            calls[call][1].append(row)
            at_call[row] = call + 1
    return calls
