"""How many drafts of each request a step of runner V2 verifies: dspark/schedule.py inside the step.

What decides is where the lengths are made, since the host launches a step before the device knows them:

- fixed: all drafts there are.
- threshold, early_stop: the device cuts the drafts as they are proposed. The step was sized for all of them, so this
  saves no work; it is here for the law and the lengths, to be compared.
- budgeted: the host chooses, from confidences of an earlier round, how many rows the whole step has, and the device
  gives them to the drafts that will most likely be accepted. This step is smaller. Beside prompts every request has
  as many verified, as the budget there allows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from kernels.allot_verification import allot_verification

from ..attention import AttentionMetadata
from ..device import Device
from ..dspark.costs import CostTable
from ..dspark.schedule import Budgets, StaleConfidences, early_stop_lengths, threshold_lengths
from ..hooks import Hooks, VerificationBudgeted
from ..spec_decode import NO_DRAFT, SpecDecoder
from ..speculative_config import SpeculativeConfig

MeasureStep = Callable[[int, int], float]
"""Seconds of a step of (requests, tokens)."""


class Verification:
    """The schedule of an engine.

    Args:
        decoder: its `confidences` decide, unless the schedule is "fixed".
        max_num_reqs: R.
        form: kernel form.
    """

    def __init__(
        self, config: SpeculativeConfig, decoder: SpecDecoder, device: Device, hooks: Hooks, max_num_reqs: int,
        form: str = "auto",
    ) -> None:  # fmt: skip
        self.schedule = config.verification_schedule
        self._threshold = config.confidence_threshold
        self._decoder, self._device, self._hooks = decoder, device, hooks
        self._num_drafts = decoder.num_drafts
        self._form = form
        self._round = 0
        self._budgets = Budgets({})
        # Of a step that verifies that many tokens: all the same until it was measured.
        self._steps_per_second = torch.ones(
            max_num_reqs * (self._num_drafts + 1) + 1, dtype=torch.float32, device=device.torch_device
        )
        # What the device makes of a step's index under a budget, i32 [R + 1] each.
        self.query_start_loc = device.zeros(max_num_reqs + 1, dtype=torch.int32)
        self.cu_num_logits = device.zeros(max_num_reqs + 1, dtype=torch.int32)

    @property
    def is_budgeted(self) -> bool:
        return self.schedule == "budgeted"

    @property
    def step_costs(self) -> Mapping[int, CostTable]:
        """By number of requests, microseconds of a whole step by its tokens; empty where no schedule asks for it."""
        return self._budgets.step_costs

    @property
    def captured_drafts(self) -> tuple[int, ...]:
        """Verified drafts a request, on average, for which a step is captured."""
        n = self._num_drafts
        return tuple(sorted({0, 1, 2, 3, 5, n} & set(range(n + 1)))) if self.is_budgeted else (n,)

    # -- at start ------------------------------------------------------------------------------------------------------

    def measure(self, sizes: Mapping[int, Sequence[int]], measure: MeasureStep, *, is_captured: bool) -> None:
        """Fills the cost tables, for the schedules that divide by them. Waits for the device.

        Args:
            sizes: the numbers of tokens to measure, by number of requests.
            measure: of a whole step, drafting included.
            is_captured: a step of a size in between is run at the next larger one.
        """
        if self.schedule not in ("early_stop", "budgeted"):
            return
        tables = {}
        for num_reqs, tokens in sizes.items():

            def cost(num_tokens: int, num_reqs: int = num_reqs) -> float:
                return measure(num_reqs, num_tokens) * 1e6

            limit = max(tokens) if is_captured else 0
            tables[num_reqs] = CostTable.measured(sorted(tokens), cost, limit, repeats=3)
        self._budgets = Budgets(tables)
        by_tokens = {table.sizes[-1]: table.costs[-1] for table in tables.values()}
        every = CostTable.measured(sorted(by_tokens), by_tokens.__getitem__, repeats=1)
        rates = 1e6 / np.array(every.up_to(len(self._steps_per_second) - 1))
        self._steps_per_second.copy_(torch.from_numpy(rates.astype(np.float32)))

    # -- on the host, in a step ----------------------------------------------------------------------------------------

    def budget(self, num_reqs: int, num_reqs_padded: int, budgets: Sequence[int] | None = None) -> int:
        """How many drafts this step verifies in all, one of the ascending `budgets` if they are given."""
        self._round += 1
        if not self.is_budgeted:
            return num_reqs_padded * self._num_drafts
        return self._choose(num_reqs, num_reqs_padded, budgets)

    def budget_beside_prompts(self, num_reqs: int, num_tokens: int) -> int:
        """How many drafts each of `num_reqs` > 0 requests has verified in a step of `num_tokens` tokens besides, of
        prompts too. All have as many, so that the step's index is the host's."""
        self._round += 1
        budgets = tuple(num_reqs * drafts for drafts in range(self._num_drafts + 1))
        return self._choose(num_reqs, num_tokens, budgets) // num_reqs

    def _choose(self, num_reqs: int, num_tokens: int, budgets: Sequence[int] | None) -> int:
        chosen, expected = self._budgets.budget(
            self._round, num_reqs, self._num_drafts, num_tokens=num_tokens, budgets=budgets
        )
        if VerificationBudgeted in self._hooks.wanted:
            stamp, drafts = self._hooks.stamp(), num_reqs * self._num_drafts
            self._hooks.emit(VerificationBudgeted(*stamp, num_reqs, drafts, num_tokens, chosen, expected))
        return chosen

    def observer(self) -> Callable[[np.ndarray], None] | None:
        """Who wants the confidences of this round's drafts once they are on the host, f32 [r, N]; None: nobody."""
        if not self.is_budgeted:
            return None
        this_round = self._round
        return lambda confidences: self._budgets.observe(StaleConfidences(this_round, confidences))

    # -- on the device -------------------------------------------------------------------------------------------------

    def cut(self, drafts: torch.Tensor, idx_mapping: torch.Tensor) -> torch.Tensor:
        """Drafts i64 [r, N] of the rows `idx_mapping` without those that the schedule leaves out at once."""
        if self.schedule not in ("threshold", "early_stop"):
            return drafts
        confidences = self._confidences(idx_mapping)
        if self.schedule == "threshold":
            assert self._threshold is not None
            lengths = threshold_lengths(confidences, self._threshold)
        else:
            lengths = early_stop_lengths(confidences, self._steps_per_second)
        number = torch.arange(drafts.shape[1], device=drafts.device)
        return drafts.masked_fill(number >= lengths.unsqueeze(1), NO_DRAFT)

    def allot(self, idx_mapping: torch.Tensor, query_start_loc: torch.Tensor, budget: int) -> None:
        """Makes `query_start_loc` and `cu_num_logits` of a step that verifies `budget` drafts in all.

        Args:
            idx_mapping: i32 [r].
            query_start_loc: i32 [>= r + 1], with all drafts that have room; padding has no tokens, and keeps one row
                of logits.
        """
        assert self._decoder.confidences is not None, "checked when the engine was made"
        allot_verification(
            self._decoder.confidences, idx_mapping, query_start_loc, budget, self.query_start_loc, self.cu_num_logits,
            form=self._form,
        )  # fmt: skip

    def _confidences(self, idx_mapping: torch.Tensor) -> torch.Tensor:
        assert self._decoder.confidences is not None, "checked when the engine was made"
        return self._decoder.confidences[idx_mapping.long()]


def with_lengths_read(metadata: AttentionMetadata) -> AttentionMetadata:
    """Called on the stream of a CPU: with the lengths that its device tensor holds by then, by which its attention
    groups requests."""
    start = metadata.query_start_loc[: metadata.num_reqs + 1].numpy().copy()
    return replace(metadata, query_start_loc_np=start, num_tokens=int(start[-1]), num_decodes=0)
