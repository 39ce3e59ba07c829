"""Runner V2's sampler on its own: a state table, requests in it, and what was launched and uploaded for them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from engine import SamplingParams
from engine.device import Device
from engine.hooks import Hooks
from engine.runner_v2.sample import Sampler
from engine.runner_v2.sample.sampler import SamplerOutput, SamplerPlan
from engine.runner_v2.sample.states import SamplingStates
from engine.runner_v2.sample.tables import DraftRows, TokenTable
from engine.runner_v2.states import RequestState
from engine.sched_output import NewRequestData


class SamplerBench:
    """`log` has the names of all work submitted to the compute stream and one "upload" for each fresh copy."""

    def __init__(self, vocab: int = 40, max_reqs: int = 4, max_len: int = 48, form: str = "torch") -> None:
        self.form = form
        self.device = Device(torch.device("cpu"), Hooks("v2"))
        self.requests = RequestState(self.device, max_reqs, max_len, 2, form)
        self.states = SamplingStates(self.device, max_reqs, vocab, 7, 2, form)
        tokens = self.requests
        self.tokens = TokenTable(tokens.all_token_ids.gpu, tokens.prompt_len.gpu, tokens.prefill_len.gpu)
        self.sampler = Sampler(self.states, form, self.tokens)
        self.log: list[str] = []
        self._num_added = 0
        submit, to_device = self.device.compute.submit, self.device.to_device

        def logged_submit(name: str, *work: Any) -> None:
            self.log.append(name)
            submit(name, *work)

        def logged_upload(array: np.ndarray) -> torch.Tensor:
            self.log.append("upload")
            return to_device(array)

        self.device.compute.submit = logged_submit  # type: ignore[method-assign]
        self.device.to_device = logged_upload  # type: ignore[method-assign]

    def add(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        output: Sequence[int] = (),
        stop_ids: Iterable[int] = (),
    ) -> int:
        """Adds a request and returns its row; with `output` it is one that comes back after a preemption."""
        self._num_added += 1
        new = NewRequestData(
            req_id=f"r{self._num_added}",
            prompt_token_ids=list(prompt),
            prefill_token_ids=[*prompt, *output],
            num_prompt_tokens=len(prompt),
            sampling_params=params,
            block_ids=[],
            num_computed_tokens=0,
            request_seed_index=self._num_added,
            stop_token_ids=frozenset(stop_ids),
        )
        row = self.requests.add_request(new)
        self.sampler.add_request(row, new)
        return row

    def remove(self, row: int) -> None:
        self.requests.remove_request(self.requests.index_to_req_id[row])

    def apply_staged_writes(self) -> list[str]:
        """The tokens first, as the runner does; what the sampler launched is returned, and alone in `log`."""
        self.requests.apply_staged_writes()
        self.log.clear()
        launched = self.sampler.apply_staged_writes()
        self.device.drain()
        return launched

    def rows(self, rows: Sequence[int], num_outputs: Sequence[int], drafts: Sequence[Sequence[int]] = ()) -> dict:
        """`idx_mapping`, `positions` and `drafts` of a step of these rows; drafts of each request, or none."""
        drafts = drafts or [()] * len(rows)
        local = [j for own in drafts for j in range(len(own) + 1)]
        tokens = [token for own in drafts for token in (0, *own)]
        prompt_len = [int(self.requests.prompt_len.np[row]) for row in rows]
        positions = [
            length + n + j
            for length, n, own in zip(prompt_len, num_outputs, drafts, strict=True)
            for j in range(len(own) + 1)
        ]
        i32 = {"dtype": torch.int32}
        return {
            "idx_mapping": torch.tensor([row for row, own in zip(rows, drafts, strict=True) for _ in (0, *own)], **i32),
            "positions": torch.tensor(positions),
            "drafts": DraftRows(torch.tensor(local, **i32), torch.tensor(tokens, **i32), max(map(len, drafts))),
        }

    def plan(self, rows: Sequence[int], drafts: Sequence[Sequence[int]] = ()) -> SamplerPlan:
        num_logits = np.array([len(own) + 1 for own in drafts]) if drafts else None
        return self.sampler.plan(np.array(rows, dtype=np.int32), num_logits)

    def sample(self, plan: SamplerPlan, logits: torch.Tensor, **rows: Any) -> SamplerOutput:
        with torch.inference_mode():
            return self.sampler.sample(plan, logits, **rows)

    def before_the_draw(self, plan: SamplerPlan, logits: torch.Tensor, **rows: Any) -> dict[str, torch.Tensor]:
        """The logits behind each stage, under the stage's names joined."""
        with torch.inference_mode():
            stages = self.sampler.stages(plan, logits, self.sampler.rows(**rows))
            return {" ".join(names): x.clone() for names, x in stages}

    def close(self) -> None:
        self.device.close()


@contextmanager
def sampler_bench(**kwargs: Any) -> Iterator[SamplerBench]:
    bench = SamplerBench(**kwargs)
    try:
        yield bench
    finally:
        bench.close()
