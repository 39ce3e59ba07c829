"""The torch backend against a loop over requests, tokens and heads, and what it must never do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from engine.attention import TorchAttention, allocate_kv_cache, kv_bytes_per_token
from engine.models import load_model
from tests.engine.attention.batches import make_batch

CPU = torch.device("cpu")
BLOCK_SIZE = 4
DIM = 8
TABLES = [[5, 2, 9, 17], [1, 7, 3, 18], [8, 4, 11, 19], [12, 6, 10, 20]]
BATCHES = {
    "decodes": [(3, 1), (12, 1), (7, 1), (0, 1)],
    "one decode": [(9, 1)],
    "one fresh prompt": [(0, 11)],
    "fresh prompts": [(0, 5), (0, 9), (0, 5)],
    "chunk after context": [(6, 7)],
    "decodes and chunks": [(5, 1), (2, 1), (4, 6), (0, 3)],
    "equal queries, others between": [(4, 3), (1, 5), (7, 3), (2, 1)],
    "drafts": [(3, 4), (8, 4), (0, 4)],
}


def reference(qkv: Tensor, cache: Tensor, requests: Sequence[tuple[int, int]], heads: int, kv_heads: int) -> Tensor:
    """Token by token, head by head, from a cache that already holds this step's K and V."""
    rows, out = iter(qkv.view(len(qkv), -1, DIM)), []
    for i, (context, n) in enumerate(requests):
        for position in range(context, context + n):
            row = next(rows)
            slots = [(TABLES[i][p // BLOCK_SIZE], p % BLOCK_SIZE) for p in range(position + 1)]
            keys, values = (torch.stack([cache[half, b, o] for b, o in slots]).double() for half in (0, 1))
            for head in range(heads):
                kv_head = head // (heads // kv_heads)
                weights = torch.softmax(keys[:, kv_head] @ row[head].double() / DIM**0.5, 0)
                out.append(weights @ values[:, kv_head])
    return torch.stack(out).view(-1, heads * DIM)


def run(
    requests: Sequence[tuple[int, int]],
    heads: int = 6,
    kv_heads: int = 2,
    dtype: torch.dtype = torch.float32,
    **kwargs: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One layer: (qkv, output, the cache before, the cache after)."""
    generator = torch.Generator().manual_seed(0)
    _, metadata = make_batch(requests, TABLES[: len(requests)], BLOCK_SIZE, **kwargs)
    cache = torch.randn((1, 2, 24, BLOCK_SIZE, kv_heads, DIM), generator=generator).to(dtype)
    rows = metadata.num_tokens_padded
    qkv = torch.randn((rows, (heads + 2 * kv_heads) * DIM), generator=generator).to(dtype)
    before = cache.clone()
    backend = TorchAttention(heads, kv_heads, DIM, dtype)
    plan = backend.prepare(metadata, cache)
    output = backend.forward(plan, qkv, cache[0])
    backend.finish(plan, cache)
    return qkv, output, before[0], cache[0]


@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (4, 4), (3, 1)])
@pytest.mark.parametrize("batch", BATCHES)
def test_equals_the_loop(batch: str, heads: int, kv_heads: int) -> None:
    requests = BATCHES[batch]
    qkv, output, _, cache = run(requests, heads, kv_heads)
    torch.testing.assert_close(output.double(), reference(qkv, cache, requests, heads, kv_heads), atol=1e-5, rtol=1e-5)


def test_half_precision_follows_within_its_rounding() -> None:
    requests = BATCHES["decodes and chunks"]
    qkv, output, _, cache = run(requests, dtype=torch.bfloat16)
    torch.testing.assert_close(output.double(), reference(qkv, cache, requests, 6, 2), atol=3e-2, rtol=3e-2)


@pytest.mark.parametrize("batch", BATCHES)
def test_stores_keys_and_values_in_their_slots_and_nowhere_else(batch: str) -> None:
    requests = BATCHES[batch]
    qkv, _, before, after = run(requests, pad=3)
    expected, row = before.clone(), 0
    for i, (context, n) in enumerate(requests):
        for position in range(context, context + n):
            block, offset = TABLES[i][position // BLOCK_SIZE], position % BLOCK_SIZE
            expected[:, block, offset] = qkv[row].view(-1, DIM)[6:].view(2, 2, DIM)
            row += 1
    assert torch.equal(after, expected)


def test_a_step_without_any_slot_writes_nothing() -> None:
    """A warm-up step of a runner: rows that count as tokens, but all of them with slot -1."""
    _, metadata = make_batch([(3, 1), (5, 1)], TABLES[:2], BLOCK_SIZE)
    metadata.slot_mapping.fill_(-1)
    cache = torch.randn((2, 2, 24, BLOCK_SIZE, 2, DIM))
    before = cache.clone()
    backend = TorchAttention(6, 2, DIM, torch.float32)
    plan = backend.prepare(metadata, cache)
    for layer in cache:
        backend.forward(plan, torch.randn(2, 10 * DIM), layer)
    backend.finish(plan, cache)
    assert torch.equal(cache, before)


@pytest.mark.parametrize("batch", BATCHES)
def test_the_device_lengths_decide_and_not_the_host_bounds(batch: str) -> None:
    requests = BATCHES[batch]
    _, exact, _, _ = run(requests)
    _, loose, _, _ = run(requests, bound_slack=2)
    torch.testing.assert_close(loose, exact, atol=1e-6, rtol=1e-6)


def test_requests_never_see_each_other() -> None:
    """Huge values in every block of the others and beyond the own length change no bit."""
    requests = BATCHES["decodes and chunks"]
    _, metadata = make_batch(requests, TABLES, BLOCK_SIZE)
    qkv = torch.randn((metadata.num_tokens, 10 * DIM))
    backend = TorchAttention(6, 2, DIM, torch.float32)
    base = torch.randn((2, 24, BLOCK_SIZE, 2, DIM))
    outputs = []
    for poison in (0.0, 1e30):
        cache = torch.full_like(base, poison)
        for i, (context, _) in enumerate(requests):
            for position in range(context):
                slot = TABLES[i][position // BLOCK_SIZE], position % BLOCK_SIZE
                cache[:, slot[0], slot[1]] = base[:, slot[0], slot[1]]
        plan = backend.prepare(metadata, cache[None])
        outputs.append(backend.forward(plan, qkv, cache))
    assert torch.equal(*outputs)


def test_padding_of_a_graph_changes_no_slot_and_no_logit() -> None:
    """Three decodes in a batch padded to four rows (pad slot -1), in a cache full of a sentinel."""
    model = load_model("tiny-llama", dtype=torch.float32, device=CPU, load_format="dummy").model
    ids = torch.tensor([5, 6, 7, 0], dtype=torch.int32)
    logits, caches = [], []
    for pad in (0, 1):
        positions, metadata = make_batch([(2, 1), (6, 1), (3, 1)], TABLES[:3], BLOCK_SIZE, pad=pad)
        cache = allocate_kv_cache(model.config, 24, BLOCK_SIZE, torch.float32, CPU).fill_(0.125)
        hidden = model.forward(ids[: 3 + pad], positions, metadata, cache)
        assert torch.isfinite(hidden).all()
        logits.append(model.compute_logits(hidden[:3]))
        caches.append(cache)
    changed = (caches[1] != 0.125).flatten(4).any(-1)
    slots = [(block, offset) for block, offset in changed[0, 0].nonzero().tolist()]
    assert sorted(slots) == sorted([(5, 2), (7, 2), (8, 3)])
    assert (changed == changed[0, 0]).all()
    assert (caches[1][:, :, -1, -1] == 0.125).all() and (caches[1][:, :, 0] == 0.125).all()
    # 3 and 4 rows may go through different matrix kernels, which ones depends on the processor: the last bits differ.
    torch.testing.assert_close(logits[1], logits[0], atol=1e-4, rtol=1e-4)


class _NoHostRead(TorchDispatchMode):
    """Refuses every operation whose result's value or size the host must wait for."""

    FORBIDDEN = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "equal", "is_nonzero")

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += 1
        name = func.name().removeprefix("aten::").split(".")[0]
        assert name not in self.FORBIDDEN, f"{func.name()} reads a device tensor on the host"
        if name in ("index", "index_put_", "index_put"):
            masks = [i for i in args[1] if i is not None and i.dtype == torch.bool]
            assert not masks, "a bool mask decides a size"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("batch", BATCHES)
def test_forward_reads_no_device_tensor(batch: str) -> None:
    model = load_model("tiny-qwen3", dtype=torch.float32, device=CPU, load_format="dummy").model
    requests = BATCHES[batch]
    positions, metadata = make_batch(requests, TABLES[: len(requests)], BLOCK_SIZE, pad=1)
    cache = allocate_kv_cache(model.config, 24, BLOCK_SIZE, torch.float32, CPU)
    ids = torch.zeros(metadata.num_tokens_padded, dtype=torch.int32)
    with _NoHostRead() as guard:
        model.compute_logits(model.forward(ids, positions, metadata, cache))
    assert guard.seen > 40


def test_the_guard_itself_sees_a_host_read() -> None:
    for read in (lambda x: x.item(), lambda x: x.nonzero(), lambda x: x[x > 0], lambda x: bool(x)):
        with pytest.raises(AssertionError), _NoHostRead():
            read(torch.ones(1))


def test_cache_has_vllms_shape_and_its_bytes() -> None:
    config = load_model("tiny-qwen3", dtype=torch.float32, device=CPU, load_format="dummy").config
    cache = allocate_kv_cache(config, 5, 16, torch.bfloat16, CPU)
    assert cache.shape == (2, 2, 5, 16, 2, 32)
    assert cache.nbytes == kv_bytes_per_token(config, torch.bfloat16) * 5 * 16
    assert not cache.any()


@pytest.mark.gpu
@pytest.mark.parametrize("batch", BATCHES)
def test_on_cuda_equals_the_cpu_without_a_host_wait(batch: str) -> None:
    requests = BATCHES[batch]
    qkv, expected, before, after = run(requests, pad=1)
    device = torch.device("cuda")
    _, metadata = make_batch(requests, TABLES[: len(requests)], BLOCK_SIZE, pad=1, device="cuda")
    cache, rows = before[None].to(device), qkv.to(device)
    backend = TorchAttention(6, 2, DIM, torch.float32)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        plan = backend.prepare(metadata, cache)
        output = backend.forward(plan, rows, cache[0])
        backend.finish(plan, cache)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    n = metadata.num_tokens
    torch.testing.assert_close(output.cpu()[:n], expected[:n], atol=1e-4, rtol=1e-4)
    assert torch.equal(cache[0].cpu(), after)
