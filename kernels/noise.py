"""The noise of Gumbel-max: one Philox word a token, from a stream for each purpose.

A request's seed is the key, (token, position, purpose) the counter. Each purpose has a stream of its own; a drafter
that shared the stream of the residual resample would bias the output, since a rejection tells something about the
noise that led to the draft.

Tokens come in tiles of 4 * LANES: token 4 * LANES * tile + LANES * w + lane has word w of counter LANES * tile + lane.
So one evaluation serves four tokens, and neighbouring lanes read neighbouring logits.
"""

import math
from enum import IntEnum

import torch

from kernels.dispatch import check_tensors
from kernels.philox import philox, philox_words, uniform, uniform_of_word
from kernels.triton_support import tl, triton

LANES = 256
MIN_UNIFORM = 2.0**-32
"""Below the smallest positive uniform (2^-31), so that u = 0 gives a finite noise too: at most 22.2."""


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
    return math.log(-math.log1p(-max(uniform_of_word(word), MIN_UNIFORM)))


def log_exponential_torch(words: torch.Tensor) -> torch.Tensor:
    """As `log_exponential`, for i32 words of any shape; f32. Small u matter most: -log(1 - u) would round them away."""
    return uniform(words).clamp_(min=MIN_UNIFORM).neg_().log1p_().neg_().log_()


@triton.jit
def log_exponential_triton(words, MIN_UNIFORM: tl.constexpr):
    """As `log_exponential`, for a block of u32 words."""
    u = tl.maximum(tl.uint_to_uniform_float(words), MIN_UNIFORM)
    # -log1p(-u) from log alone: the rounding error of 1 - u cancels in the quotient. The interpreter has no log1p.
    rest = 1.0 - u
    lost = 1.0 - rest
    return tl.log(tl.where(lost == 0.0, u, -tl.log(rest) * (u / tl.where(lost == 0.0, 1.0, lost))))


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
