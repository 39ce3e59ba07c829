"""What engine.bench.layers times on a GPU, in miniature: both ways through a layer compute the same."""

from __future__ import annotations

import pytest
import torch

from engine.attention import allocate_kv_cache
from engine.attention.triton_backend import TritonAttention
from engine.bench import layers
from engine.models.fused import fused_layers


@pytest.mark.parametrize(("queries", "kind"), [(1, "decode"), (3, "verify"), (3, "block")])
def test_both_ways_compute_the_same(queries: int, kind: str) -> None:
    cpu = torch.device("cpu")
    model = layers.make_model(layers.Shape("tiny-llama", 64, 4, 2, 16, 96, 2), cpu)
    config = model.config
    model.triton_attention = TritonAttention(
        config.num_attention_heads, config.num_key_value_heads, config.head_dim, cpu, "torch"
    )
    cache = allocate_kv_cache(config, layers._NUM_BLOCKS, layers.BLOCK_SIZE, model.dtype, cpu).normal_()
    hidden, positions = torch.randn(2 * queries, 64, dtype=model.dtype), torch.arange(20, 20 + queries).repeat(2)
    outs = []
    for few in (True, False):
        own = cache.clone()
        attend = layers.attend(model, own, 2, queries, 20, kind)
        with torch.inference_mode():
            outs.append(fused_layers(model, hidden.clone(), positions, attend, own, "torch", few=few))
        assert not torch.equal(own, cache), "this step's keys are stored"
    torch.testing.assert_close(outs[0], outs[1], atol=0.05, rtol=0.05)
