"""Speculative decoding by a target and a drafter alone: what a runner does, step by step, in plain lists."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import torch

from engine.attention import AttentionMetadata, allocate_kv_cache
from engine.attention.triton_backend import TritonAttention
from engine.models import LoadedModel, load_model
from engine.spec_decode import FinishedStep, RowTables, SpecDecoder
from kernels import DraftedBatch, rejection_sample

BLOCK_SIZE, MAX_LEN, NUM_BLOCKS = 4, 64, 100


@cache
def model(name: str = "tiny-llama", seed: int = 0) -> LoadedModel:
    return load_model(name, dtype=torch.float32, device=torch.device("cpu"), load_format="dummy", seed=seed)


def greedy_tokens(loaded: LoadedModel, tokens: Sequence[int], count: int) -> list[int]:
    """What the model says behind `tokens`, computed from nothing for each token."""
    result = list(tokens)
    for _ in range(count):
        n = len(result)
        kv_cache = allocate_kv_cache(loaded.config, n // BLOCK_SIZE + 2, BLOCK_SIZE, torch.float32, torch.device("cpu"))
        blocks = torch.arange(1, n // BLOCK_SIZE + 2, dtype=torch.int32).unsqueeze(0)
        starts, positions = torch.tensor([0, n], dtype=torch.int32), torch.arange(n)
        lens = torch.tensor([n], dtype=torch.int32)
        slots = blocks[0, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
        metadata = AttentionMetadata(
            1, n, n, starts, starts.numpy(), lens, lens.numpy(), blocks, slots.long(), BLOCK_SIZE, n, n, 0
        )
        hidden = loaded.model(torch.tensor(result, dtype=torch.int32), positions, metadata, kv_cache)
        result.append(int(loaded.model.compute_logits(hidden[-1:]).argmax()))
    return result[len(tokens) :]


@contextmanager
def as_on_a_gpu(*models: LoadedModel, form: str = "torch") -> Iterator[None]:
    """The models run in few launches and over the paged backend of a GPU, by another form of its kernels."""
    try:
        for loaded in models:
            c = loaded.config
            heads = (c.num_attention_heads, c.num_key_value_heads, c.head_dim)
            loaded.model.triton_attention = TritonAttention(*heads, torch.device("cpu"), form)
        yield
    finally:
        for loaded in models:
            loaded.model.triton_attention = None


@dataclass
class Request:
    tokens: list[int]
    row: int
    temperature: float = 0.0
    seed: int = 0
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    drafts: list[int] = field(default_factory=list)
    num_accepted: list[int] = field(default_factory=list)


class Rounds:
    """Requests over one pool of blocks. `drafted` has what was proposed in the last step, `before` the tokens that
    each request had then."""

    def __init__(self, target: LoadedModel, decoder: SpecDecoder, method: str = "standard") -> None:
        self.target, self.decoder, self.method = target, decoder, method
        cpu = torch.device("cpu")
        self.kv_cache = allocate_kv_cache(target.config, NUM_BLOCKS, BLOCK_SIZE, torch.float32, cpu)
        decoder.allocate_kv_cache(NUM_BLOCKS, BLOCK_SIZE)
        self.free = list(range(NUM_BLOCKS - 1, 0, -1))

    def add(self, prompt: Sequence[int], row: int, **fields: float) -> Request:
        return Request(list(prompt), row, **fields)  # type: ignore[arg-type]

    def step(self, requests: Sequence[Request], chunk: int = 1000) -> torch.Tensor:
        """Computes each request's next tokens and drafts, judges the drafts, drafts anew."""
        n, r = self.decoder.num_drafts, len(requests)
        flat: list[tuple[int, int]] = []
        counts, cu = [], [0]
        for request in requests:
            pending = request.tokens[request.computed :][:chunk]
            request.drafts = request.drafts if request.computed + len(pending) == len(request.tokens) else []
            counts.append(len(pending) + len(request.drafts))
            cu.append(cu[-1] + len(request.drafts) + 1)
            for place, token in enumerate([*pending, *request.drafts], request.computed):
                flat.append((token, place))
            while len(request.blocks) * BLOCK_SIZE < min(request.computed + counts[-1] + n, MAX_LEN):
                request.blocks.append(self.free.pop())
        table = torch.full((r, MAX_LEN // BLOCK_SIZE), NUM_BLOCKS - 1, dtype=torch.int32)
        for i, request in enumerate(requests):
            table[i, : len(request.blocks)] = torch.tensor(request.blocks)
        starts = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        lens = torch.tensor([q.computed + c for q, c in zip(requests, counts, strict=True)], dtype=torch.int32)
        ids = torch.tensor([token for token, _ in flat], dtype=torch.int32)
        positions = torch.tensor([place for _, place in flat])
        owner = torch.repeat_interleave(torch.arange(r), torch.tensor(counts))
        slots = table[owner, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
        bounds = np.minimum(lens.numpy() + n, MAX_LEN)  # the host knows no better
        metadata = AttentionMetadata(
            r, len(flat), len(flat), starts, starts.numpy(), lens, bounds, table, slots.long(), BLOCK_SIZE, max(counts),
            int(bounds.max()), 0,
        )  # fmt: skip
        hidden = self.target.model(ids, positions, metadata, self.kv_cache)
        indices = torch.cat(
            [
                torch.arange(end - k - 1, end)
                for end, k in zip(starts[1:].tolist(), map(_num_drafts, requests), strict=True)
            ]
        )
        logits = self.target.model.compute_logits(hidden[indices])
        num_sampled, num_rejected = self._accept(requests, counts, logits, ids, positions, indices, cu)
        step = FinishedStep(
            idx_mapping=torch.tensor([request.row for request in requests], dtype=torch.int32),
            input_ids=ids,
            positions=positions,
            num_sampled=num_sampled,
            num_rejected=num_rejected,
            metadata=metadata,
            rows=self._tables(requests),
            hidden_states=hidden,
        )
        drafts = self.decoder.propose(step)
        for request, own in zip(requests, drafts.tolist(), strict=True):
            request.drafts = [token for token in own if token >= 0]
        return drafts

    def _accept(
        self, requests: Sequence[Request], counts: list[int], logits: torch.Tensor, ids: torch.Tensor,
        positions: torch.Tensor, indices: torch.Tensor, cu: list[int],
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        tables = self._tables(requests)
        batch = DraftedBatch(
            torch.tensor([request.row for request in requests], dtype=torch.int32),
            torch.tensor(cu, dtype=torch.int32),
            ids[indices],
            positions[indices] + 1,
            self.decoder.num_drafts,
        )
        rows = batch.idx_mapping.long().repeat_interleave(batch.cu_num_logits.diff())
        temperature = tables.temperature[rows]
        logits = logits / torch.where(temperature == 0, 1.0, temperature).unsqueeze(1)
        output = rejection_sample(
            logits, self.decoder.draft_logits, batch, tables.temperature, tables.seeds, method=self.method, form="torch"
        )
        num_sampled, num_rejected = output.num_sampled.clone(), torch.zeros_like(output.num_sampled)
        for i, request in enumerate(requests):
            known = len(request.tokens) - request.computed
            if counts[i] < known:
                num_sampled[i] = 0
                request.computed += counts[i]
                continue
            accepted = int(num_sampled[i])
            num_rejected[i] = len(request.drafts) + 1 - accepted
            request.num_accepted.append(accepted - 1)
            request.computed += counts[i] - int(num_rejected[i])
            request.tokens += output.sampled[i, :accepted].tolist()
        return num_sampled, num_rejected

    def _tables(self, requests: Sequence[Request]) -> RowTables:
        rows = max(request.row for request in requests) + 2
        last, total = torch.zeros(rows, 1, dtype=torch.int64), torch.zeros(rows, dtype=torch.int32)
        blocks, temperature = torch.zeros(rows, dtype=torch.int32), torch.zeros(rows)
        seeds, ids = torch.zeros(rows, dtype=torch.int64), torch.zeros(rows, MAX_LEN, dtype=torch.int32)
        following = torch.zeros(rows, dtype=torch.int32)
        for q in requests:
            tokens = q.tokens[:MAX_LEN]
            last[q.row], total[q.row], blocks[q.row] = q.tokens[-1], len(q.tokens), len(q.blocks)
            temperature[q.row], seeds[q.row] = q.temperature, q.seed
            ids[q.row, : len(tokens)] = torch.tensor(tokens)
            following[q.row] = q.tokens[q.computed] if q.computed < len(q.tokens) else 0
        return RowTables(last, blocks, temperature, seeds, ids, total, following)


def _num_drafts(request: Request) -> int:
    return len(request.drafts)
