"""The GPU kernels at the benchmark's shapes: time, bytes, and the share of the read bandwidth of the same run.

`python -m engine.bench.kernels` needs a CUDA device and nothing else: the weights are random. Every line is the median
of replays of a CUDA graph that runs the kernel once for each layer, on that layer's own weights or cache, so nothing
that is read comes from the L2 cache and the gaps between launches are those of a captured step.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import kernels

from ..attention import AttentionMetadata, allocate_kv_cache
from ..models.config import ModelConfig
from ..models.decoder import CausalLM
from ..models.layers import Linear
from ..models.weights import weight_views
from .ceilings import measure_ceilings
from .machine import commit, device_name

BLOCK_SIZE = 16
CONFIG = Path(__file__).parents[1] / "models" / "configs" / "qwen3-0.6b.json"
BATCHES = {"B1": (1, 384), "B8": (8, 384), "A": (256, 256)}
"""Name -> (requests, tokens of context of each)."""
VERIFIED = (2, 8)
"""Tokens of a request with drafts."""
PREFILLS = ((64, 128), (8, 1024), (1, 8192))
"""(prompts, tokens of each)."""


@dataclass(frozen=True)
class Line:
    """One measurement. `microseconds` is of one launch (of one step for a step), `bytes` what it must move."""

    batch: str
    name: str
    microseconds: float
    bytes: int
    share: float


class Bench:
    """A random model, a full cache, and the timing of what runs on them."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.config = ModelConfig.from_hf(json.loads(CONFIG.read_text(encoding="utf-8")))
        self.model = CausalLM(self.config, torch.bfloat16, device)
        generator = torch.Generator(device).manual_seed(0)
        for weight in weight_views(self.model).values():
            if weight.dim() == 1:
                weight.fill_(1.0)
            else:
                weight.normal_(0.0, weight.shape[1] ** -0.5, generator=generator)
        tokens = max(requests * (context // BLOCK_SIZE + 1) for requests, context in BATCHES.values())
        self.cache = allocate_kv_cache(self.config, tokens + 1, BLOCK_SIZE, torch.bfloat16, device)
        self.cache.normal_(generator=generator)
        assert self.model.triton_attention is not None, "no Triton, or no CUDA device"
        self.attention = self.model.triton_attention
        self.read = measure_ceilings(device).limit
        self.lines: list[Line] = []

    def metadata(self, requests: int, context: int, queries: int = 1) -> AttentionMetadata:
        return decode_metadata(self.device, self.cache.shape[2], requests, context, queries)

    def time(self, batch: str, name: str, fn: Callable[[], object], moved: int, launches: int) -> float:
        """Capture `fn`, which makes `launches` launches that move `moved` bytes each, and record its time."""
        micros = graph_microseconds(fn) / launches
        self.lines.append(Line(batch, name, micros, moved, moved / (micros * 1e-6) / self.read))
        line = self.lines[-1]
        print(f"{batch:3} {name:34} {micros:9.2f} us {moved / 1e6:9.2f} MB {line.share:6.1%}", flush=True)
        return micros

    @property
    def qkv_size(self) -> int:
        """Elements of a row of q, k and v."""
        return (self.config.num_attention_heads + 2 * self.config.num_key_value_heads) * self.config.head_dim

    def rotation(self, positions: Tensor) -> kernels.HeadRotation:
        """Norm and RoPE of the first layer, at these positions."""
        norm = self.model.layers[0].self_attn.q_norm
        assert norm is not None, "the benchmark's model normalises its heads"
        return kernels.HeadRotation(positions, self.model.rotary_emb.cos_sin, norm.weight, norm.weight, norm.eps)

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device=self.device)


def decode_metadata(
    device: torch.device, num_blocks: int, requests: int, context: int, queries: int
) -> AttentionMetadata:
    """A batch of which each request has its last `queries` of `context` tokens to compute; its blocks are scattered
    over a cache of `num_blocks`."""
    blocks, tokens = -(-context // BLOCK_SIZE), requests * queries
    ids = np.random.default_rng(0).permutation(num_blocks - 1)[: requests * blocks] + 1
    table = ids.reshape(requests, blocks).astype(np.int32)
    new = np.arange(context - queries, context)
    slots = table[:, new // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + new % BLOCK_SIZE
    seq_lens = np.full(requests, context, dtype=np.int32)
    starts = np.arange(requests + 1, dtype=np.int32) * np.int32(queries)

    def to_device(values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(device)

    return AttentionMetadata(
        num_reqs=requests,
        num_tokens=tokens,
        num_tokens_padded=tokens,
        query_start_loc=to_device(starts),
        query_start_loc_np=starts,
        seq_lens=to_device(seq_lens),
        seq_lens_np=seq_lens,
        block_table=to_device(table),
        slot_mapping=to_device(slots.ravel()),
        block_size=BLOCK_SIZE,
        max_query_len=queries,
        max_seq_len=context,
        num_decodes=requests if queries == 1 else 0,
    )


def graph_microseconds(fn: Callable[[], object], repeats: int = 20) -> float:
    """Median time of one replay of `fn` captured in a CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        fn()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fn()
    times = []
    for i in range(repeats + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        if i >= 3:
            times.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(times)


def attention_run(bench: Bench, requests: int, context: int, queries: int) -> Callable[[], None]:
    """Norm, RoPE, KV store and attention of every layer."""
    qkv = bench.random(requests * queries, bench.qkv_size)
    positions = torch.arange(context - queries, context, device=bench.device).repeat(requests)
    rotation = bench.rotation(positions)
    plan = bench.attention.prepare(bench.metadata(requests, context, queries), bench.cache)
    start_early = qkv.shape[0] <= kernels.max_rows(qkv, bench.config.hidden_size)

    def run() -> None:
        for cache in bench.cache.unbind(0):
            bench.attention.forward(plan, qkv, cache, rotation, start_early)

    return run


def bench_attention(bench: Bench, batch: str) -> None:
    """Attention of decodes, and of decodes with drafts."""
    requests, context = BATCHES[batch]
    config = bench.config
    kv = 2 * requests * context * config.num_key_value_heads * config.head_dim * 2
    for queries in (1, *VERIFIED):
        name = "decode attention" if queries == 1 else f"verify attention, {queries} tokens"
        bench.time(batch, name, attention_run(bench, requests, context, queries), kv, config.num_hidden_layers)


def bench_projections(bench: Bench, batch: str) -> None:
    """Each projection as torch does it, and with what surrounds it in one launch."""
    requests, _ = BATCHES[batch]
    config, layers, norm = bench.config, bench.model.layers, bench.model.norm
    x, residual = bench.random(requests, config.hidden_size), bench.random(requests, config.hidden_size)
    heads = bench.random(requests, config.num_attention_heads * config.head_dim)
    inner = bench.random(requests, config.intermediate_size)
    qkv, o = [layer.self_attn.qkv_proj for layer in layers], [layer.self_attn.o_proj for layer in layers]
    gate_up, down = [layer.mlp.gate_up_proj for layer in layers], [layer.mlp.down_proj for layer in layers]
    normed = {"norm_weight": norm.weight, "eps": norm.eps}
    bench_projection(bench, batch, "norm, qkv", qkv, x, normed)
    bench_projection(bench, batch, "o, residual", o, heads, {"residual": residual})
    bench_projection(bench, batch, "norm, gate_up, gate", gate_up, x, normed | {"gated": True})
    bench_projection(bench, batch, "down, residual", down, inner, {"residual": residual})
    bench_projection(bench, batch, "head", [bench.model.lm_head], x, {"out_dtype": torch.float32})


def bench_projection(
    bench: Bench, batch: str, name: str, linears: list[Linear], x: Tensor, options: dict[str, Any]
) -> None:
    """One projection of every layer; torch's line is the product alone."""
    weights = [linear.weight for linear in linears if linear.weight is not None]

    def run_torch() -> None:
        for weight in weights:
            torch.mm(x, weight.t())

    def run_small() -> None:
        for weight in weights:
            kernels.small_linear(x, weight, **options)

    bench.time(batch, f"torch.mm: {name}", run_torch, weights[0].nbytes, len(weights))
    if x.shape[0] <= kernels.max_rows(x, bench.config.hidden_size):
        bench.time(batch, f"small_linear: {name}", run_small, weights[0].nbytes, len(weights))


def bench_elementwise(bench: Bench, batch: str) -> None:
    """What stands between torch's projections in batches beyond small_linear."""
    requests, _ = BATCHES[batch]
    config, layers, norm = bench.config, bench.model.layers, bench.model.norm
    x, residual = bench.random(requests, config.hidden_size), bench.random(requests, config.hidden_size)
    gate_up = bench.random(requests, 2 * config.intermediate_size)

    def run_silu() -> None:
        for _ in layers:
            kernels.silu_mul(gate_up)

    def run_norm() -> None:
        for _ in layers:
            kernels.add_rms_norm(x, residual, norm.weight, norm.eps)

    bench.time(batch, "silu_mul", run_silu, gate_up.nbytes * 3 // 2, len(layers))
    bench.time(batch, "add_rms_norm", run_norm, 4 * x.nbytes, len(layers))


def bench_prefill(bench: Bench, requests: int, tokens: int) -> None:
    """Norm, RoPE and store, and attention of prompts of equal length; prints TFLOP/s, as reading is no limit."""
    config, run = bench.config, attention_run(bench, requests, tokens, tokens)
    micros = graph_microseconds(run) / config.num_hidden_layers
    flops = 2 * requests * tokens * tokens * config.num_attention_heads * config.head_dim
    print(f"prefill of {requests} x {tokens}: {micros:.1f} us a layer, {flops / micros / 1e6:.0f} TFLOP/s", flush=True)


def bench_step(bench: Bench, batch: str) -> None:
    """A whole decode step: embedding, layers, logits, argmax."""
    requests, context = BATCHES[batch]
    config, metadata = bench.config, bench.metadata(requests, context)
    ids = torch.randint(config.vocab_size, (requests,), dtype=torch.int32, device=bench.device)
    positions = torch.full((requests,), context - 1, device=bench.device)
    rows, zeros = torch.arange(requests, device=bench.device), torch.zeros(requests, device=bench.device)
    idx_mapping = rows.int()

    def run() -> None:
        logits = bench.model.compute_logits(bench.model(ids, positions, metadata, bench.cache))
        kernels.gumbel_sample(logits, idx_mapping, zeros, rows, rows, purpose=kernels.Purpose.SAMPLE, all_greedy=True)

    weights = sum(weight.nbytes for weight in weight_views(bench.model).values())
    kv = 2 * requests * context * config.num_key_value_heads * config.head_dim * 2 * config.num_hidden_layers
    bench.time(batch, "whole step", run, weights + kv, 1)


def main() -> None:
    """Measure and print everything; `--json PATH` writes it too."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("engine.bench.kernels measures CUDA kernels, and this torch sees no CUDA device")
    device = torch.device("cuda")
    bench = Bench(device)
    print(
        f"{device_name(device)}, torch {torch.__version__}, commit {commit()}, {bench.read / 1e12:.2f} TB/s", flush=True
    )
    with torch.inference_mode():
        for batch in BATCHES:
            bench_attention(bench, batch)
            bench_projections(bench, batch)
            bench_elementwise(bench, batch)
            bench_step(bench, batch)
        for requests, tokens in PREFILLS:
            bench_prefill(bench, requests, tokens)
    if args.json:
        args.json.write_text(json.dumps([asdict(line) for line in bench.lines], indent=1))


if __name__ == "__main__":
    main()
