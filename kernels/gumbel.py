"""Kernel 18: sample by Gumbel-max with counter-based noise.

A choice is a pure function of (logits, seed, position, purpose): never of its row or its batch. Its noise: noise.py.
"""

import math

import torch

from kernels.dispatch import check_tensors, resolve_form
from kernels.noise import (
    LANES,
    MIN_UNIFORM,
    Purpose,
    gumbel_noise,
    log_exponential,
    log_exponential_triton,
    word_of,
)
from kernels.triton_support import launch, tl, triton


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
        MIN_UNIFORM=MIN_UNIFORM,
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
            # logit / T + noise and logit + T * noise have the same argmax, and the latter is greedy at T = 0.
            score = logit - scale * log_exponential(word_of(seed, position, purpose, token))
        if score > best_score:
            best, best_score = token, score
    return best


def _torch(
    logits: torch.Tensor,
    expanded_idx_mapping: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    purpose: int,
    apply_temperature: bool,
) -> torch.Tensor:
    rows = expanded_idx_mapping[: logits.shape[0]].clamp(min=0).long()
    noise = gumbel_noise(seeds[rows], positions, logits.shape[1], purpose=purpose)
    t = temperature[rows].unsqueeze(1)
    # Multiply, then add: a fused step could round a row's last columns unlike the same row in another batch.
    return (logits + noise.mul_(t if apply_temperature else (t != 0).float())).argmax(dim=-1)


@triton.jit
def _scores(logits_ptr, token, vocab_size, words, scale, ALL_GREEDY: tl.constexpr, MIN_UNIFORM: tl.constexpr):
    logit = tl.load(logits_ptr + token, mask=token < vocab_size, other=float("-inf"))
    # A NaN must not win a reduction, nor let a lane past the vocabulary win.
    logit = tl.where(logit == logit, logit, float("-inf"))
    if ALL_GREEDY:
        return logit
    else:
        return logit - scale * log_exponential_triton(words, MIN_UNIFORM)


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
