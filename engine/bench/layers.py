"""Whole decoder layers in place, by small_linear and by torch's products: from which row on is which the faster one.

`python -m engine.bench.layers` needs a CUDA device and nothing else: weights, cache and inputs are random. A line is
the median time of a replay of a captured stack, a layer. What one kernel takes alone says little here: with early
starts it overlaps with its neighbours, so tiles are compared by this.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from kernels import max_rows

from ..attention import allocate_kv_cache
from ..dspark.attention import BlockAttention, BlockAttentionPlan
from ..models.config import ModelConfig
from ..models.decoder import CausalLM
from ..models.fused import Attend, fused_layers
from ..models.weights import weight_views
from .kernels import BLOCK_SIZE, decode_metadata, graph_microseconds
from .machine import commit, device_name

_CONFIGS = Path(__file__).parents[1] / "models" / "configs"
_NUM_BLOCKS = 4096


class Shape(NamedTuple):
    """`base`: a config of engine/models/configs, whose family it is."""

    base: str
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    num_hidden_layers: int


SHAPES = {
    "smollm2-135m": Shape("tiny-llama", 576, 9, 3, 64, 1536, 30),
    "qwen3-0.6b": Shape("qwen3-0.6b", 1024, 16, 8, 128, 3072, 28),
    "hidden size 2048": Shape("qwen3-0.6b", 2048, 16, 8, 128, 6144, 8),
    "hidden size 4096": Shape("tiny-llama", 4096, 32, 8, 128, 14336, 4),
}
"""The larger ones have as few layers as do not fit in the L2 cache."""
BATCHES = (
    *((requests, 1, "decode") for requests in (1, 2, 8, 16, 24, 32, 64, 96, 128)),
    *((requests, 8, "verify") for requests in (1, 2, 4, 8, 16)),
    *((requests, 7, "block") for requests in (1, 8)),
)
"""(requests, queries of each, what attends)."""


def make_model(shape: Shape, device: torch.device) -> CausalLM:
    """Random weights; a small vocabulary, as heads are not measured here."""
    config = json.loads((_CONFIGS / f"{shape.base}.json").read_text(encoding="utf-8"))
    config |= shape._asdict() | {"vocab_size": 1024, "max_position_embeddings": 8192}
    model = CausalLM(ModelConfig.from_hf(config), torch.bfloat16, device)
    for weight in weight_views(model).values():
        weight.normal_(0.0, weight.shape[-1] ** -0.5) if weight.dim() > 1 else weight.fill_(1.0)
    return model


def attend(model: CausalLM, cache: torch.Tensor, requests: int, queries: int, context: int, kind: str) -> Attend:
    """The forward of a batch whose requests have `queries` tokens each behind `context` others."""
    metadata = decode_metadata(cache.device, _NUM_BLOCKS, requests, context + queries, queries)
    if kind == "block":
        plan = BlockAttentionPlan(
            metadata.slot_mapping, metadata.block_table, metadata.seq_lens, max_seq_len=metadata.max_seq_len
        )
        return partial(BlockAttention(cache.device).forward, plan)
    attention = model.triton_attention
    assert attention is not None, "no Triton, or no CUDA device"
    return partial(attention.forward, attention.prepare(metadata, cache))


def microseconds(
    model: CausalLM, cache: torch.Tensor, requests: int, queries: int, context: int, kind: str, few: bool
) -> float:
    """Of one layer; `few`: by small_linear."""
    own = attend(model, cache, requests, queries, context, kind)
    hidden = torch.randn(requests * queries, model.config.hidden_size, dtype=model.dtype, device=model.device)
    positions = torch.arange(context, context + queries, device=model.device).repeat(requests)

    def run() -> None:
        fused_layers(model, hidden.clone(), positions, own, cache, "auto", few=few)

    return graph_microseconds(run) / model.config.num_hidden_layers


def main() -> None:
    """Measure and print everything."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--shape", choices=SHAPES, action="append", help="one or several; all are the default")
    parser.add_argument("--context", type=int, default=300, help="tokens in the cache of each request")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("engine.bench.layers measures CUDA kernels, and this torch sees no CUDA device")
    device = torch.device("cuda")
    print(
        f"{device_name(device)}, torch {torch.__version__}, commit {commit()}; us a layer, contexts of {args.context}"
    )
    with torch.inference_mode():
        for name in args.shape or SHAPES:
            model = make_model(SHAPES[name], device)
            cache = allocate_kv_cache(model.config, _NUM_BLOCKS, BLOCK_SIZE, torch.bfloat16, device).normal_()
            torch.cuda.synchronize()
            for requests, queries, kind in BATCHES:
                rows = requests * queries
                if requests * -(-(args.context + queries) // BLOCK_SIZE) >= _NUM_BLOCKS:
                    continue
                ours, torchs = (
                    microseconds(model, cache, requests, queries, args.context, kind, few) for few in (True, False)
                )
                chosen = "small_linear" if rows <= max_rows(cache, model.config.hidden_size) else "torch"
                print(
                    f"{name:16} {kind:6} {requests:4} x {queries}: small_linear {ours:7.2f}, torch {torchs:7.2f}; "
                    f"a step takes {chosen}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
