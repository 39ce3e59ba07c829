"""Kernel 18's draws and noise, one row or many at a time, and what both are measured by."""

import math

import torch

from kernels import Purpose, gumbel_sample
from kernels.noise import LANES, MIN_UNIFORM, log_exponential, log_exponential_torch, log_exponential_triton
from kernels.philox import philox, uniform
from kernels.triton_support import launch, tl, triton

ALL_FORMS = ("loop", "torch", "interpret")
TILE = 4 * LANES
# u = 0 (twice), the smallest positive u, and u -> 1 (twice).
EDGE_WORDS = torch.tensor([0, -1, 1, 2**31 - 1, -(2**31)], dtype=torch.int32)
NEG_INF = float("-inf")


def sample(
    logits: torch.Tensor,
    *,
    temperature: float = 1.0,
    seed: int = 0,
    position: int = 0,
    purpose: int = Purpose.SAMPLE,
    form: str = "torch",
    **options: bool,
) -> torch.Tensor:
    """Sample every row with one seed, at positions `position`, `position + 1`, ..."""
    n = len(logits)
    return gumbel_sample(
        logits,
        torch.zeros(n, dtype=torch.int32),
        torch.tensor([temperature]),
        torch.tensor([seed]),
        torch.arange(position, position + n),
        purpose=purpose,
        form=form,
        **options,
    )


def exact_scores(logits: torch.Tensor, t: float, seed: int, position: int, purpose: int) -> torch.Tensor:
    """Return logit - t * log E in f64 for one row, straight from the definition."""
    token = torch.arange(len(logits))
    tile, word, lane = token // TILE, token % TILE // LANES, token % LANES
    words = torch.stack(
        philox(
            torch.tensor(seed),
            tile * LANES + lane,
            torch.tensor(position),
            torch.tensor(purpose),
            torch.tensor(position >> 32),
        )
    )
    u = (uniform(words.gather(0, word.unsqueeze(0))[0]) + MIN_UNIFORM).double()
    return logits.double() - t * torch.log(-torch.log1p(-u))


def chi_square_z(counts: torch.Tensor, expected: torch.Tensor) -> float:
    """Return Pearson's statistic as a standard normal deviate (Wilson-Hilferty); rare cells are pooled."""
    order = expected.argsort()
    pool = (expected[order].cumsum(0) // 20).long()
    pooled = [
        torch.zeros(int(pool[-1]) + 1, dtype=torch.float64).index_add_(0, pool, x[order].double())
        for x in (counts, expected)
    ]
    kept = pooled[1] > 0
    statistic = float(((pooled[0] - pooled[1]) ** 2 / pooled[1])[kept].sum())
    df = int(kept.sum()) - 1
    return ((statistic / df) ** (1 / 3) - (1 - 2 / (9 * df))) / math.sqrt(2 / (9 * df))


@triton.jit
def _noise_kernel(words_ptr, out_ptr, n, MIN_UNIFORM: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    words = tl.load(words_ptr + i, mask=i < n, other=0)
    tl.store(out_ptr + i, log_exponential_triton(words.to(tl.uint32, bitcast=True), MIN_UNIFORM), mask=i < n)


def noise(words: torch.Tensor, form: str) -> torch.Tensor:
    if form == "torch":
        return log_exponential_torch(words)
    if form == "loop":
        return torch.tensor([log_exponential(word & 0xFFFFFFFF) for word in words.tolist()])
    out = torch.zeros(len(words), device=words.device)
    launch(_noise_kernel, (1,), words, out, len(words), form=form, MIN_UNIFORM=MIN_UNIFORM, BLOCK=1024)
    return out
