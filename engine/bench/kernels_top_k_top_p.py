"""What min-p, top-k and top-p cost on this GPU: `python -m engine.bench.kernels_top_k_top_p`.

Each case is captured in a CUDA graph and replayed. Bandwidth counts one read of the logits, which every form must make,
so that it says how far a form is from that limit; the copy bandwidth beside it is measured in the same run.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch

from kernels import Purpose, gumbel_sample
from kernels.top_k_top_p import mask_top_k_top_p, sample_top_k_top_p

from .machine import commit, device_name, versions

VOCAB_SIZE = 151_936
# A lucky replay that ran from the L2 cache would say little; 256 rows don't fit into it, few rows do in the engine too.
REPEATS, CALLS = 15, 10


@dataclass(frozen=True)
class Case:
    name: str
    top_k: int
    top_p: float
    min_p: float
    # Standard deviation of the logits: near 0 every token counts, and the candidates of a top-p don't suffice.
    spread: float


CASES = (
    Case("AT: top-k 50, top-p .95", 50, 0.95, 0.0, 2.0),
    Case("top-p .95, peaked rows", VOCAB_SIZE, 0.95, 0.0, 6.0),
    Case("top-p .95, flat rows", VOCAB_SIZE, 0.95, 0.0, 0.3),
    Case("top-k 2000, top-p .95", 2000, 0.95, 0.0, 2.0),
    Case("min-p .1", VOCAB_SIZE, 1.0, 0.1, 2.0),
    Case("no filter", VOCAB_SIZE, 1.0, 0.0, 2.0),
)


def measure(call: Callable[[], object]) -> float:
    """Median microseconds of a call in a graph of CALLS."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()  # compiles
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    graph.replay()
    times = []
    for _ in range(REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / CALLS)
    return statistics.median(times)


def by_kernel(call: Callable[[], object]) -> dict[str, float]:
    """Mean microseconds of each kernel of a call, in the order of launch."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(CALLS):
            call()
        torch.cuda.synchronize()
    total: dict[str, float] = {}
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            total[event.name] = total.get(event.name, 0.0) + event.time_range.elapsed_us() / CALLS
    return total


def benchmark(num_rows: tuple[int, ...] = (1, 8, 256), seed: int = 0) -> None:
    """Print the table. Needs a CUDA device."""
    device = torch.device("cuda")
    print(f"{device_name(device)}, commit {commit()}, {versions('torch', 'triton')}")
    source = torch.empty(2**28, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    print(f"copy: {2 * source.nbytes / measure(lambda: target.copy_(source)) / 1e6:.2f} TB/s")
    generator = torch.Generator(device=device).manual_seed(seed)
    for rows in num_rows:
        noise = torch.randn(rows, VOCAB_SIZE, device=device, generator=generator)
        idx = torch.arange(rows, dtype=torch.int32, device=device)
        draw = (torch.ones(rows, device=device), idx.long(), idx.long() + 100)
        for case in CASES:
            _run_case(case, noise * case.spread, idx, draw)


def _run_case(case: Case, logits: torch.Tensor, idx: torch.Tensor, draw: tuple[torch.Tensor, ...]) -> None:
    rows = len(logits)
    filters = (
        torch.full((rows,), case.top_k, dtype=torch.int32, device=logits.device),
        torch.full((rows,), case.top_p, device=logits.device),
        torch.full((rows,), case.min_p, device=logits.device),
    )
    masked = logits.clone()

    def sample(form: str = "triton") -> torch.Tensor:
        return sample_top_k_top_p(
            logits, idx, *filters, *draw, purpose=Purpose.SAMPLE, apply_temperature=True, form=form
        )

    def copy() -> torch.Tensor:
        return masked.copy_(logits)

    def copy_and_mask() -> None:
        # Top-p of what top-p has left is less: each time begins with the logits.
        mask_top_k_top_p(masked.copy_(logits), idx, *filters, form="triton")

    def gumbel() -> torch.Tensor:
        return gumbel_sample(logits, idx, *draw, purpose=Purpose.SAMPLE, form="triton")

    print(f"\n{rows} rows, {case.name}")
    copy_and_mask()
    same = torch.equal(sample(), gumbel_sample(masked, idx, *draw, purpose=Purpose.SAMPLE, form="triton"))
    kept = (masked > float("-inf")).sum() / rows
    print(f"  the draw is that of the masked logits: {same}; kept {float(kept):.0f} tokens a row")
    times = {
        "sample": measure(sample),
        "mask": measure(copy_and_mask) - measure(copy),
        "sample, torch form": measure(lambda: sample("torch")),
        "gumbel_sample alone": measure(gumbel),
    }
    for name, us in times.items():
        print(f"  {name:20s}{us:10.1f} us  {logits.nbytes / us / 1e6:6.2f} TB/s")
    print("  sample: " + ", ".join(f"{name} {us:.1f}" for name, us in by_kernel(sample).items()))


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 256])
    rows = parser.parse_args().rows
    if not torch.cuda.is_available():
        parser.error("this needs a CUDA device, and torch sees none")
    benchmark(tuple(rows))


if __name__ == "__main__":
    main()
