"""On a GPU: the compiled attention and layer kernels against float32, in every type, and again and again."""

from __future__ import annotations

import pytest
import torch

import kernels
from kernels.head_rotation import HeadRotation
from tests.kernels.attention_batches import AttentionBatch, attention_batch, cut_short, padded_blocks
from tests.kernels.attention_calls import block, decode, prefill, verify

pytestmark = pytest.mark.gpu
SHAPES = {
    "qwen3-0.6b": {"num_heads": 16, "num_kv_heads": 8, "head_dim": 128, "block_size": 16},
    "smollm2-135m": {"num_heads": 9, "num_kv_heads": 3, "head_dim": 64, "block_size": 16, "norms": False},
}
LIMITS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 8e-3}


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative, over the whole tensor; NaN where NaN is not expected."""
    assert torch.equal(torch.isnan(got), torch.isnan(expected))
    got, expected = got.float().nan_to_num(), expected.float().nan_to_num()
    return float((got - expected).norm() / expected.norm())


def in_float32(batch: AttentionBatch) -> AttentionBatch:
    wide, r = batch.clone(), batch.rotation
    wide.qkv, wide.kv_cache = wide.qkv.float(), wide.kv_cache.float()
    norms = [None if norm is None else norm.float() for norm in (r.q_norm, r.k_norm)]
    wide.rotation = HeadRotation(r.positions, r.cos_sin.float(), *norms, r.eps)
    return wide


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("num_reqs", [1, 3, 40])
@pytest.mark.parametrize("shape", SHAPES)
def test_decode(shape: str, num_reqs: int, dtype: torch.dtype) -> None:
    lengths = torch.randint(0, 700, (num_reqs,), generator=torch.Generator().manual_seed(num_reqs)).tolist()
    batch = attention_batch([(n, 1) for n in lengths], pad=2, dtype=dtype, device="cuda", **SHAPES[shape])
    expected, expected_cache = decode(in_float32(batch), "torch")
    got, cache = decode(batch, "triton")
    assert error(got, expected) < LIMITS[dtype] and error(cache, expected_cache) < LIMITS[dtype]
    assert not got[-2:].any()
    for i in range(20):
        again, _ = decode(batch, "triton", start_early=i % 2 == 0)
        assert torch.equal(again, got), "the same bits every time"


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("num_reqs", [1, 3, 40])
@pytest.mark.parametrize("shape", SHAPES)
def test_blocks_of_queries(shape: str, num_reqs: int, dtype: torch.dtype) -> None:
    lengths = torch.randint(0, 700, (num_reqs,), generator=torch.Generator().manual_seed(num_reqs)).tolist()
    batch = padded_blocks([(n, 7) for n in lengths], dtype=dtype, device="cuda", **SHAPES[shape])
    cut_short(batch, 0, stored=num_reqs % 7)
    (got, cache), (expected, expected_cache) = block(batch, "triton"), block(in_float32(batch), "torch")
    assert error(got, expected) < LIMITS[dtype] and error(cache, expected_cache) < LIMITS[dtype]
    assert not got[-7:].any()
    for i in range(20):
        assert torch.equal(block(batch, "triton", start_early=i % 2 == 0)[0], got), "the same bits every time"


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("shape", SHAPES)
def test_prefill_chunks_and_decodes(shape: str, dtype: torch.dtype) -> None:
    requests = [(0, 1), (300, 1), (0, 200), (500, 77), (3, 17), (130, 5), (0, 33)]
    batch = attention_batch(requests, pad=3, dtype=dtype, device="cuda", **SHAPES[shape])
    (got, cache), (expected, expected_cache) = prefill(batch, "triton"), prefill(in_float32(batch), "torch")
    assert error(got, expected) < LIMITS[dtype] and error(cache, expected_cache) < LIMITS[dtype]
    assert (got[-3:] == -7).all()


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("num_rows", [1, 2, 8, 9, 16, 33, 64])
@pytest.mark.parametrize(("depth", "columns"), [(1024, 4096), (3072, 1024), (576, 960), (1536, 576)])
def test_small_linear(depth: int, columns: int, num_rows: int, dtype: torch.dtype) -> None:
    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", dtype=dtype)

    x, weight = random(num_rows, depth), random(2 * columns, depth) / depth**0.5
    if num_rows > 1 and dtype == torch.float32:
        with pytest.raises(ValueError, match="take one row of float32 on a GPU, got"):
            kernels.small_linear(x, weight, form="triton")
        return
    norm, residual, bias = random(depth).abs(), random(num_rows, columns), random(columns)
    for options in (
        {"norm_weight": norm, "eps": 1e-6, "bias": bias},
        {"residual": residual},
        {"norm_weight": norm, "eps": 1e-6, "gated": True},
        {"out_dtype": torch.float32},
    ):
        own = weight if "gated" in options else weight[:columns]
        wide = {k: v.double() if isinstance(v, torch.Tensor) else v for k, v in options.items()}
        expected = kernels.small_linear(x.double(), own.double(), form="torch", **wide)
        mine = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in options.items()}
        assert error(kernels.small_linear(x, own, form="triton", **mine), expected) < LIMITS[dtype]


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize(("num_reqs", "max_query_len"), [(1, 8), (3, 2), (3, 16), (40, 8), (120, 3)])
@pytest.mark.parametrize("shape", SHAPES)
def test_verify(shape: str, num_reqs: int, max_query_len: int, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(num_reqs)
    lengths = torch.randint(0, 700, (num_reqs,), generator=g).tolist()
    queries = torch.randint(1, max_query_len + 1, (num_reqs,), generator=g).tolist()
    requests = list(zip(lengths, queries, strict=True))
    batch = attention_batch(requests, pad=5, dtype=dtype, device="cuda", **SHAPES[shape])
    expected, expected_cache = verify(in_float32(batch), "torch", max_query_len)
    got, cache = verify(batch, "triton", max_query_len)
    assert error(got, expected) < LIMITS[dtype] and error(cache, expected_cache) < LIMITS[dtype]
    assert not got[-5:].any()
    for i in range(20):
        again, _ = verify(batch, "triton", max_query_len, start_early=i % 2 == 0)
        assert torch.equal(again, got), "the same bits every time"
