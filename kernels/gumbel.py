"""Kernel 18: sample by Gumbel-max with counter-based noise.

The noise of a token is Philox with the request's seed as key and (token, position, purpose) as counter. A choice is
thus a pure function of (logits, seed, position, purpose): never of its row or its batch. Each purpose has a stream of
its own; a drafter that shared the stream of the residual resample would bias the output, since a rejection tells
something about the noise that led to the draft.

Tokens come in tiles of 4 * LANES: token 4 * LANES * tile + LANES * w + lane has word w of counter LANES * tile + lane.
So one evaluation serves four tokens, and neighbouring lanes read neighbouring logits.
"""

import math
from enum import IntEnum

import torch

from kernels.dispatch import check_tensors, resolve_form
from kernels.philox import philox, philox_words, uniform, uniform_of_word
from kernels.triton_support import launch, tl, triton

LANES = 256
# Below the smallest positive uniform (2^-31), so that u = 0 gives a finite noise too: at most 22.2.
_MIN_UNIFORM = 2.0**-32


class Purpose(IntEnum):
    """What a random number is for; each purpose draws from its own stream."""

    SAMPLE = 0
    DRAFT = 1
    ACCEPT = 2
    RESAMPLE = 3


def gumbel_sample(
    # [l, V] f32
    logits: torch.Tensor,
    # [l] i32, -1 for padding
    expanded_idx_mapping: torch.Tensor,
    # [R] f32
    temperature: torch.Tensor,
    # [R] i64
    seeds: torch.Tensor,
    # [l] i64
    positions: torch.Tensor,
    *,
    purpose: int,
    all_greedy: bool = False,
    apply_temperature: bool = False,
    form: str = "auto",
) -> torch.Tensor:
    """Draw one token id for each row of logits, with probability softmax(logits / temperature).

    Temperature 0 is greedy: the largest logit, the lowest id on ties. A logit of -inf is never chosen while the row has
    another; a row of nothing but -inf gives id 0. A row with NaN, and padding, gives some id below V.

    Args:
        purpose: a `Purpose`: the stream to draw from.
        all_greedy: the host knows that every temperature is 0: draw no noise.
        apply_temperature: logits have not been divided by the temperature yet.

    Returns:
        Token ids, i64 [l].

    Raises:
        ValueError: a wrong dtype, rank, length, purpose or form.
    """
    num_logits = logits.shape[0]
    check_tensors(torch.float32, 2, logits=logits)
    check_tensors(torch.int32, 1, num_logits, expanded_idx_mapping=expanded_idx_mapping)
    check_tensors(torch.int64, 1, num_logits, positions=positions)
    check_tensors(torch.float32, 1, temperature=temperature)
    check_tensors(torch.int64, 1, seeds=seeds)
    purpose = Purpose(purpose).value
    form = resolve_form(form, logits)
    if form == "torch":
        if all_greedy:
            return logits.argmax(dim=-1)
        return _torch(logits, expanded_idx_mapping, temperature, seeds, positions, purpose, apply_temperature)
    sampled = torch.empty(num_logits, dtype=torch.int64, device=logits.device)
    if form == "loop":
        for i in range(num_logits):
            row = max(int(expanded_idx_mapping[i]), 0)
            t = 0.0 if all_greedy else float(temperature[row])
            sampled[i] = _choose(
                logits[i].tolist(), t, int(seeds[row]), int(positions[i]), purpose, t if apply_temperature else 1.0
            )
        return sampled
    num_tiles = -(-logits.shape[1] // (4 * LANES))
    tile_max = torch.empty(num_logits, num_tiles, dtype=torch.float32, device=logits.device)
    tile_argmax = torch.empty(num_logits, num_tiles, dtype=torch.int64, device=logits.device)
    launch(
        _gumbel_tile_kernel,
        (num_logits, num_tiles),
        logits,
        logits.stride(0),
        logits.shape[1],
        expanded_idx_mapping,
        temperature,
        seeds,
        positions,
        purpose,
        tile_max,
        tile_argmax,
        form=form,
        ALL_GREEDY=all_greedy,
        APPLY_TEMPERATURE=apply_temperature,
        MIN_UNIFORM=_MIN_UNIFORM,
        LANES=LANES,
    )
    launch(
        _gumbel_reduce_kernel,
        (num_logits,),
        tile_max,
        tile_argmax,
        num_tiles,
        sampled,
        form=form,
        num_warps=1,
        BLOCK=1 << (num_tiles - 1).bit_length(),
    )
    return sampled


def _choose(logits: list[float], temperature: float, seed: int, position: int, purpose: int, scale: float) -> int:
    """Choose a token for one row: the specification."""
    best, best_score = 0, -math.inf
    for token, logit in enumerate(logits):
        score = logit
        if temperature != 0.0:
            tile, within = divmod(token, 4 * LANES)
            which, lane = divmod(within, LANES)
            word = philox_words(seed, tile * LANES + lane, position, purpose, position >> 32)[which]
            # logit / T + noise and logit + T * noise have the same argmax, and the latter is greedy at T = 0.
            score = logit - scale * log_exponential(word)
        if score > best_score:
            best, best_score = token, score
    return best


def log_exponential(word: int) -> float:
    """Return log E of an exponential variate E from one Philox word; -log E is Gumbel noise, in -2.82 .. 22.19."""
    return math.log(-math.log1p(-max(uniform_of_word(word), _MIN_UNIFORM)))


def log_exponential_torch(words: torch.Tensor) -> torch.Tensor:
    """As `log_exponential`, for i32 words of any shape; f32. Small u matter most: -log(1 - u) would round them away."""
    return uniform(words).clamp_(min=_MIN_UNIFORM).neg_().log1p_().neg_().log_()


def _torch(
    logits: torch.Tensor,
    expanded_idx_mapping: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    purpose: int,
    apply_temperature: bool,
) -> torch.Tensor:
    num_logits, vocab_size = logits.shape
    num_tiles = -(-vocab_size // (4 * LANES))
    rows = expanded_idx_mapping[:num_logits].clamp(min=0).long()
    counter = torch.arange(num_tiles * LANES, device=logits.device)
    position = positions[:num_logits].unsqueeze(1)
    stream = torch.full_like(position, purpose)
    words = philox(seeds[rows].unsqueeze(1), counter, position, stream, position >> 32)
    tiles = torch.stack([word.view(num_logits, num_tiles, LANES) for word in words], dim=2)
    noise = log_exponential_torch(tiles.view(num_logits, num_tiles * 4 * LANES)[:, :vocab_size])
    t = temperature[rows].unsqueeze(1)
    # Multiply, then subtract: a fused step could round a row's last columns unlike the same row in another batch.
    return (logits - noise.mul_(t if apply_temperature else (t != 0).float())).argmax(dim=-1)


@triton.jit
def _log_exponential(words, MIN_UNIFORM: tl.constexpr):
    u = tl.maximum(tl.uint_to_uniform_float(words), MIN_UNIFORM)
    # -log1p(-u) from log alone: the rounding error of 1 - u cancels in the quotient. The interpreter has no log1p.
    rest = 1.0 - u
    lost = 1.0 - rest
    return tl.log(tl.where(lost == 0.0, u, -tl.log(rest) * (u / tl.where(lost == 0.0, 1.0, lost))))


@triton.jit
def _scores(logits_ptr, token, vocab_size, words, scale, ALL_GREEDY: tl.constexpr, MIN_UNIFORM: tl.constexpr):
    logit = tl.load(logits_ptr + token, mask=token < vocab_size, other=float("-inf"))
    # A NaN must not win a reduction, nor let a lane past the vocabulary win.
    logit = tl.where(logit == logit, logit, float("-inf"))
    if ALL_GREEDY:
        return logit
    else:
        return logit - scale * _log_exponential(words, MIN_UNIFORM)


@triton.jit(do_not_specialize=["purpose"])
def _gumbel_tile_kernel(
    logits_ptr,
    logits_stride,
    vocab_size,
    expanded_idx_mapping_ptr,
    temperature_ptr,
    seeds_ptr,
    positions_ptr,
    purpose,
    tile_max_ptr,
    tile_argmax_ptr,
    ALL_GREEDY: tl.constexpr,
    APPLY_TEMPERATURE: tl.constexpr,
    MIN_UNIFORM: tl.constexpr,
    LANES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    lane = tl.arange(0, LANES)
    zero = (lane * 0).to(tl.uint32)
    w0, w1, w2, w3 = zero, zero, zero, zero
    scale = 0.0
    if not ALL_GREEDY:
        state = tl.maximum(tl.load(expanded_idx_mapping_ptr + row), 0)
        temperature = tl.load(temperature_ptr + state)
        scale = temperature if APPLY_TEMPERATURE else (temperature != 0.0).to(tl.float32)
        position = tl.load(positions_ptr + row)
        counter = (tile * LANES + lane).to(tl.uint32)
        w0, w1, w2, w3 = tl.philox(
            tl.load(seeds_ptr + state),
            counter,
            zero + position.to(tl.uint32),
            zero + purpose.to(tl.uint32),
            zero + (position >> 32).to(tl.uint32),
        )
    row_ptr = logits_ptr + row * logits_stride
    token = tile * (4 * LANES) + lane
    best = _scores(row_ptr, token, vocab_size, w0, scale, ALL_GREEDY, MIN_UNIFORM)
    best_token = token
    for word in tl.static_range(1, 4):
        token += LANES
        words = w1 if word == 1 else (w2 if word == 2 else w3)
        score = _scores(row_ptr, token, vocab_size, words, scale, ALL_GREEDY, MIN_UNIFORM)
        best_token = tl.where(score > best, token, best_token)
        best = tl.maximum(best, score)
    tile_max = tl.max(best, axis=0)
    tile_argmax = tl.min(tl.where(best == tile_max, best_token, 2147483647), axis=0)
    out = row * tl.num_programs(1) + tile
    tl.store(tile_max_ptr + out, tile_max)
    tl.store(tile_argmax_ptr + out, tile_argmax.to(tl.int64))


@triton.jit
def _gumbel_reduce_kernel(tile_max_ptr, tile_argmax_ptr, num_tiles, sampled_ptr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    tile = tl.arange(0, BLOCK)
    mask = tile < num_tiles
    best = tl.load(tile_max_ptr + row * num_tiles + tile, mask=mask, other=float("-inf"))
    token = tl.load(tile_argmax_ptr + row * num_tiles + tile, mask=mask, other=9223372036854775807)
    tl.store(sampled_ptr + row, tl.min(tl.where(best == tl.max(best, axis=0), token, 9223372036854775807), axis=0))
