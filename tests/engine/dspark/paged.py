"""Speculative rounds over the paged cache, by target and decoder alone: what a runner does, step by step."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine.attention import AttentionMetadata, allocate_kv_cache
from engine.dspark import DSparkConfig, Weights
from engine.dspark.calibration import Calibration
from engine.dspark.decoder import DSparkDecoder
from engine.dspark.drafter import Drafts, Draw, DSparkDrafter
from engine.dspark.target import forward_with_hidden
from engine.models import CausalLM
from engine.spec_decode import DraftSampler, FinishedStep, RowTables
from kernels.draft_inputs import DraftInputs
from tests.engine.dspark.golden import Golden

BLOCK_SIZE, MAX_LEN, ROWS = 4, 96, 6


@dataclass
class Request:
    tokens: list[int]
    blocks: list[int]
    computed: int = 0
    drafts: list[int] = field(default_factory=list)
    row: int = 0
    temperature: float = 0.0


class RecordingDrafter(DSparkDrafter):
    """Keeps what its last block was."""

    inputs: DraftInputs
    hidden: Tensor
    drafts: Drafts

    def backbone(self, inputs: DraftInputs, block_table: Tensor, kv_cache: Tensor, max_seq_len: int) -> Tensor:
        self.inputs, self.hidden = inputs, super().backbone(inputs, block_table, kv_cache, max_seq_len)
        return self.hidden

    def propose(self, hidden: Tensor, anchors: Tensor, positions: Tensor, k: int, draw: Draw | None = None) -> Drafts:
        self.drafts = super().propose(hidden, anchors, positions, k, draw)
        return self.drafts


class PagedLoop:
    """Greedy decoding of some requests; a step verifies the drafts of the one before it and drafts anew."""

    def __init__(
        self,
        target: CausalLM,
        config: DSparkConfig,
        weights: Weights,
        form: str = "torch",
        k: int | None = None,
        method: str = "greedy",
        calibration: Calibration | None = None,
    ) -> None:
        self.target, self.config = target, config
        self.drafter = RecordingDrafter(config, weights, target, form)
        k = k or config.block_size
        sampler = DraftSampler(method, ROWS, k, target.config.vocab_size, target.device, form)
        self.decoder = DSparkDecoder(
            self.drafter, k, sampler, num_rows=ROWS, max_num_tokens=200, max_model_len=MAX_LEN, calibration=calibration
        )
        self.target_cache = allocate_kv_cache(target.config, 120, BLOCK_SIZE, target.dtype, target.device)
        self.decoder.allocate_kv_cache(120, BLOCK_SIZE)
        assert self.decoder._kv_cache is not None
        self.draft_cache = self.decoder._kv_cache
        self.last_logits = torch.empty(0)
        self.last_step: FinishedStep | None = None

    def step(self, requests: list[Request], chunk: int = 1000) -> Tensor:
        """One step of all requests; appends what was accepted and sets their next drafts, i64 [r, k]."""
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
        # Behind a request's blocks stand ids of somebody else's.
        table = torch.full((len(requests), MAX_LEN // BLOCK_SIZE), 119, dtype=torch.int32)
        for row, request in enumerate(requests):
            table[row, : len(request.blocks)] = torch.tensor(request.blocks)
        device = self.target.device
        metadata = AttentionMetadata(
            len(requests), len(ids), len(ids), starts.to(device), starts.numpy(), seq_lens.to(device),
            seq_lens.numpy(), table.to(device), torch.tensor(slots, device=device), BLOCK_SIZE, max(counts),
            int(seq_lens.max()), 0,
        )  # fmt: skip
        flat_ids = torch.tensor(ids, dtype=torch.int32, device=device)
        flat_positions = torch.tensor(positions, device=device)
        last, hidden = forward_with_hidden(
            self.target, flat_ids, flat_positions, metadata, self.target_cache, self.decoder.target_layer_ids
        )
        self.last_logits = self.target.compute_logits(last)
        sampled = self._accept(requests, counts, starts.tolist(), self.last_logits)
        rejected = self._settle(requests, counts, sampled)
        idx_mapping = torch.tensor([request.row for request in requests], dtype=torch.int32)
        step = FinishedStep(
            idx_mapping=idx_mapping.to(device), input_ids=flat_ids, positions=flat_positions,
            num_sampled=torch.tensor(sampled, dtype=torch.int32, device=device), num_rejected=rejected.to(device),
            metadata=metadata, rows=_tables(requests, device), hidden_states=hidden,
        )  # fmt: skip
        self.last_step = step
        drafts = self.decoder.propose(step)
        for request, own in zip(requests, drafts.tolist(), strict=True):
            request.drafts = [token for token in own if token >= 0]
        return drafts

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


def _tables(requests: list[Request], device: torch.device) -> RowTables:
    last = torch.zeros(ROWS, 1, dtype=torch.int64)
    num_blocks = torch.zeros(ROWS, dtype=torch.int32)
    temperature = torch.zeros(ROWS)
    for request in requests:
        last[request.row, 0], num_blocks[request.row] = request.tokens[-1], len(request.blocks)
        temperature[request.row] = request.temperature
    tables = (last, num_blocks, temperature, torch.arange(ROWS, dtype=torch.int64))
    return RowTables(*(table.to(device) for table in tables))


def loop_of(given: Golden, form: str = "torch", **kwargs: object) -> PagedLoop:
    return PagedLoop(given.target, given.config, given.weights, form, **kwargs)  # type: ignore[arg-type]


def confidence_logits(loop: PagedLoop) -> torch.Tensor:
    """[r, k] of the last block."""
    logits = loop.drafter.drafts.confidence_logits
    assert logits is not None
    return logits


def request_of(given: Golden, first_block: int = 1) -> Request:
    """Of the golden prompt; its blocks are not in order, and none of them is shared."""
    return Request(given.values["prompt"].tolist(), list(range(first_block + 17, first_block, -1)), row=2)
