"""Kernel 18 of gumbel.py, as Triton compiles it.

With two logarithms a logit its instructions took longer than reading the logits, so most logits are given one.
"""

from kernels.noise import LN2, log2_bound_triton, log2_exponential_triton, philox_triton
from kernels.triton_support import begin_behind, tl, triton


# A stride that is known to be a multiple of 16 would give a thread 4 neighbouring logits, and their noise to another.
@triton.jit(do_not_specialize=["purpose", "logits_stride", "steps"])
def chunk_kernel(
    logits_ptr,
    logits_stride,
    vocab_size,
    expanded_idx_mapping_ptr,
    temperature_ptr,
    seeds_ptr,
    positions_ptr,
    purpose,
    steps,
    chunk_max_ptr,
    chunk_argmax_ptr,
    counters_ptr,
    sampled_ptr,
    PDL: tl.constexpr,
    ALL_GREEDY: tl.constexpr,
    APPLY_TEMPERATURE: tl.constexpr,
    MIN_UNIFORM: tl.constexpr,
    LANES: tl.constexpr,
    TILES: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """The best of steps * TILES tiles of a row; of a row's programs the one that ends last finds the best chunk, the
    first of several. What a choice hangs on is rounded the same whatever `steps` is.

    Most scores are only bounded: E >= u, so that logit - scale * log u is no less than the score and costs half of it.
    Of each lane the four tokens of a counter with the largest bound are then scored; should another bound of a lane
    exceed the best of these scores, which is rare, all are scored. So a choice is exact.
    """
    begin_behind(PDL)
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    row_ptr = logits_ptr + row * logits_stride
    lane = tl.arange(0, LANES)
    counter = tl.arange(0, TILES)[:, None] * LANES + lane[None, :]
    within = tl.arange(0, TILES)[:, None] * (4 * LANES) + lane[None, :]
    first = chunk * (steps * TILES)
    last = tl.minimum(first + steps * TILES, tl.cdiv(vocab_size, 4 * LANES))
    # Only the last tiles of a row need a mask.
    whole = first + (tl.minimum(last, vocab_size // (4 * LANES)) - first) // TILES * TILES
    seed, position, scale = 0, 0, 0.0
    if not ALL_GREEDY:
        state = tl.maximum(tl.load(expanded_idx_mapping_ptr + row), 0)
        temperature = tl.load(temperature_ptr + state)
        # The noise comes as a log2, without ln ln 2: what every token of a row has is left out.
        scale = -LN2 * (temperature if APPLY_TEMPERATURE else (temperature != 0.0).to(tl.float32))
        seed = tl.load(seeds_ptr + state)
        position = tl.load(positions_ptr + row)
    # Of each lane's bounds: the largest, its counter, and the second largest.
    best = tl.full([TILES, LANES], float("-inf"), tl.float32)
    second = best
    best_counter = first * LANES + counter
    for tile in range(first, whole, TILES):
        best, second, best_counter = _two_best(
            best, second, best_counter, row_ptr, tile * LANES + counter, tile * (4 * LANES) + within, vocab_size,
            seed, position, purpose, scale, ALL_GREEDY, MIN_UNIFORM, LANES, False,
        )  # fmt: skip
    for tile in range(whole, last, TILES):
        best, second, best_counter = _two_best(
            best, second, best_counter, row_ptr, tile * LANES + counter, tile * (4 * LANES) + within, vocab_size,
            seed, position, purpose, scale, ALL_GREEDY, MIN_UNIFORM, LANES, True,
        )  # fmt: skip
    # Axis 0 lies within a thread.
    of_lane = tl.min(tl.where(best == tl.max(best, axis=0)[None, :], best_counter, 2147483647), axis=0)
    others = tl.max(tl.where(best_counter == of_lane[None, :], second, best), axis=0)
    lowest = tl.full([LANES], float("-inf"), tl.float32)
    top, top_token = _better(
        lowest, of_lane, row_ptr, of_lane, vocab_size, seed, position, purpose, scale, ALL_GREEDY, MIN_UNIFORM, LANES
    )
    chunk_max = tl.max(top, axis=0)
    if not ALL_GREEDY:  # noqa: SIM102, Triton must leave the inner one out where there is no noise
        if tl.max(others, axis=0) > chunk_max:
            top = lowest
            for tile in range(first, last):
                top, top_token = _better(
                    top, top_token, row_ptr, tile * LANES + lane, vocab_size, seed, position, purpose, scale,
                    ALL_GREEDY, MIN_UNIFORM, LANES,
                )  # fmt: skip
            chunk_max = tl.max(top, axis=0)
    chunk_argmax = tl.min(tl.where(top == chunk_max, top_token, 2147483647), axis=0)
    num_chunks = tl.num_programs(1)
    chunk_max_ptr += row * num_chunks
    chunk_argmax_ptr += row * num_chunks
    tl.store(chunk_max_ptr + chunk, chunk_max)
    tl.store(chunk_argmax_ptr + chunk, chunk_argmax.to(tl.int64))
    # All stores come before the one thread's release.
    tl.debug_barrier()
    if tl.atomic_add(counters_ptr + row, 1, sem="acq_rel") == num_chunks - 1:
        tl.store(counters_ptr + row, 0)
        i = tl.arange(0, CHUNKS)
        of_chunk = tl.load(chunk_max_ptr + i, mask=i < num_chunks, other=float("-inf"))
        token = tl.load(chunk_argmax_ptr + i, mask=i < num_chunks, other=9223372036854775807)
        is_best = of_chunk == tl.max(of_chunk, axis=0)
        tl.store(sampled_ptr + row, tl.min(tl.where(is_best, token, 9223372036854775807), axis=0))


@triton.jit
def _load_four(row_ptr, token, vocab_size, LANES: tl.constexpr, MASKED: tl.constexpr):
    """The logits of a counter's four tokens, of which `token` is the first."""
    if MASKED:
        x0 = tl.load(row_ptr + token, mask=token < vocab_size, other=float("-inf"))
        x1 = tl.load(row_ptr + token + LANES, mask=token + LANES < vocab_size, other=float("-inf"))
        x2 = tl.load(row_ptr + token + 2 * LANES, mask=token + 2 * LANES < vocab_size, other=float("-inf"))
        x3 = tl.load(row_ptr + token + 3 * LANES, mask=token + 3 * LANES < vocab_size, other=float("-inf"))
    else:
        x0 = tl.load(row_ptr + token)
        x1 = tl.load(row_ptr + token + LANES)
        x2 = tl.load(row_ptr + token + 2 * LANES)
        x3 = tl.load(row_ptr + token + 3 * LANES)
    return x0, x1, x2, x3


@triton.jit
def _words(seed, counter, position, purpose):
    zero = (counter * 0).to(tl.uint32)
    low, high = zero + position.to(tl.uint32), zero + (position >> 32).to(tl.uint32)
    return philox_triton(seed, counter.to(tl.uint32), low, zero + purpose.to(tl.uint32), high)


@triton.jit
def _two_best(
    best, second, best_counter, row_ptr, counter, token, vocab_size, seed, position, purpose, scale,
    ALL_GREEDY: tl.constexpr, MIN_UNIFORM: tl.constexpr, LANES: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The best bounds so far, and that of the four tokens of a counter."""
    x0, x1, x2, x3 = _load_four(row_ptr, token, vocab_size, LANES, MASKED)
    if not ALL_GREEDY:
        w0, w1, w2, w3 = _words(seed, counter, position, purpose)
        x0 = tl.fma(log2_bound_triton(w0, MIN_UNIFORM), scale, x0)
        x1 = tl.fma(log2_bound_triton(w1, MIN_UNIFORM), scale, x1)
        x2 = tl.fma(log2_bound_triton(w2, MIN_UNIFORM), scale, x2)
        x3 = tl.fma(log2_bound_triton(w3, MIN_UNIFORM), scale, x3)
    # A NaN is neither a maximum nor greater than one: it never wins, as a lane past the vocabulary does not.
    of_four = tl.maximum(tl.maximum(x0, x1), tl.maximum(x2, x3))
    second = tl.maximum(second, tl.minimum(best, of_four))
    best_counter = tl.where(of_four > best, counter, best_counter)
    return tl.maximum(best, of_four), second, best_counter


@triton.jit
def _better(
    best, best_token, row_ptr, counter, vocab_size, seed, position, purpose, scale,
    ALL_GREEDY: tl.constexpr, MIN_UNIFORM: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """The best so far, and the scores of the four tokens of a counter."""
    token = counter // LANES * (4 * LANES) + counter % LANES
    x0, x1, x2, x3 = _load_four(row_ptr, token, vocab_size, LANES, True)
    if not ALL_GREEDY:
        w0, w1, w2, w3 = _words(seed, counter, position, purpose)
        x0 = tl.fma(log2_exponential_triton(w0, MIN_UNIFORM), scale, x0)
        x1 = tl.fma(log2_exponential_triton(w1, MIN_UNIFORM), scale, x1)
        x2 = tl.fma(log2_exponential_triton(w2, MIN_UNIFORM), scale, x2)
        x3 = tl.fma(log2_exponential_triton(w3, MIN_UNIFORM), scale, x3)
    of_four = tl.maximum(tl.maximum(x0, x1), tl.maximum(x2, x3))
    word = tl.where(x0 == of_four, 0, tl.where(x1 == of_four, LANES, tl.where(x2 == of_four, 2 * LANES, 3 * LANES)))
    best_token = tl.where(of_four > best, token + word, best_token)
    return tl.maximum(best, of_four), best_token
