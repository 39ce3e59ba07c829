"""The noise of Gumbel-max: one Philox word a token, from a stream for each purpose.

A request's seed is the key, (token, position, purpose) the counter. Each purpose has a stream of its own; a drafter
that shared the stream of the residual resample would bias the output, since a rejection tells something about the
noise that led to the draft.

Tokens come in tiles of 4 * LANES: token 4 * LANES * tile + LANES * w + lane has word w of counter LANES * tile + lane.
So one evaluation serves four tokens, and neighbouring lanes read neighbouring logits.
"""

import math
from enum import IntEnum

import numpy as np
import torch

from kernels.dispatch import check_tensors
from kernels.philox import (
    KEY_A,
    KEY_B,
    NUM_ROUNDS,
    ROUND_A,
    ROUND_B,
    UNIFORM_SCALE,
    philox,
    philox_words,
    uniform,
    uniform_of_word,
)
from kernels.triton_support import interpreted_as, tl, triton

LANES = 256
MIN_UNIFORM = 2.0**-32
"""Half a step of the uniform, and added to it: u = 0 gives a finite noise too, at most 22.2."""
_NUM_ROUNDS, _ROUND_A, _ROUND_B, _KEY_A, _KEY_B, _STEP, LN2, _LN_LN2 = (
    tl.constexpr(value)
    for value in (NUM_ROUNDS, ROUND_A, ROUND_B, KEY_A, KEY_B, UNIFORM_SCALE, math.log(2), math.log(math.log(2)))
)
_BELOW = tl.constexpr((1 - 2**-16) / math.log(2))


class Purpose(IntEnum):
    """What a random number is for; each purpose draws from its own stream."""

    SAMPLE = 0
    DRAFT = 1
    ACCEPT = 2
    RESAMPLE = 3


def word_of(seed: int, position: int, purpose: int, token: int) -> int:
    """Return the word of one token, 0 .. 2^32 - 1: the specification."""
    tile, within = divmod(token, 4 * LANES)
    which, lane = divmod(within, LANES)
    return philox_words(seed, tile * LANES + lane, position, purpose, position >> 32)[which]


def log_exponential(word: int) -> float:
    """Return log E of an exponential variate E from one Philox word; -log E is Gumbel noise, in -2.82 .. 22.19."""
    u = np.float32(uniform_of_word(word)) + np.float32(MIN_UNIFORM)
    return math.log(-math.log1p(-float(u)))


def log_exponential_torch(words: torch.Tensor) -> torch.Tensor:
    """As `log_exponential`, for i32 words of any shape; f32. Small u matter most: -log(1 - u) would round them away."""
    return uniform(words).add_(MIN_UNIFORM).neg_().log1p_().neg_().log_()


@triton.jit
def philox_triton(seed, c0, c1, c2, c3):
    """As `philox`, for an i64 seed and blocks of u32 that are one part of the counter each; bit-equal to `tl.philox`
    with as many rounds.

    A product is taken whole, in 64 bits: one instruction, where `tl.philox` has one for each half.
    """
    k0 = seed.to(tl.uint64).to(tl.uint32)
    k1 = (seed.to(tl.uint64) >> 32).to(tl.uint32)
    for _ in tl.static_range(_NUM_ROUNDS):
        a = c0.to(tl.uint64) * _ROUND_A
        b = c2.to(tl.uint64) * _ROUND_B
        c0 = (b >> 32).to(tl.uint32) ^ c1 ^ k0
        c2 = (a >> 32).to(tl.uint32) ^ c3 ^ k1
        c1 = b.to(tl.uint32)
        c3 = a.to(tl.uint32)
        k0 = tl.add(k0, _KEY_A, sanitize_overflow=False)
        k1 = tl.add(k1, _KEY_B, sanitize_overflow=False)
    return c0, c1, c2, c3


def _log2_of_magnitude_exactly(x):
    return tl.log2(tl.abs(x))


@triton.jit
@interpreted_as(_log2_of_magnitude_exactly)
def _log2_of_magnitude(x):
    """log2 |x| in one instruction, the magnitude included: to 2^-22, relative where |x| is not in 1/2 .. 2."""
    asm: tl.constexpr = "{ .reg .f32 t; abs.f32 t, $1; lg2.approx.ftz.f32 $0, t; }"
    return tl.inline_asm_elementwise(asm, "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def log2_exponential_triton(words, MIN_UNIFORM: tl.constexpr):
    """log2(E / ln 2), f32, for a block of u32 words: `log_exponential` is ln 2 times this, plus ln ln 2.

    It is 12 instructions, which is what kernels 18 and 27 hang on. E is negative until its logarithm.
    """
    # The words -1 - k and k have the same uniform, (k + 1/2) / 2^31.
    u = tl.abs(tl.fma(words.to(tl.int32, bitcast=True).to(tl.float32), _STEP, MIN_UNIFORM))
    minus_rest = u - 1.0
    far = _log2_of_magnitude(minus_rest)
    # Where E is small, 2^-22 is too much for log2(1 - u): log2(1 - u) / u instead, a polynomial (Chebyshev's) in u - 1.
    near = tl.fma(minus_rest, -0.444954701, -1.80883946)
    near = tl.fma(near, minus_rest, -3.00433982)
    near = tl.fma(near, minus_rest, -3.0831494)
    return _log2_of_magnitude(tl.where(u < 0.125, u * near, far))


@triton.jit
def log2_bound_triton(words, MIN_UNIFORM: tl.constexpr):
    """A lower bound of `log2_exponential_triton`, f32, in 3 instructions: E >= u, near for small u.

    It is log2(u / ln 2), lower by 2.2e-5, which is more than what either of them is inexact by.
    """
    u = tl.fma(words.to(tl.int32, bitcast=True).to(tl.float32), _STEP * _BELOW, MIN_UNIFORM * _BELOW)
    return _log2_of_magnitude(u)


@triton.jit
def log_exponential_triton(words, MIN_UNIFORM: tl.constexpr):
    """As `log_exponential`, for a block of u32 words; to 4e-6 (absolute near 0, relative beyond 1)."""
    return tl.fma(log2_exponential_triton(words, MIN_UNIFORM), LN2, _LN_LN2)


def gumbel_noise(
    # [l] i64
    seeds: torch.Tensor,
    # [l] i64
    positions: torch.Tensor,
    vocab_size: int,
    *,
    purpose: int | torch.Tensor,
) -> torch.Tensor:
    """Return the noise that decides `gumbel_sample`: argmax(logits / temperature + noise).

    Args:
        purpose: a `Purpose`, or one for each row, i64 [l].

    Returns:
        f32 [l, vocab_size].

    Raises:
        ValueError: a wrong dtype, rank, length or purpose.
    """
    num_rows = seeds.shape[0]
    check_tensors(torch.int64, 1, num_rows, seeds=seeds, positions=positions)
    num_tiles = -(-vocab_size // (4 * LANES))
    counter = torch.arange(num_tiles * LANES, device=seeds.device)
    position = positions[:num_rows].unsqueeze(1)
    if isinstance(purpose, torch.Tensor):
        check_tensors(torch.int64, 1, num_rows, purpose=purpose)
        stream = purpose[:num_rows].unsqueeze(1)
    else:
        stream = torch.full_like(position, Purpose(purpose).value)
    words = philox(seeds.unsqueeze(1), counter, position, stream, position >> 32)
    tiles = torch.stack([word.view(num_rows, num_tiles, LANES) for word in words], dim=2)
    return log_exponential_torch(tiles.view(num_rows, num_tiles * 4 * LANES)[:, :vocab_size]).neg_()
