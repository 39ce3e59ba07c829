"""The kernels' backend against the torch backend, whose own test is a loop."""

from __future__ import annotations

import pytest
import torch

from engine.attention import TorchAttention, triton_backend
from engine.attention.triton_backend import TritonAttention
from tests.engine.attention.batches import make_batch
from tests.engine.attention.test_torch_backend import BATCHES, BLOCK_SIZE, CPU, DIM, TABLES

pytestmark = pytest.mark.slow

HEADS, KV_HEADS = 6, 2
FORMS = ("torch", "interpret", pytest.param("triton", marks=pytest.mark.gpu))


def run(requests: list[tuple[int, int]], form: str, pad: int) -> tuple[torch.Tensor, ...]:
    """Output and cache of the torch backend on the CPU, then of the kernels in `form`."""
    device = torch.device("cuda") if form == "triton" else CPU
    generator = torch.Generator().manual_seed(0)
    cache = torch.randn((1, 2, 24, BLOCK_SIZE, KV_HEADS, DIM), generator=generator)
    rows = sum(n for _, n in requests) + pad
    qkv = torch.randn((rows, (HEADS + 2 * KV_HEADS) * DIM), generator=generator)
    results = []
    for backend, place in (
        (TorchAttention(HEADS, KV_HEADS, DIM, torch.float32), CPU),
        (TritonAttention(HEADS, KV_HEADS, DIM, device, form), device),
    ):
        # The host's bounds are above the truth, as where drafts were rejected.
        _, metadata = make_batch(requests, TABLES[: len(requests)], BLOCK_SIZE, pad, 1, device=str(place))
        own = cache.to(place, copy=True)
        plan = backend.prepare(metadata, own)
        output = backend.forward(plan, qkv.to(place, copy=True), own[0])
        backend.finish(plan, own)
        results += [output.cpu(), own.cpu()]
    return tuple(results)


@pytest.mark.parametrize(("most_queries", "as_decodes"), [(0, 0), (0, 64), (16, 64)])
@pytest.mark.parametrize("pad", [0, 3])
@pytest.mark.parametrize(
    ("form", "batch"),
    [
        *[("torch", batch) for batch in BATCHES],
        *[("interpret", batch) for batch in ("decodes", "decodes and chunks")],
        *[pytest.param("triton", batch, marks=pytest.mark.gpu) for batch in BATCHES],
    ],
)
def test_equals_the_torch_backend(
    form: str, batch: str, pad: int, most_queries: int, as_decodes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Longer queries in their own launch, all tokens taken as decodes, or all requests as ones that verify drafts."""
    monkeypatch.setattr(triton_backend, "MAX_VERIFIED_TOKENS", most_queries)
    monkeypatch.setattr(triton_backend, "MAX_TOKENS_AS_DECODES", as_decodes)
    expected, expected_cache, got, cache = run(BATCHES[batch], form, pad)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(cache, expected_cache)


@pytest.mark.parametrize("form", FORMS)
def test_a_request_reads_what_another_one_stores_in_the_same_step(form: str) -> None:
    """Two decodes, the second of whose prefix block is filled by the first one in this step."""
    device = "cuda" if form == "triton" else "cpu"
    _, metadata = make_batch([(3, 1), (4, 1)], [[5], [5, 2]], BLOCK_SIZE, device=device)
    metadata.has_admitted = True
    generator = torch.Generator().manual_seed(0)
    cache = torch.randn((1, 2, 24, BLOCK_SIZE, KV_HEADS, DIM), generator=generator)
    qkv = torch.randn((2, (HEADS + 2 * KV_HEADS) * DIM), generator=generator)
    torch_backend = TorchAttention(HEADS, KV_HEADS, DIM, torch.float32)
    expected_cache = cache.clone()
    _, on_cpu = make_batch([(3, 1), (4, 1)], [[5], [5, 2]], BLOCK_SIZE)
    expected = torch_backend.forward(torch_backend.prepare(on_cpu, expected_cache), qkv, expected_cache[0])
    backend = TritonAttention(HEADS, KV_HEADS, DIM, torch.device(device), form)
    own = cache.to(device, copy=True)
    got = backend.forward(backend.prepare(metadata, own), qkv.to(device, copy=True), own[0])
    torch.testing.assert_close(got.cpu(), expected, atol=1e-5, rtol=1e-5)
