"""Speculative rounds over the paged cache, by the drafter and kernel 32 alone: what a runner does, step by step."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from engine.attention import AttentionMetadata, allocate_kv_cache
from engine.dspark import DSparkConfig, Weights
from engine.dspark.drafter import Drafts, DraftSampling, DSparkDrafter
from engine.dspark.target import forward_with_hidden
from engine.models import CausalLM
from kernels.draft_inputs import DraftInputs, DraftRows, VerifiedStep, prepare_draft_inputs

BLOCK_SIZE, MAX_LEN = 4, 96


@dataclass
class Request:
    tokens: list[int]
    blocks: list[int]
    computed: int = 0
    drafts: list[int] = field(default_factory=list)


class PagedLoop:
    """Greedy decoding of some requests; a step verifies the drafts of the one before it and drafts anew."""

    def __init__(
        self, target: CausalLM, config: DSparkConfig, weights: Weights, form: str = "torch", num_blocks: int = 120
    ) -> None:
        self.target, self.config, self.form = target, config, form
        self.drafter = DSparkDrafter(config, weights, target, form)
        self.target_cache = allocate_kv_cache(target.config, num_blocks, BLOCK_SIZE, target.dtype, target.device)
        self.draft_cache = self.drafter.allocate_kv_cache(num_blocks, BLOCK_SIZE)
        self.last_inputs: DraftInputs | None = None
        self.last_logits = torch.empty(0)
        self.last_hidden = torch.empty(0)

    def step(
        self, requests: list[Request], chunk: int = 1000, k: int | None = None, sampling: DraftSampling | None = None
    ) -> Drafts:
        """One step of all requests; appends what was accepted and sets their next drafts."""
        counts, ids, positions, slots = [], [], [], []
        for request in requests:
            scheduled = request.tokens[request.computed :][:chunk] + request.drafts
            counts.append(len(scheduled))
            ids += scheduled
            new = range(request.computed, request.computed + len(scheduled))
            positions += new
            slots += [request.blocks[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in new]
        starts = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        seq_lens = torch.tensor([r.computed + n for r, n in zip(requests, counts, strict=True)], dtype=torch.int32)
        table = torch.zeros(len(requests), MAX_LEN // BLOCK_SIZE, dtype=torch.int32)
        for row, request in enumerate(requests):
            table[row, : len(request.blocks)] = torch.tensor(request.blocks)
        metadata = AttentionMetadata(
            len(requests), len(ids), len(ids), starts, starts.numpy(), seq_lens, seq_lens.numpy(), table,
            torch.tensor(slots), BLOCK_SIZE, max(counts), int(seq_lens.max()), 0,
        )  # fmt: skip
        flat_positions = torch.tensor(positions)
        last, hidden = forward_with_hidden(
            self.target, torch.tensor(ids, dtype=torch.int32), flat_positions, metadata, self.target_cache,
            self.config.target_layer_ids,
        )  # fmt: skip
        logits = self.target.compute_logits(last)
        self.last_logits = logits
        sampled = self._accept(requests, counts, starts.tolist(), logits)
        rejected = self._settle(requests, counts, sampled)
        step = VerifiedStep(
            torch.arange(len(requests), dtype=torch.int32), starts, flat_positions, torch.tensor(slots),
            torch.tensor(sampled, dtype=torch.int32), rejected,
        )  # fmt: skip
        return self._draft(requests, step, table, hidden, k or self.config.block_size, sampling)

    def _accept(self, requests: list[Request], counts: list[int], starts: list[int], logits: torch.Tensor) -> list[int]:
        sampled = []
        for i, request in enumerate(requests):
            known = len(request.tokens)
            if request.computed + counts[i] < known:
                sampled.append(0)
                continue
            best = logits[starts[i + 1] - len(request.drafts) - 1 : starts[i + 1]].argmax(-1).tolist()
            accepted = 0
            while accepted < len(request.drafts) and request.drafts[accepted] == best[accepted]:
                accepted += 1
            request.tokens += best[: accepted + 1]
            sampled.append(accepted + 1)
        return sampled

    def _settle(self, requests: list[Request], counts: list[int], sampled: list[int]) -> torch.Tensor:
        """How many of each request's tokens were rejected, i32 [r]; its computed tokens are brought up to date."""
        rejected = [len(r.drafts) + 1 - s if s else 0 for r, s in zip(requests, sampled, strict=True)]
        for request, count, wrong in zip(requests, counts, rejected, strict=True):
            request.computed += count - wrong
        return torch.tensor(rejected, dtype=torch.int32)

    def _draft(
        self,
        requests: list[Request],
        step: VerifiedStep,
        table: torch.Tensor,
        hidden: torch.Tensor,
        k: int,
        sampling: DraftSampling | None,
    ) -> Drafts:
        r, query, t = len(requests), self.config.block_size, step.positions.shape[0]
        inputs = DraftInputs(
            torch.empty(r * query, dtype=torch.int32),
            torch.empty(r * query, dtype=torch.int64),
            torch.empty(r * query, dtype=torch.int64),
            torch.empty(r, dtype=torch.int32),
            torch.empty(t, dtype=torch.int64),
        )
        anchors = torch.tensor([[request.tokens[-1]] for request in requests])
        num_blocks = torch.tensor([len(request.blocks) for request in requests], dtype=torch.int32)
        prepare_draft_inputs(
            inputs, step, DraftRows(anchors, table, num_blocks), num_query=query, block_size=BLOCK_SIZE,
            max_model_len=MAX_LEN, mask_token_id=self.config.mask_token_id, num_reqs_padded=r, num_tokens_padded=t,
            form=self.form,
        )  # fmt: skip
        self.drafter.inject_context(hidden, step.positions, inputs.context_slot_mapping, self.draft_cache)
        max_seq_len = max(request.computed for request in requests) + query + 1
        self.last_hidden = self.drafter.backbone(inputs, table, self.draft_cache, max_seq_len)
        drafts = self.drafter.propose(self.last_hidden, anchors[:, 0], inputs.positions.view(r, query), k, sampling)
        for i, request in enumerate(requests):
            request.drafts = drafts.tokens[i].tolist() if int(step.num_sampled[i]) else []
        self.last_inputs = inputs
        return drafts
