"""`runnerscope bench --sampling`: what each sampling feature costs on both runners."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
from typing import TYPE_CHECKING, Any

from .bench_suite import model_keywords
from .terminal import UserError, columns, printable

if TYPE_CHECKING:
    from engine.bench.ceilings import Ceilings
    from engine.bench.sampling import SamplingCost

OPTIONS = ("--requests", "--input-len", "--commit")
_REQUESTS, _PROMPT_LEN = 256, 8192


def run(arguments: argparse.Namespace, keywords: dict[str, Any], on_gpu: bool) -> int:
    """Measures and prints. `--requests` is the batch, `--input-len` the prompt whose logprobs are asked for."""
    from engine.bench.ceilings import measure_ceilings
    from engine.bench.machine import commit, device_name, driver_version, versions
    from engine.bench.sampling import measure_prompt_logprobs, measure_sampling
    from engine.bench.startup import load

    num_reqs, prompt_len = arguments.requests, arguments.input_len
    if not on_gpu and None in (num_reqs, prompt_len):
        raise UserError(
            "bench --sampling at full size needs a CUDA device, and none is used here; on a CPU give --requests and "
            "--input-len (say 8 and 64)"
        )
    num_reqs, prompt_len = num_reqs or _REQUESTS, prompt_len or _PROMPT_LEN
    if num_reqs < 1 or prompt_len < 2:
        raise UserError(f"--requests {num_reqs} --input-len {prompt_len}: at least 1 request, and a prompt of 2 tokens")
    loaded, _ = load(model_keywords(keywords))
    device, vocab = loaded.model.device, loaded.config.vocab_size
    costs = measure_sampling(loaded, num_reqs) + measure_prompt_logprobs(loaded, prompt_len)
    ceilings, logits_bytes = measure_ceilings(device), 4 * num_reqs * vocab
    about = {"device": device_name(device)} | ({"driver": driver_version()} if on_gpu else {})
    about |= {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": arguments.commit or commit(),
        "batch": f"{num_reqs} requests, V = {vocab:,}: {logits_bytes / 1e6:,.1f} MB of logits",
        **versions("torch", "triton"),
    }
    if arguments.json:
        report = {
            "about": about, "read_bandwidth": ceilings.read, "logits_bytes": logits_bytes,
            "costs": [dataclasses.asdict(cost) for cost in costs],
        }  # fmt: skip
        print(json.dumps(report, indent=2))
    else:
        print("\n".join(_lines(about, ceilings, logits_bytes, costs)))
    return 0


def _lines(about: dict[str, str], ceilings: Ceilings, logits_bytes: int, costs: list[SamplingCost]) -> list[str]:
    read = logits_bytes / ceilings.limit
    rows = [[key, printable(value)] for key, value in about.items()]
    rows.append(["memory", f"read {ceilings.read / 1e9:,.1f} GB/s: the logits once in {read * 1e3:.3f} ms"])
    table = [["", "V2 ms", "× read", "peak MB", "V1 ms", "× read", "peak MB", "V1 / V2"]]
    for case in dict.fromkeys(cost.case for cost in costs):
        v2, v1 = ({cost.side: cost for cost in costs if cost.case == case}[side] for side in ("V2", "V1"))
        table.append([case, *_cells(v2, read), *_cells(v1, read), f"{v1.seconds / v2.seconds:.2f}"])
    chunks = {cost.side: cost.chunk_bytes / 1e6 for cost in costs if cost.chunk_bytes}
    return [
        *columns(rows),
        "",
        *columns(table, right=frozenset(range(1, 8))),
        "peak: what one call needs beside its logits; of prompt logprobs the logits of one chunk are "
        + " and ".join(f"{megabytes:,.0f} MB on {side}" for side, megabytes in chunks.items()),
    ]


def _cells(cost: SamplingCost, read: float) -> list[str]:
    peak = "–" if cost.peak_bytes is None else f"{cost.peak_bytes / 1e6:,.1f}"
    share = "–" if cost.chunk_bytes else f"{cost.seconds / read:.2f}"
    return [f"{cost.seconds * 1e3:,.3f}", share, peak]
