"""Philox4x32-7, the counter-based generator of `tl.rand` in 7 rounds: the same bits in torch, and in plain Python.

One evaluation turns a 64-bit key and a 128-bit counter into four 32-bit words. Any word of any counter can be had at
once, on any device, in any order: that is what makes a draw a pure function of its name.
"""

import numpy as np
import torch

ROUND_A, ROUND_B = 0xD2511F53, 0xCD9E8D57
KEY_A, KEY_B = 0x9E3779B9, 0xBB67AE85
NUM_ROUNDS = 7
"""The fewest that pass BigCrush (Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC11).
Libraries take 10 for a margin; kernel 18 is bound by these instructions, so here it would cost time."""
_MASK = 0xFFFFFFFF
# Turns 0 .. 2^31 - 1 into [0, 1): the largest float32 product is 1 - 2^-24.
UNIFORM_SCALE = 4.6566127342e-10


def philox_words(seed: int, c0: int, c1: int, c2: int, c3: int) -> tuple[int, int, int, int]:
    """Return the four words (each 0 .. 2^32 - 1) of one counter: the specification, one integer at a time.

    Every argument is taken modulo its width: 64 bits for the seed, 32 for each part of the counter.
    """
    k0, k1 = seed & _MASK, seed >> 32 & _MASK
    c0, c1, c2, c3 = c0 & _MASK, c1 & _MASK, c2 & _MASK, c3 & _MASK
    for _ in range(NUM_ROUNDS):
        a, b = ROUND_A * c0, ROUND_B * c2
        c0, c1, c2, c3 = b >> 32 ^ c1 ^ k0, b & _MASK, a >> 32 ^ c3 ^ k1, a & _MASK
        k0, k1 = k0 + KEY_A & _MASK, k1 + KEY_B & _MASK
    return c0, c1, c2, c3


def uniform_of_word(word: int) -> float:
    """Map one word to [0, 1 - 2^-24] as `tl.rand` does: the upper half mirrored onto the lower, then scaled in f32."""
    mirrored = word if word < 2**31 else _MASK - word
    return float(np.float32(mirrored) * np.float32(UNIFORM_SCALE))


def philox(
    # i64; all five broadcast with each other
    seed: torch.Tensor,
    c0: torch.Tensor,
    c1: torch.Tensor,
    c2: torch.Tensor,
    c3: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the four words of every counter as i32 tensors of the broadcast shape, bit-equal to `tl.philox`
    with as many rounds.

    Torch has no unsigned 32-bit multiply, so words live in i64: a product wraps modulo 2^64 and its bits 32..63 are
    right whatever its sign. Only factors have to be cut to 32 bits, xor operands need not be. Parts that are the same
    for a whole row stay small until a round mixes them: that saves a tenth of the work.
    """
    k0, k1 = seed & _MASK, seed >> 32 & _MASK
    c0, c2 = c0 & _MASK, c2 & _MASK
    for _ in range(NUM_ROUNDS):
        a, b = c0 * ROUND_A, c2 * ROUND_B
        c0 = (b >> 32 ^ c1 ^ k0).bitwise_and_(_MASK)
        c2 = (a >> 32 ^ c3 ^ k1).bitwise_and_(_MASK)
        c1, c3 = b, a
        k0, k1 = k0 + KEY_A, k1 + KEY_B
    return c0.to(torch.int32), c1.to(torch.int32), c2.to(torch.int32), c3.to(torch.int32)


def randint(seed: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    """Return random i32 of the broadcast shape, bit-equal to `tl.randint(seed, offset, NUM_ROUNDS)`, offset i32 or i64.

    An i64 offset fills two parts of the counter, an i32 one only the first, as in Triton.
    """
    zero = torch.zeros_like(offset, dtype=torch.int64)
    return philox(seed, offset.long(), offset >> 32 if offset.dtype == torch.int64 else zero, zero, zero)[0]


def rand(seed: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    """Return f32 in [0, 1) of the broadcast shape, bit-equal to `tl.rand(seed, offset, NUM_ROUNDS)`, i32 or i64."""
    return uniform(randint(seed, offset))


def uniform(words: torch.Tensor) -> torch.Tensor:
    """As `uniform_of_word` for i32 words of any shape; f32."""
    return (words ^ words >> 31).to(torch.float32).mul_(UNIFORM_SCALE)
