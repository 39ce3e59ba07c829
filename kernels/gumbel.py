"""Kernel 18: sample by Gumbel-max with counter-based noise.

A choice is a pure function of (logits, seed, position, purpose): never of its row or its batch. Its noise: noise.py.
"""

import math

import torch

from kernels.dispatch import check_tensors, resolve_form
from kernels.noise import (
    LANES,
    LN2,
    MIN_UNIFORM,
    Purpose,
    gumbel_noise,
    log2_exponential_triton,
    log_exponential,
    philox_triton,
    word_of,
)
from kernels.triton_support import launch, tl, triton

# Of _gumbel_chunk_kernel: 16 logits a thread and step. Further steps share the keys and the reduction; few rows have
# not enough programs for them.
_TILES, _STEPS, _MANY_ROWS = 4, 4, 64


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
    steps = _STEPS if num_logits >= _MANY_ROWS else 1
    num_chunks = -(-logits.shape[1] // (4 * LANES * _TILES * steps))
    chunk_max = torch.empty(num_logits, num_chunks, dtype=torch.float32, device=logits.device)
    chunk_argmax = torch.empty(num_logits, num_chunks, dtype=torch.int64, device=logits.device)
    launch(
        _gumbel_chunk_kernel,
        (num_logits, num_chunks),
        logits,
        logits.stride(0),
        logits.shape[1],
        expanded_idx_mapping,
        temperature,
        seeds,
        positions,
        purpose,
        chunk_max,
        chunk_argmax,
        form=form,
        num_warps=8,
        ALL_GREEDY=all_greedy,
        APPLY_TEMPERATURE=apply_temperature,
        MIN_UNIFORM=MIN_UNIFORM,
        LANES=LANES,
        TILES=_TILES,
        STEPS=steps,
    )
    launch(
        _gumbel_reduce_kernel,
        (num_logits,),
        chunk_max,
        chunk_argmax,
        num_chunks,
        sampled,
        form=form,
        num_warps=1,
        BLOCK=1 << (num_chunks - 1).bit_length(),
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


# A stride that is known to be a multiple of 16 would give a thread 4 neighbouring logits, and their noise to another.
@triton.jit(do_not_specialize=["purpose", "logits_stride"])
def _gumbel_chunk_kernel(
    logits_ptr,
    logits_stride,
    vocab_size,
    expanded_idx_mapping_ptr,
    temperature_ptr,
    seeds_ptr,
    positions_ptr,
    purpose,
    chunk_max_ptr,
    chunk_argmax_ptr,
    ALL_GREEDY: tl.constexpr,
    APPLY_TEMPERATURE: tl.constexpr,
    MIN_UNIFORM: tl.constexpr,
    LANES: tl.constexpr,
    TILES: tl.constexpr,
    STEPS: tl.constexpr,
):
    """The best of STEPS * TILES tiles of a row. What a choice hangs on is rounded the same whatever STEPS is."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    row_ptr = logits_ptr + row * logits_stride
    counter = tl.arange(0, TILES)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    within = tl.arange(0, TILES)[:, None] * (4 * LANES) + tl.arange(0, LANES)[None, :]
    zero = (counter * 0).to(tl.uint32)
    w0, w1, w2, w3 = zero, zero, zero, zero
    scale = 0.0
    if not ALL_GREEDY:
        state = tl.maximum(tl.load(expanded_idx_mapping_ptr + row), 0)
        temperature = tl.load(temperature_ptr + state)
        # The noise comes as a log2, without ln ln 2: what every token of a row has is left out.
        scale = -LN2 * (temperature if APPLY_TEMPERATURE else (temperature != 0.0).to(tl.float32))
        seed = tl.load(seeds_ptr + state)
        position = tl.load(positions_ptr + row)
        low = zero + position.to(tl.uint32)
        high = zero + (position >> 32).to(tl.uint32)
        stream = zero + purpose.to(tl.uint32)
    best = tl.full([TILES, LANES], float("-inf"), tl.float32)
    best_token = counter * 0
    first = chunk * (STEPS * TILES)
    last = tl.minimum(first + STEPS * TILES, tl.cdiv(vocab_size, 4 * LANES))
    # Only the last tiles of a row need a mask.
    whole = first + (tl.minimum(last, vocab_size // (4 * LANES)) - first) // TILES * TILES
    for tile in range(first, whole, TILES):
        token = tile * (4 * LANES) + within
        x0 = tl.load(row_ptr + token)
        x1 = tl.load(row_ptr + token + LANES)
        x2 = tl.load(row_ptr + token + 2 * LANES)
        x3 = tl.load(row_ptr + token + 3 * LANES)
        if not ALL_GREEDY:
            w0, w1, w2, w3 = philox_triton(seed, (tile * LANES + counter).to(tl.uint32), low, stream, high)
        best, best_token = _better(
            best, best_token, token, x0, x1, x2, x3, w0, w1, w2, w3, scale, ALL_GREEDY, MIN_UNIFORM, LANES
        )
    for tile in range(whole, last, TILES):
        token = tile * (4 * LANES) + within
        x0 = tl.load(row_ptr + token, mask=token < vocab_size, other=float("-inf"))
        x1 = tl.load(row_ptr + token + LANES, mask=token + LANES < vocab_size, other=float("-inf"))
        x2 = tl.load(row_ptr + token + 2 * LANES, mask=token + 2 * LANES < vocab_size, other=float("-inf"))
        x3 = tl.load(row_ptr + token + 3 * LANES, mask=token + 3 * LANES < vocab_size, other=float("-inf"))
        if not ALL_GREEDY:
            w0, w1, w2, w3 = philox_triton(seed, (tile * LANES + counter).to(tl.uint32), low, stream, high)
        best, best_token = _better(
            best, best_token, token, x0, x1, x2, x3, w0, w1, w2, w3, scale, ALL_GREEDY, MIN_UNIFORM, LANES
        )
    # Axis 0 lies within a thread.
    chunk_max = tl.max(tl.max(best, axis=0), axis=0)
    chunk_argmax = tl.min(tl.min(tl.where(best == chunk_max, best_token, 2147483647), axis=0), axis=0)
    out = row * tl.num_programs(1) + chunk
    tl.store(chunk_max_ptr + out, chunk_max)
    tl.store(chunk_argmax_ptr + out, chunk_argmax.to(tl.int64))


@triton.jit
def _better(
    best, best_token, token, x0, x1, x2, x3, w0, w1, w2, w3, scale,
    ALL_GREEDY: tl.constexpr, MIN_UNIFORM: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """The best so far, and these logits with the noise of the four words of a counter."""
    if not ALL_GREEDY:
        x0 = tl.fma(log2_exponential_triton(w0, MIN_UNIFORM), scale, x0)
        x1 = tl.fma(log2_exponential_triton(w1, MIN_UNIFORM), scale, x1)
        x2 = tl.fma(log2_exponential_triton(w2, MIN_UNIFORM), scale, x2)
        x3 = tl.fma(log2_exponential_triton(w3, MIN_UNIFORM), scale, x3)
    # A NaN is neither a maximum nor greater than one: it never wins, as a lane past the vocabulary does not.
    of_four = tl.maximum(tl.maximum(x0, x1), tl.maximum(x2, x3))
    word = tl.where(x0 == of_four, 0, tl.where(x1 == of_four, LANES, tl.where(x2 == of_four, 2 * LANES, 3 * LANES)))
    best_token = tl.where(of_four > best, token + word, best_token)
    return tl.maximum(best, of_four), best_token


@triton.jit
def _gumbel_reduce_kernel(chunk_max_ptr, chunk_argmax_ptr, num_chunks, sampled_ptr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, BLOCK)
    mask = chunk < num_chunks
    best = tl.load(chunk_max_ptr + row * num_chunks + chunk, mask=mask, other=float("-inf"))
    token = tl.load(chunk_argmax_ptr + row * num_chunks + chunk, mask=mask, other=9223372036854775807)
    tl.store(sampled_ptr + row, tl.min(tl.where(best == tl.max(best, axis=0), token, 9223372036854775807), axis=0))
